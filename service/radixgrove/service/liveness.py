"""Signs of life: how a process gives them, and how time counts for one that watches them.

A parent hands each child the end of a pipe (`Child.start`); while its event loop turns, the child
writes there once a second. That shows a hang which leaves the process and its sockets in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

# Seconds. Watchers look at least once a second; one that comes this late did not run meanwhile.
ABSENCE = 2.5

TICK_SECONDS = 1.0
TICK_VARIABLE = "SUPERVISOR_TICKS"  # in a child's environment: the descriptor to write to

Clock = Callable[[], float]


async def tick() -> None:
    """Show the parent, once a second, that this event loop turns. Runs until it is cancelled.

    Does nothing in a process that was started by hand.
    """
    descriptor = os.environ.pop(TICK_VARIABLE, "")
    if descriptor:
        os.set_blocking(int(descriptor), False)
    while True:
        if descriptor:
            with contextlib.suppress(OSError):  # a parent that does not read, or is gone
                os.write(int(descriptor), b".")
        await asyncio.sleep(TICK_SECONDS)


class WatchClock:
    """A monotonic clock that all but stands still while its owner does not look at it.

    A suspended machine, a frozen container or a process that was stopped wakes up with every
    deadline behind it. What was watched had no chance to give a sign of life either, or its signs
    lie unread: on this clock its time goes on from the moment of the first look.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._absent = 0.0

    def now(self) -> float:
        """Seconds of watching. Of a longer time than `ABSENCE` between two reads one second counts,
        so that a watcher which is late each time, on a machine with too much work, still judges."""
        now = self._clock()
        since = now - self._looked
        if since > ABSENCE:
            self._absent += since - TICK_SECONDS
        self._looked = now
        return now - self._absent

"""Time as a watcher counts it, who may itself have been kept from looking."""

from __future__ import annotations

import time
from collections.abc import Callable

# Seconds. Watchers look at least once a second; one that comes this late did not run meanwhile.
ABSENCE = 2.5

Clock = Callable[[], float]


class WatchClock:
    """A monotonic clock that stands still while its owner does not look at it.

    A suspended machine, a frozen container or a process that was stopped wakes up with every
    deadline behind it. What was watched had no chance to give a sign of life either, or its signs
    lie unread: on this clock its time goes on from the moment of the first look.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._looked = clock()
        self._absent = 0.0

    def now(self) -> float:
        """Seconds of watching. Whoever reads it less than once a second loses the time between."""
        now = self._clock()
        since = now - self._looked
        if since > ABSENCE:
            self._absent += since
        self._looked = now
        return now - self._absent

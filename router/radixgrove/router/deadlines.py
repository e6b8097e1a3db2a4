"""One deadline for many answers: a timer for each would cost more than its request's placement."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from radixgrove.protocol.errors import PeerError

LATE_SECONDS = 0.005  # a timer that fires so much later than it was set for is no judge


class AnswerLate(PeerError):
    """The answer did not come in time."""


class Deadlines:
    """Fails futures with `AnswerLate` that are not done `seconds` after they were watched."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._watched: deque[tuple[float, asyncio.Future[Any]]] = deque()  # in order of their ends
        self._running = False
        self._due = 0.0

    def watch(self, future: asyncio.Future[Any]) -> None:
        loop = asyncio.get_running_loop()
        self._watched.append((loop.time() + self._seconds, future))
        if not self._running:
            self._running = True
            self._look_in(loop, self._seconds)

    def _look_in(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._due = loop.time() + seconds
        loop.call_later(seconds, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop.time() - self._due > LATE_SECONDS:
            # This process was busy itself: answers may lie unread in the socket. Once more.
            self._due = loop.time()
            loop.call_later(LATE_SECONDS, self._judge, loop)
        else:
            self._judge(loop)

    def _judge(self, loop: asyncio.AbstractEventLoop) -> None:
        watched, now = self._watched, loop.time()
        while watched and (watched[0][1].done() or watched[0][0] <= now):
            _, future = watched.popleft()
            if not future.done():
                future.set_exception(AnswerLate(f"no answer within {1000 * self._seconds:.0f} ms"))
        self._running = bool(watched)
        if watched:
            self._look_in(loop, watched[0][0] - now)

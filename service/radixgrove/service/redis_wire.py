"""One connection to Redis: requests and answers in order, packed and parsed by hiredis."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from radixgrove.service.redis_rules import RedisRefused, RedisUnavailable

CALL_TIMEOUT = 3.0  # at most; half of it at least
LATE_SECONDS = 0.1  # a timer that fires so much later than it was set for is no judge
MAX_OUTSTANDING = 1 << 14
LINGER_SECONDS = 0.005  # a command with no use for its answer goes with the next, or after this

Argument = bytes | str | int | float
Command = Sequence[Argument]


class RedisWire(asyncio.Protocol):
    """Requests and answers of one connection.

    `on_lost(problem)` is called when the connection ends, `on_refused()` at every error that Redis
    answers with.
    """

    def __init__(self, on_lost: Callable[[str], None], on_refused: Callable[[], None]) -> None:
        self._reader = hiredis.Reader(replyError=RedisRefused)
        self._waiting: deque[asyncio.Future[Any] | None] = deque()
        self._given_up: dict[asyncio.Future[Any], Callable[[Any], None]] = {}
        self._answered = 0
        self._due = 0  # answers that must have come at the next look
        self._look_at = 0.0
        self._looked_late = False
        self._watchdog: asyncio.TimerHandle | None = None
        self._problem = "the connection was lost"
        self._lingering: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._look_in(CALL_TIMEOUT / 2)

    def _look_in(self, seconds: float) -> None:
        self._look_at = self._loop.time() + seconds
        self._watchdog = self._loop.call_later(seconds, self._watch)

    def _watch(self) -> None:
        """Gives the connection up when an answer was due at the last look already.

        One timer for all calls: one for each would cost more than the call. After a pause of this
        process, answers may lie unread in the socket: it looks once more.
        """
        if self._answered < self._due:
            late = self._loop.time() - self._look_at > LATE_SECONDS
            if late and not self._looked_late:
                self._looked_late = True
                self._look_in(LATE_SECONDS)
                return
            self._problem = "no answer in time"
            self.close()
            return
        self._looked_late = False
        self._due = self._answered + len(self._waiting)
        self._look_in(CALL_TIMEOUT / 2)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        try:
            while (answer := reader.gets()) is not False:
                future = self._waiting.popleft()
                self._answered += 1
                refused = isinstance(answer, RedisRefused)
                if refused:
                    self._on_refused()
                if future is None:
                    continue
                if future.done():
                    self._come_late(future, None if refused else answer)
                elif refused:
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        except (hiredis.ProtocolError, IndexError):
            self._problem = "an answer that is not Redis's"
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for timer in (self._watchdog, self._timer):
            if timer is not None:
                timer.cancel()
        for future in self._waiting:
            if future is None:
                continue
            if future.done():
                self._come_late(future, None)
            else:
                future.set_exception(RedisUnavailable(self._problem))
        self._waiting.clear()
        self._on_lost(self._problem)

    def give_up(self, future: asyncio.Future[Any], when_answered: Callable[[Any], None]) -> None:
        """The caller waits no longer, which has ended the future.

        `when_answered` is called with the answer once it is there; with None when there is none.
        """
        if future in self._waiting:
            self._given_up[future] = when_answered
        else:
            when_answered(None)

    def _come_late(self, future: asyncio.Future[Any], answer: Any) -> None:
        when_answered = self._given_up.pop(future, None)
        if when_answered is not None:
            when_answered(answer)

    def ask(self, command: Command) -> asyncio.Future[Any]:
        """Sends a command, and whatever lingers before it.

        The future has the answer, or RedisRefused, or RedisUnavailable after `CALL_TIMEOUT`.

        Raises:
            RedisUnavailable: not connected, or too many calls are under way.
        """
        future = self._loop.create_future()
        self._queue(command, future)
        self._flush()
        return future

    def ask_all(self, commands: Sequence[Command]) -> list[asyncio.Future[Any]]:
        """Sends commands at once; answers and errors as of `ask`."""
        futures = []
        for command in commands:
            future = self._loop.create_future()
            self._queue(command, future)
            futures.append(future)
        self._flush()
        return futures

    def post(self, command: Command) -> None:
        """Sends a command soon; its answer is dropped. Raises RedisUnavailable."""
        self._queue(command, None)
        if self._timer is None:
            self._timer = self._loop.call_later(LINGER_SECONDS, self._flush)

    def _queue(self, command: Command, future: asyncio.Future[Any] | None) -> None:
        if self._transport is None or len(self._waiting) >= MAX_OUTSTANDING:
            raise RedisUnavailable("not connected")
        self._waiting.append(future)
        self._lingering.append(hiredis.pack_command(tuple(command)))  # type: ignore[arg-type]

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        commands, self._lingering = self._lingering, []
        if self._transport is not None:
            self._transport.write(commands[0] if len(commands) == 1 else b"".join(commands))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

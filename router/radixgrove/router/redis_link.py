"""One multiplexed connection to Redis for the whole router process.

Placement is on every request's path: commands of concurrent requests share one socket, answers come
back in order (the protocol's own pipelining), parsing and packing are hiredis's. Redis may be away:
`call` then fails at once with `RedisUnavailable`, and the link reconnects by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection, parse_url

from radixgrove.protocol import index

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 2.0
CALL_TIMEOUT = 1.0  # at most; half of it at least
MAX_OUTSTANDING = 1 << 14
MAX_BACKOFF = 1.0
LINGER_SECONDS = 0.005  # a command nobody waits for goes with the next one, or after this long

Argument = bytes | str | int | float


class RedisUnavailable(Exception):
    """Redis cannot be asked now; the router goes on without it."""


class RedisRefused(Exception):
    """Redis answered with an error."""


class _Wire(asyncio.Protocol):
    """Requests and answers of one connection, in order."""

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._reader = hiredis.Reader(replyError=RedisRefused)
        self._waiting: deque[asyncio.Future[Any] | None] = deque()
        self._answered = 0
        self._due = 0  # answers that must have come at the next look
        self._watchdog: asyncio.TimerHandle | None = None
        self._problem = "the connection was lost"
        self._lingering: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._watch()

    def _watch(self) -> None:
        """Gives the connection up when an answer was due at the last look already.

        One timer for all calls: one for each would cost more than the call.
        """
        if self._answered < self._due:
            self._problem = "no answer in time"
            self.close()
            return
        self._due = self._answered + len(self._waiting)
        self._watchdog = self._loop.call_later(CALL_TIMEOUT / 2, self._watch)

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        try:
            while (answer := reader.gets()) is not False:
                future = self._waiting.popleft()
                self._answered += 1
                if future is None or future.done():
                    continue
                if isinstance(answer, RedisRefused):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        except (hiredis.ProtocolError, IndexError):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._watchdog is not None:
            self._watchdog.cancel()
        for future in self._waiting:
            if future is not None and not future.done():
                future.set_exception(RedisUnavailable(self._problem))
        self._waiting.clear()
        self._on_lost()

    def ask(self, *arguments: Argument) -> asyncio.Future[Any]:
        """Sends a command, and whatever lingers before it.

        The future has the answer, or RedisRefused, or RedisUnavailable after `CALL_TIMEOUT`.
        """
        future = self._loop.create_future()
        self._queue(arguments, future)
        self._flush()
        return future

    def post(self, arguments: tuple[Argument, ...]) -> None:
        """Sends a command soon; its answer is dropped."""
        self._queue(arguments, None)
        if self._timer is None:
            self._timer = self._loop.call_later(LINGER_SECONDS, self._flush)

    def _queue(self, arguments: tuple[Argument, ...], future: asyncio.Future[Any] | None) -> None:
        if self._transport is None or len(self._waiting) >= MAX_OUTSTANDING:
            raise RedisUnavailable("not connected")
        self._waiting.append(future)
        self._lingering.append(hiredis.pack_command(arguments))  # type: ignore[arg-type]

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


class RedisLink:
    """The connection, kept up by `run`, which its owner starts as a task.

    `on_change(up)` is called whenever Redis becomes usable or stops being so.
    """

    def __init__(self, url: str, on_change: Callable[[bool], None]) -> None:
        """Raises ValueError for a malformed URL."""
        self._options: dict[str, Any] = dict(parse_url(url))
        self._on_change = on_change
        self._wire: _Wire | None = None
        self._lost = asyncio.Event()
        self.up = False
        self._usable = asyncio.Event()
        self.since = 0.0  # monotonic time of the last change
        self.problem = "not connected yet"

    async def run(self) -> None:
        """Connects, again and again, until cancelled."""
        backoff = 0.05
        try:
            while True:
                try:
                    await self._connect()
                    backoff = 0.05
                    await self._lost.wait()
                    self._down("the connection was lost")
                except (OSError, TimeoutError, RedisUnavailable, RedisRefused) as error:
                    self._down(type(error).__name__ if isinstance(error, OSError) else str(error))
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF)
        finally:
            self._drop()

    async def wait_until_up(self, seconds: float) -> None:
        """Returns when Redis is usable, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._usable.wait(), seconds)

    async def call(self, *arguments: Argument) -> Any:
        """One command.

        Raises:
            RedisUnavailable: not connected, or no answer in time (the connection is given up then).
            RedisRefused: Redis answered with an error.
        """
        if self._wire is None:
            raise RedisUnavailable(self.problem)
        return await self._wire.ask(*arguments)

    async def run_script(self, name: str, keys: Sequence[str | bytes], *arguments: Argument) -> Any:
        """One of the protocol's scripts; loads it when Redis lacks it. Raises as `call` does."""
        script = index.script(name)
        command = ("EVALSHA", script.sha, len(keys), *keys, *arguments)
        try:
            return await self.call(*command)
        except RedisRefused as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
        await self.call("SCRIPT", "LOAD", script.text)
        return await self.call(*command)

    def post_script(self, name: str, keys: Sequence[str | bytes], *arguments: Argument) -> None:
        """Sends a script whose answer nobody needs; lost when Redis is away or lacks the script."""
        if self._wire is not None:
            with contextlib.suppress(RedisUnavailable):
                command = ("EVALSHA", index.script(name).sha, len(keys), *keys, *arguments)
                self._wire.post(command)

    # ---- connection ------------------------------------------------------------------------

    async def _connect(self) -> None:
        self._lost.clear()
        loop = asyncio.get_running_loop()
        options = self._options
        wire = _Wire(self._lost.set)
        async with asyncio.timeout(CONNECT_TIMEOUT):
            kind = options.get("connection_class")
            if kind is UnixDomainSocketConnection:
                await loop.create_unix_connection(lambda: wire, options["path"])
            else:
                context = ssl.create_default_context() if kind is SSLConnection else None
                host, port = options.get("host", "localhost"), int(options.get("port", 6379))
                await loop.create_connection(lambda: wire, host, port, ssl=context)
        try:
            await self._greet(wire)
        except BaseException:
            wire.close()
            raise
        self._wire = wire
        self.problem = ""
        self._turn(True)

    async def _greet(self, wire: _Wire) -> None:
        options = self._options
        if options.get("password") is not None:
            user = (options["username"],) if options.get("username") else ()
            await wire.ask("AUTH", *user, options["password"])
        if options.get("db"):
            await wire.ask("SELECT", int(options["db"]))
        memory = await wire.ask("INFO", "memory")
        for line in memory.decode("ascii", "replace").splitlines():
            name, _, value = line.partition(":")
            if name == "maxmemory_policy" and value != "noeviction":
                raise RedisRefused(
                    f"Redis has maxmemory-policy {value}; the prefix index needs noeviction"
                )
        for name in ("place", "release", "router_heartbeat"):
            await wire.ask("SCRIPT", "LOAD", index.script(name).text)

    def _down(self, problem: str) -> None:
        self._drop()
        self.problem = problem
        self._turn(False)

    def _drop(self) -> None:
        if self._wire is not None:
            wire, self._wire = self._wire, None
            wire.close()

    def _turn(self, up: bool) -> None:
        if up != self.up or not self.since:
            self.up, self.since = up, time.monotonic()
            if up:
                self._usable.set()
            else:
                self._usable.clear()
            self._on_change(up)

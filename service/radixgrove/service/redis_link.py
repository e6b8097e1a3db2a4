"""One process's link to Redis: a connection that is kept up, and the rule of when it can be used.

*Usable means that this process's own last heartbeat, on a key of its own, was accepted.* A server
that answers may still refuse writes: demoted, full, unable to save, without its replicas. Nothing
read from such a server tells who is alive, since it refuses the others' writes as well; and nothing
of another owner's, such as one key of a wrong type, makes it unusable. That one flag, `up`, drives
metrics, messages, reconnection and how leases are read.

Placement is on every request's path: commands of concurrent callers share one socket, answers come
back in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from radixgrove.protocol import index
from radixgrove.service.complaints import Complaints
from radixgrove.service.redis_rules import (
    CLUSTER,
    OF_A_CLUSTER,
    RECONNECT,
    RedisAddress,
    RedisRefused,
    RedisUnavailable,
    RedisUnsuitable,
    check_server,
    parse_info,
)
from radixgrove.service.redis_wire import Argument, RedisWire

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 3.0
MIN_BACKOFF, MAX_BACKOFF = 0.05, 1.0
HEARTBEAT_SECONDS = 1.0
DOUBT_SECONDS = 0.1  # an error asks for a heartbeat at once, but not more often than this
HEARTBEAT_LIFE_MS = 15_000
SETTLE_SECONDS = 10.0  # from usable until every other living process has renewed what it holds
CLOCK_STEP_SECONDS = 2.0  # by less, Redis's clock and ours part while an answer is under way
ROUND_TRIPS = 3
PRELOADED = ("place", "release", "router_heartbeat", "heartbeat", "read")  # called most, or posted

Keys = Sequence[str | bytes]
ScriptCall = tuple[Keys, Sequence[Argument]]


class RedisLink:
    """The connection, kept up by `run`, which its owner starts as a task.

    `on_change(up)` is called whenever Redis becomes usable or stops being so; `consequence` ends
    the message that says it is not.
    """

    def __init__(
        self,
        url: str,
        heartbeat_key: str,
        consequence: str,
        on_change: Callable[[bool], None] | None = None,
    ) -> None:
        """Raises ValueError for a malformed URL."""
        self._address = RedisAddress(url)
        self._heartbeat_key = heartbeat_key
        self._consequence = consequence
        self._on_change = on_change
        self._wire: RedisWire | None = None
        self._wake = asyncio.Event()  # the next heartbeat is due now
        self._usable = asyncio.Event()
        self._tried = asyncio.Event()
        self._attempts = 0  # at the server, that came to nothing or have ended
        self._complaints = Complaints(logger, logging.WARNING)
        self._complained = False
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._ahead: float | None = None  # of Redis's clock to the monotonic one, seconds
        self.up = False
        self.unsuitable = False  # this server is none to work with: `problem` says why
        self.since = 0.0  # monotonic time of the last change of `up`
        self.problem = "not connected yet"
        # Seconds of the fastest of the last heartbeats: what Redis takes all the time.
        self.round_trip = 0.0

    # ---- state -----------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether Redis can be read: it may be while it cannot be used."""
        return self._wire is not None

    @property
    def settled(self) -> bool:
        """Whether an expired lease proves its owner dead.

        It does not while writes are refused, nor before all have had the time to renew theirs, as
        they must where Redis's clock was set.
        """
        return self.up and time.monotonic() - self.since >= SETTLE_SECONDS

    def saw_clock(self, seconds: float) -> None:
        """What `TIME` just answered: leases end by that clock, which may be set."""
        ahead = seconds - time.monotonic()
        before, self._ahead = self._ahead, ahead
        if before is not None and abs(ahead - before) > CLOCK_STEP_SECONDS:
            self.since = time.monotonic()
            text = f"Redis's clock was set, or a pause came between, by {ahead - before:+.0f} s"
            self._complaints.say("clock", f"{text}: leases are not gone by for a moment")

    async def wait_until_up(self, seconds: float) -> None:
        """Returns when Redis is usable, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._usable.wait(), seconds)

    async def wait_until_tried(self, seconds: float) -> None:
        """Returns when the first attempt to use Redis has succeeded or failed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), seconds)

    # ---- calls -----------------------------------------------------------------------------

    async def call(self, *command: Argument) -> Any:
        """One command.

        Raises:
            RedisUnavailable: not connected, or no answer in time (the connection is given up then).
            RedisRefused: Redis answered with an error.
        """
        return await self._connection().ask(command)

    def ask_script(self, name: str, keys: Keys, *arguments: Argument) -> asyncio.Future[Any]:
        """Sends one of the protocol's scripts; the future is the caller's to end.

        It has the answer, RedisUnavailable, or RedisRefused: with NOSCRIPT when Redis lacks the
        script (`load_script`). Who ends it before `give_up`s it.

        Raises:
            RedisUnavailable: not connected.
        """
        return self._connection().ask(_evaluation(name, keys, arguments))

    def give_up(self, future: asyncio.Future[Any], when_answered: Callable[[Any], None]) -> None:
        """See `RedisWire.give_up`."""
        if self._wire is None:
            when_answered(None)
        else:
            self._wire.give_up(future, when_answered)

    def load_script(self, name: str) -> None:
        """Gives Redis a script, before whatever is sent next. Raises RedisUnavailable."""
        self._connection().post(("SCRIPT", "LOAD", index.script(name).text))

    async def run_script(self, name: str, keys: Keys, *arguments: Argument) -> Any:
        """One of the protocol's scripts; loads it when Redis lacks it. Raises as `call` does."""
        return (await self.run_scripts(name, [(keys, arguments)]))[0]

    async def run_scripts(self, name: str, calls: Sequence[ScriptCall]) -> list[Any]:
        """One script several times, in order and in one round trip. Raises as `call` does."""
        commands = [_evaluation(name, keys, arguments) for keys, arguments in calls]
        for attempt in (0, 1):
            futures = self._connection().ask_all(commands)
            answers = await asyncio.gather(*futures, return_exceptions=True)
            failed = next((a for a in answers if isinstance(a, BaseException)), None)
            if failed is None:
                return answers
            if attempt or not (isinstance(failed, RedisRefused) and failed.code == "NOSCRIPT"):
                raise failed
            # A server without the script has run none of the calls.
            await self.call("SCRIPT", "LOAD", index.script(name).text)
        raise AssertionError("unreachable")

    def post_script(self, name: str, keys: Keys, *arguments: Argument) -> None:
        """Sends a script and drops its answer; lost when Redis is away or lacks the script."""
        if self._wire is not None:
            with contextlib.suppress(RedisUnavailable):
                self._wire.post(_evaluation(name, keys, arguments))

    def _connection(self) -> RedisWire:
        if self._wire is None:
            raise RedisUnavailable(self.problem)
        return self._wire

    # ---- connection ------------------------------------------------------------------------

    async def run(self) -> None:
        """Connects, again and again, until cancelled."""
        backoff = MIN_BACKOFF
        try:
            while True:
                before = self.since
                try:
                    await self._connect()
                    await self._keep_beating()
                except (OSError, RedisUnavailable, RedisRefused) as error:
                    self.unsuitable = isinstance(error, RedisUnsuitable)
                    self._down(_describe(error))
                self._drop()
                self._attempts += 1
                if self.since != before:  # it was usable for a while
                    backoff = MIN_BACKOFF
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF)
        finally:
            self._drop()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        address = self._address
        wire = RedisWire(self._lost, self._wake.set)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                if address.path is not None:
                    await loop.create_unix_connection(lambda: wire, address.path)
                else:
                    await self._connect_to_name(wire)
            await self._greet(wire)
        except BaseException:
            wire.close()
            raise
        self._wire = wire
        self._round_trips.clear()
        self.unsuitable = False

    async def _connect_to_name(self, wire: RedisWire) -> None:
        """The name is resolved anew each time: it may stand for another server now.

        Where it stands for several, each attempt begins with the next of them: the one before
        answered nothing, or was none to use.
        """
        loop, address = asyncio.get_running_loop(), self._address
        context = address.tls()
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        first = self._attempts % len(found)
        error = OSError()
        for *_, place in found[first:] + found[:first]:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT / len(found)):
                    await loop.create_connection(
                        lambda: wire,
                        str(place[0]),
                        address.port,
                        ssl=context,
                        server_hostname=address.host if context else None,
                    )
                return
            except OSError as failed:
                error = failed
        raise error

    async def _greet(self, wire: RedisWire) -> None:
        """In one round trip: a Redis may be far away."""
        address = self._address
        commands: list[tuple[Argument, ...]] = []
        if address.password is not None:
            user = (address.username,) if address.username else ()
            commands.append(("AUTH", *user, address.password))
        if address.database:
            commands.append(("SELECT", address.database))
        commands += [("INFO", "server"), ("INFO", "memory")]
        commands += [("SCRIPT", "LOAD", index.script(name).text) for name in PRELOADED]
        answers: list[Any] = await asyncio.gather(*wire.ask_all(commands), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        info = commands.index(("INFO", "server"))
        check_server(parse_info(answers[info]) | parse_info(answers[info + 1]))

    async def _keep_beating(self) -> None:
        """Returns never; raises when the connection is lost, or leads to the wrong server."""
        while True:
            began = time.monotonic()
            try:
                await self.call("SET", self._heartbeat_key, "", "PX", HEARTBEAT_LIFE_MS)
                self._round_trips.append(time.monotonic() - began)
                self.round_trip = min(self._round_trips)
                self._turn(True)
            except RedisRefused as error:
                if error.code in RECONNECT:
                    raise
                if error.code in OF_A_CLUSTER:
                    raise RedisUnsuitable(CLUSTER) from error
                self._down(_describe(error))
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._wake.wait()
            await asyncio.sleep(max(0.0, began + DOUBT_SECONDS - time.monotonic()))

    def _lost(self, problem: str) -> None:
        if self._wire is not None:
            self._wire = None
            self._down(problem)
        self._wake.set()

    def _drop(self) -> None:
        if self._wire is not None:
            wire, self._wire = self._wire, None
            wire.close()

    def _down(self, problem: str) -> None:
        self.problem = problem
        self._turn(False)
        text = f"Redis cannot be used ({problem}): {self._consequence}"
        self._complained |= self._complaints.say("away", text)

    def _turn(self, up: bool) -> None:
        if up == self.up and self._tried.is_set():
            return
        self.up, self.since = up, time.monotonic()
        self._tried.set()
        if up:
            self.problem = ""
            self._usable.set()
            if self._complained:
                self._complained = False
                logger.warning("Redis can be used again")
        else:
            self._usable.clear()
        if self._on_change is not None:
            self._on_change(up)


def _evaluation(name: str, keys: Keys, arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    return ("EVALSHA", index.script(name).sha, len(keys), *keys, *arguments)


def _describe(error: Exception) -> str:
    """For people: of an OSError its kind and its file or text, of others their first sentence."""
    if isinstance(error, OSError):
        detail = error.filename or error.strerror
        return f"{type(error).__name__}: {detail}" if detail else type(error).__name__
    return str(error).partition(". ")[0]

"""The worker's side of the routers' index: registration, lease, load and cache events in Redis.

The agent owns one `Publisher` and hands it what the engine says; the publisher owns its link and
keeps Redis in step. Redis may be absent, go away, refuse writes or come back empty at any time:
nothing here ever blocks or fails the worker, and the index is rebuilt from the engine's snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from radixgrove.protocol import index
from radixgrove.protocol.blocks import BlockHasher
from radixgrove.protocol.keys import TIERS, ServiceKeys, services_key
from radixgrove.protocol.registry import (
    LEASE_SECONDS,
    LeaseState,
    LoadReport,
    Measured,
    Registration,
    RegistrationRefused,
    disagreement,
    new_generation,
)
from radixgrove.service.complaints import Complaints
from radixgrove.service.redis_link import RedisLink
from radixgrove.service.redis_rules import RedisRefused, RedisUnavailable
from radixgrove.service.redis_wire import Argument
from radixgrove.worker.agent.index_feed import PIPELINE_BATCHES, IndexFeed
from radixgrove.worker.messages import Admitted, CacheEvents, CacheSnapshot, EngineState, Stats

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
JOIN_SECONDS = 5.0
FIRST_TRY_SECONDS = 3.0  # for the registration at the start
LONGEST_BACKOFF = 1.0  # while Redis takes our heartbeats: what was wrong may be over
MAX_ADMITTED = 1 << 14


@dataclass(frozen=True, slots=True)
class PublisherStatus:
    """A snapshot of the publisher for status pages and metrics."""

    connected: bool
    registered: bool
    synchronised: bool  # the index in Redis follows the engine's tree
    draining: bool
    generation: str
    buffered_members: int
    resyncs: int
    dropped_members: int
    problem: str  # why it is not registered; empty when all is well


class Publisher:
    """Publishes one engine to one service's routers.

    Call `start` once; hand every `CacheEvents`, `CacheSnapshot`, `Admitted` and `Stats` of the
    engine to `apply` (never blocks); call `drain` before SIGTERM reaches the frontends, and `close`
    at the end. `request_snapshot` is called whenever the engine must send its whole tree
    (`PublishSnapshot`); it must not block. `ready` says whether the engine takes requests: the
    lease follows it.
    """

    def __init__(
        self,
        redis_url: str,
        redis_prefix: str,
        registration: Registration,
        hasher: BlockHasher,
        request_snapshot: Callable[[], None],
        ready: Callable[[], bool],
        *,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        """Raises ValueError when the registration or the URL makes no sense."""
        registration.check()
        self._registration = registration
        self._ready = ready
        self._lease_ms = int(lease_seconds * 1000)
        self._prefix = redis_prefix
        self._keys = ServiceKeys(redis_prefix, registration.service)
        self._link = RedisLink(
            redis_url,
            self._keys.heartbeat(registration.replica_id),
            "not publishing to the routers",
        )
        self._feed = IndexFeed(hasher, request_snapshot)
        self._complaints = Complaints(logger)
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

        self._generation = ""
        self._registered_ms = 0
        self._registered = False
        self._join_at = 0.0  # monotonic: into the set of services, where others may take it out
        self._superseded = False
        self._draining = False  # by itself
        self._told_to_drain = False  # by a router, until it says otherwise
        self._problem = ""

        self._stats: Stats | None = None
        self._stats_fresh = False
        self._next_heartbeat = 0.0
        self._admitted: deque[str] = deque(maxlen=MAX_ADMITTED)
        self._reported = 0  # the first of them: the last report has their prefill
        self._redis_sequence = 0

    # ---- the agent's side ------------------------------------------------------------------

    async def start(self) -> None:
        """Registers and starts publishing.

        An unreachable Redis is no error: registration follows once it is there.

        Raises:
            RegistrationRefused: the service's living replicas disagree with this one, or the
                Redis server is none to work with.
        """
        self._tasks.append(asyncio.create_task(self._link.run(), name="redis"))
        await self._link.wait_until_tried(FIRST_TRY_SECONDS)
        try:
            if self._link.unsuitable:
                raise RegistrationRefused(self._link.problem)
            if self._link.up:
                with contextlib.suppress(RedisUnavailable, RedisRefused):
                    await self._register()
        except RegistrationRefused:
            await self.close()
            raise
        self._tasks.append(asyncio.create_task(self._run(), name="publisher"))

    async def until_it_ends(self) -> None:
        """Waits as long as it publishes.

        Raises:
            Exception: what ended it, which nothing foresaw.
        """
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()

    def apply(self, message: CacheEvents | CacheSnapshot | Admitted | Stats) -> None:
        """Takes one message of the engine, in the order they came. Never blocks."""
        match message:
            case Stats():
                self._stats, self._stats_fresh = message, True
                self._reported = len(self._admitted)
            case Admitted():
                # `<reservation>:<sequence>`: the first sequence to begin ends the reservation.
                self._admitted.extend({name.rpartition(":")[0] for name in message.request_ids})
            case CacheEvents():
                self._feed.take_events(message)
            case CacheSnapshot():
                self._feed.take_snapshot(message)
        self._wake.set()

    async def drain(self) -> bool:
        """Tells placement to pass this replica by. True once Redis has confirmed it."""
        self._draining = True
        if not self._registered:
            return False
        try:
            answer = await self._link.run_script("drain", [self._keys.leases], self._generation)
        except (RedisUnavailable, RedisRefused):
            return False
        return bool(answer == index.OK)

    async def close(self) -> None:
        """Ends the lease at once, as far as Redis can be reached, and frees the connection."""
        self._closing = True
        self._wake.set()
        connection, publishing = self._tasks[:1], self._tasks[1:]
        await _end(publishing)
        if self._registered:
            with contextlib.suppress(RedisUnavailable, RedisRefused):
                await self._link.run_script(
                    "unregister",
                    [self._keys.replicas, self._keys.leases],
                    self._registration.replica_id,
                    self._generation,
                )
        self._registered = False
        await _end(connection)

    def status(self) -> PublisherStatus:
        return PublisherStatus(
            connected=self._link.up,
            registered=self._registered,
            synchronised=self._feed.synchronised and self._link.up,
            draining=self._draining or self._told_to_drain,
            generation=self._generation,
            buffered_members=self._feed.buffered,
            resyncs=self._feed.resyncs,
            dropped_members=self._feed.dropped,
            problem=self._problem or ("" if self._link.up else f"Redis: {self._link.problem}"),
        )

    # ---- keeping Redis in step -------------------------------------------------------------

    async def _run(self) -> None:
        """Until cancelled: whatever fails here is tried again, and never fails the worker."""
        backoff = 0.1
        while not self._closing:
            try:
                if not self._link.up:
                    await self._link.wait_until_up(HEARTBEAT_SECONDS)
                    self._next_heartbeat = 0.0
                    continue
                await self._turn()
                backoff = 0.1
            except RegistrationRefused as refusal:
                self._fail(str(refusal))
                await asyncio.sleep(LONGEST_BACKOFF)
            except (RedisUnavailable, RedisRefused) as error:
                self._fail(f"Redis: {error}")
                self._lose_track("a call to Redis failed")
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, LONGEST_BACKOFF)
            except Exception:
                logger.exception("publishing failed; it starts anew")
                self._registered = False
                self._lose_track("publishing failed")
                await asyncio.sleep(LONGEST_BACKOFF)

    def _fail(self, problem: str) -> None:
        self._complaints.say("failing", f"not publishing to the routers: {problem}")
        self._problem = problem
        self._next_heartbeat = 0.0

    def _lose_track(self, why: str) -> None:
        self._feed.lose_track(why)
        self._wake.set()

    async def _turn(self) -> None:
        """One round: lease and load if due, then admissions, snapshot, events; then wait."""
        if not self._registered:
            await self._register()
        now = time.monotonic()
        if self._stats_fresh or now >= self._next_heartbeat:
            await self._heartbeat(now)
        if self._registered and now >= self._join_at:
            await self._join_services(now)
        if self._registered and not self._superseded:
            await self._send_admitted()
            if self._feed.synchronised:
                await self._send_events()
            else:
                await self._synchronise()
        if not self._wake.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._wake.wait(), max(0.0, self._next_heartbeat - time.monotonic())
                )
        self._wake.clear()

    # ---- lease -----------------------------------------------------------------------------

    async def _register(self) -> None:
        self._generation = new_generation()
        self._registered_ms = int(time.time() * 1000)
        registration = msgspec.structs.replace(self._registration, generation=self._generation)
        identity = msgspec.json.encode(registration.identity(), order="deterministic")
        keys = self._keys
        answer = await self._link.run_script(
            "register",
            [keys.identity, keys.replicas, keys.leases],
            registration.replica_id,
            self._generation,
            registration.encode(),
            identity,
            self._lease_ms,
            self._report().pack(),
            int(LeaseState.DRAINING if self._told_to_drain else self._state()),
        )
        if answer[0] == index.MISMATCH:
            theirs = msgspec.json.decode(answer[1], type=dict[str, str | int])
            raise RegistrationRefused(
                f"service {registration.service!r} refuses this replica: "
                + disagreement(registration.identity(), theirs)
            )
        await self._join_services(time.monotonic())
        self._lose_track("registered anew")
        self._registered = True
        self._superseded = False
        self._problem = ""
        self._next_heartbeat = 0.0
        logger.info(
            "registered as replica %s of service %s, generation %s",
            registration.replica_id,
            registration.service,
            self._generation,
        )

    async def _join_services(self, now: float) -> None:
        """Where the operator keeps the list of services, a worker may not change it.

        A list that cannot be changed costs no lease: routers with a model table do not need it.
        """
        key, service = services_key(self._prefix), self._registration.service
        self._join_at = now + JOIN_SECONDS
        try:
            await self._link.call("SADD", key, service)
        except RedisRefused as refusal:
            if refusal.code == "NOPERM":
                self._join_at = math.inf
                return
            text = f"not among the services of routers without a model table: {refusal}"
            self._complaints.say("services", text)

    def _report(self) -> LoadReport:
        stats = self._stats
        if stats is None:
            return LoadReport(started_ms=self._registered_ms)
        return LoadReport(
            running=stats.running,
            waiting=stats.waiting,
            waiting_tokens=stats.waiting_tokens,
            pages_total=stats.pages_total,
            pages_free=stats.pages_free + stats.pages_evictable,
            started_ms=self._registered_ms,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
        )

    def _state(self) -> LeaseState:
        if self._draining:
            return LeaseState.DRAINING
        return LeaseState.READY if self._ready() else LeaseState.NOT_READY

    async def _heartbeat(self, now: float) -> None:
        stats = self._stats or _NO_STATS
        # Only a fresh report says what is left: an old one does not know of prefills begun since.
        left = stats.prefill_backlog * self._token_ms if self._stats_fresh else ""
        self._stats_fresh = False
        self._next_heartbeat = now + HEARTBEAT_SECONDS
        keys = self._keys
        answer = await self._link.run_script(
            "heartbeat",
            [keys.replicas, keys.leases, keys.load(self._generation)],
            self._registration.replica_id,
            self._generation,
            self._lease_ms,
            int(self._state()),
            self._report().pack(),
            left,
            1000.0 / stats.prefill_rate if stats.prefill_rate else "",
            msgspec.json.encode(_measured(stats)),
        )
        if answer == index.UNKNOWN:
            self._registered = False
            self._next_heartbeat = 0.0
            self._wake.set()
        elif answer == index.SUPERSEDED:
            if not self._superseded:
                logger.error(
                    "another process registered as replica %s: this one gets no requests until "
                    "that one is gone",
                    self._registration.replica_id,
                )
            self._superseded = True
            self._problem = "superseded"
        else:
            self._superseded = False
            self._problem = ""
            self._told_to_drain = answer == index.DRAINING and not self._draining

    # ---- index -----------------------------------------------------------------------------

    @property
    def _token_ms(self) -> float:
        """Milliseconds that a token's prefill takes; 0: unknown."""
        measured = self._stats.prefill_rate if self._stats is not None else 0.0
        rate = measured or self._registration.engine.prefill_tokens_per_second
        return 1000.0 / rate if rate > 0 else 0.0

    async def _send_admitted(self) -> None:
        """Ends reservations; what the last report does not have keeps the replica busy longer."""
        while self._reported:
            await self._admit(self._reported, 0.0)
        await self._admit(len(self._admitted), self._token_ms)

    async def _admit(self, count: int, token_ms: float) -> None:
        """The first `count` admissions, a bounded number at a time."""
        ids = [self._admitted.popleft() for _ in range(min(len(self._admitted), count, 1024))]
        self._reported = max(0, self._reported - len(ids)) if ids else 0
        if not ids:
            return
        keys = self._keys
        await self._link.run_script(
            "admit",
            [keys.reserved, keys.load(self._generation), keys.leases],
            self._generation,
            token_ms,
            *ids,
        )

    async def _send_events(self) -> None:
        """Sends buffered events, a few batches a round trip."""
        keys = [self._keys.leases, self._keys.sequences, *self._trees()]
        while self._feed.pending:
            calls: list[tuple[Sequence[str], Sequence[Argument]]] = []
            for batch in self._feed.cut_batches():
                before, self._redis_sequence = self._redis_sequence, self._redis_sequence + 1
                flat = [part for operation in batch for part in operation]
                calls.append((keys, [self._generation, before, self._redis_sequence, *flat]))
            if calls and not await self._apply("events", calls):
                return

    async def _synchronise(self) -> None:
        """Sends the engine's tree, once it is complete."""
        snapshot = self._feed.snapshot()
        if snapshot is None:
            return
        generation = self._generation
        beside = [self._keys.snapshot(tier, generation) for tier in TIERS]
        keys = [self._keys.leases, self._keys.sequences, *self._trees(), *beside]
        parts: list[list[Argument]] = [[generation, "begin"]]
        parts += [[generation, tier, packed] for tier, packed in snapshot.chunks()]
        for start in range(0, len(parts), PIPELINE_BATCHES):
            calls = [(keys, part) for part in parts[start : start + PIPELINE_BATCHES]]
            if not await self._apply("snapshot", calls):
                return
            await self._keep_lease()
        self._redis_sequence = 0
        if not await self._apply("snapshot", [(keys, [generation, "commit", 0])]):
            return
        if self._feed.follows(snapshot):  # else the next snapshot is on its way
            await self._send_events()

    def _trees(self) -> list[str]:
        return [self._keys.tree(tier, self._generation) for tier in TIERS]

    async def _apply(
        self, script: str, calls: Sequence[tuple[Sequence[str], Sequence[Argument]]]
    ) -> bool:
        """Whether Redis took all these updates; if not, what follows from it is set in motion."""
        for answer in await self._link.run_scripts(script, calls):
            if answer != index.OK:
                if answer == index.UNKNOWN:
                    self._registered = False
                self._lose_track("Redis " + answer.decode("ascii", "replace"))
                return False
        return True

    async def _keep_lease(self) -> None:
        """A long snapshot must not cost the lease."""
        now = time.monotonic()
        if now >= self._next_heartbeat:
            await self._heartbeat(now)


_NO_STATS = Stats(state=EngineState.LOADING, ticks=0, steps=0, step_remaining=None)


def _measured(stats: Stats) -> Measured:
    return Measured(
        prefill_tokens_per_second=stats.prefill_rate,
        host_pages_total=stats.host_pages_total,
        host_pages_used=stats.host_pages_used,
        host_cached_tokens=stats.host_cached_tokens,
    )


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""The worker's side of the routers' index: registration, lease, load and cache events in Redis.

The agent owns one `Publisher` and hands it what the engine says; the publisher owns its connection
and keeps Redis in step. Redis may be absent, go away, or come back empty at any time: nothing here
ever blocks or fails the worker, and the index is rebuilt from a snapshot of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from radixgrove.protocol import index
from radixgrove.protocol.blocks import HASH_BYTES, MEMBER_BYTES, BlockHasher, members
from radixgrove.protocol.keys import ServiceKeys, services_key
from radixgrove.protocol.registry import (
    LEASE_SECONDS,
    LeaseState,
    LoadReport,
    Registration,
    RegistrationRefused,
    disagreement,
    new_generation,
)
from radixgrove.worker.messages import (
    Admitted,
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
    Stats,
)

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
REDIS_TIMEOUT = 2.0
SNAPSHOT_TIMEOUT = 30.0  # from the request to the last chunk; then it is asked for again
MAX_BUFFERED_MEMBERS = 1 << 18  # of events; beyond it they are dropped and a snapshot replaces them
MAX_SNAPSHOT_MEMBERS = 1 << 22
MAX_ADMITTED = 1 << 14
PIPELINE_BATCHES = 16

Argument = bytes | str | int | float
Call = tuple[Sequence[str], Sequence[Argument]]  # keys, arguments
Operation = tuple[bytes, bytes]  # b"+gpu", packed members


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
        """Raises ValueError when the registration makes no sense."""
        registration.check()
        self._registration = registration
        self._hasher = hasher
        self._request_snapshot = request_snapshot
        self._ready = ready
        self._lease_ms = int(lease_seconds * 1000)
        self._prefix = redis_prefix
        self._keys = ServiceKeys(redis_prefix, registration.service)
        self._redis = Redis.from_url(
            redis_url,
            socket_timeout=REDIS_TIMEOUT,
            socket_connect_timeout=REDIS_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            single_connection_client=False,
            max_connections=4,
        )
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

        self._generation = ""
        self._registered_ms = 0
        self._connected = False
        self._registered = False
        self._superseded = False
        self._draining = False
        self._problem = ""

        self._stats: Stats | None = None
        self._stats_fresh = False
        self._next_heartbeat = 0.0
        self._admitted: deque[str] = deque(maxlen=MAX_ADMITTED)

        self._domains: dict[str, int] = {}
        self._events: deque[tuple[int, list[Operation]]] = deque()  # engine sequence, operations
        self._buffered = 0
        self._engine_sequence: int | None = None
        self._redis_sequence = 0
        self._synchronised = False
        self._snapshot: _Snapshot | None = None
        self._snapshots_due = 0  # requested of the engine and not yet answered whole
        self._resyncs = 0
        self._dropped = 0

    # ---- the agent's side ------------------------------------------------------------------

    async def start(self) -> None:
        """Registers and starts publishing.

        An unreachable Redis is no error: registration follows once it is there.

        Raises:
            RegistrationRefused: the service's living replicas disagree with this one, or the
                Redis server may evict keys.
        """
        with contextlib.suppress(RedisError, OSError):
            await self._register()
        self._task = asyncio.create_task(self._run(), name="publisher")

    def apply(self, message: CacheEvents | CacheSnapshot | Admitted | Stats) -> None:
        """Takes one message of the engine, in the order they came. Never blocks."""
        match message:
            case Stats():
                self._stats, self._stats_fresh = message, True
            case Admitted():
                # `<reservation>:<sequence>`: the first sequence to begin ends the reservation.
                self._admitted.extend({name.rpartition(":")[0] for name in message.request_ids})
            case CacheEvents():
                self._take_events(message)
            case CacheSnapshot():
                self._take_snapshot(message)
        self._wake.set()

    async def drain(self) -> bool:
        """Tells placement to pass this replica by. True once Redis has confirmed it."""
        self._draining = True
        if not self._registered:
            return False
        try:
            answer = await self._call("drain", [self._keys.leases], [self._generation])
        except (RedisError, OSError):
            return False
        return bool(answer == index.OK)

    async def close(self) -> None:
        """Ends the lease at once, as far as Redis can be reached, and frees the connection."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._registered:
            with contextlib.suppress(RedisError, OSError):
                await self._call(
                    "unregister",
                    [self._keys.replicas, self._keys.leases],
                    [self._registration.replica_id, self._generation],
                )
        self._registered = False
        await self._redis.aclose()

    def status(self) -> PublisherStatus:
        return PublisherStatus(
            connected=self._connected,
            registered=self._registered,
            synchronised=self._synchronised,
            draining=self._draining,
            generation=self._generation,
            buffered_members=self._buffered,
            resyncs=self._resyncs,
            dropped_members=self._dropped,
            problem=self._problem,
        )

    # ---- what the engine says --------------------------------------------------------------

    def _operations(self, events: Sequence[CacheEvent]) -> list[Operation]:
        operations = []
        for event in events:
            domain = self._domains.get(event.domain)
            if domain is None:
                domain = self._domains[event.domain] = self._hasher.domain64(event.domain)
            if event.hashes:
                sign = b"+" if event.stored else b"-"
                operations.append((sign + event.tier.encode(), members(event.hashes, domain)))
        return operations

    def _take_events(self, message: CacheEvents) -> None:
        expected = self._engine_sequence
        self._engine_sequence = message.sequence
        if expected is not None and message.sequence != expected + 1:
            self._lose_track("events of the engine are missing")
        operations = self._operations(message.events)
        self._events.append((message.sequence, operations))
        self._buffered += _count(operations)
        if self._buffered > MAX_BUFFERED_MEMBERS:
            self._lose_track("the event buffer is full")

    def _take_snapshot(self, message: CacheSnapshot) -> None:
        if self._snapshots_due != 1:  # the answer to a request that was given up
            self._snapshots_due -= message.last and self._snapshots_due > 0
            return
        self._snapshots_due -= message.last
        snapshot = self._snapshot
        if snapshot is None:
            return
        snapshot.sequence = message.sequence
        snapshot.operations.extend(self._operations(message.events))
        snapshot.members += sum(len(event.hashes) // HASH_BYTES for event in message.events)
        snapshot.complete = message.last
        if snapshot.members > MAX_SNAPSHOT_MEMBERS:
            logger.error("the engine's cache has too many blocks for the index")
            snapshot.operations.clear()
            snapshot.complete = False

    def _lose_track(self, why: str) -> None:
        """Forgets buffered events; a snapshot will replace them."""
        if self._synchronised:
            logger.warning("prefix index out of step: %s; sending a snapshot", why)
            self._resyncs += 1
        self._dropped += self._buffered
        self._events.clear()
        self._buffered = 0
        self._synchronised = False
        self._snapshot = None
        self._wake.set()

    # ---- keeping Redis in step -------------------------------------------------------------

    async def _run(self) -> None:
        backoff = 0.1
        while not self._closing:
            try:
                await self._turn()
                backoff = 0.1
            except RegistrationRefused as refusal:
                self._fail(str(refusal))
                await asyncio.sleep(LEASE_SECONDS)
            except (RedisError, OSError) as error:
                self._fail(f"Redis: {type(error).__name__}")
                self._lose_track("the connection to Redis was lost")
                await asyncio.sleep(backoff)
                backoff = min(backoff * 2, 2.0)

    def _fail(self, problem: str) -> None:
        if problem != self._problem:
            logger.error("not publishing to the routers: %s", problem)
        self._problem = problem
        self._connected = False

    async def _turn(self) -> None:
        """One round: lease and load if due, then admissions, snapshot, events; then wait."""
        if not self._registered:
            await self._register()
        now = time.monotonic()
        if self._stats_fresh or now >= self._next_heartbeat or not self._connected:
            await self._heartbeat(now)
        if self._registered and not self._superseded:
            await self._send_admitted()
            if self._synchronised:
                await self._send_events()
            else:
                await self._synchronise()
        if not self._wake.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._wake.wait(), max(0.0, self._next_heartbeat - time.monotonic())
                )
        self._wake.clear()

    async def _register(self) -> None:
        await self._check_server()
        self._generation = new_generation()
        self._registered_ms = int(time.time() * 1000)
        registration = msgspec.structs.replace(self._registration, generation=self._generation)
        identity = msgspec.json.encode(registration.identity(), order="deterministic")
        keys = self._keys
        answer = await self._call(
            "register",
            [keys.identity, keys.replicas, keys.leases],
            [
                registration.replica_id,
                self._generation,
                msgspec.json.encode(registration),
                identity,
                self._lease_ms,
                self._report().pack(),
                int(self._state()),
            ],
        )
        if answer[0] == index.MISMATCH:
            theirs = msgspec.json.decode(answer[1], type=dict[str, str | int])
            raise RegistrationRefused(
                f"service {registration.service!r} refuses this replica: "
                + disagreement(registration.identity(), theirs)
            )
        await self._redis.sadd(services_key(self._prefix), registration.service)
        self._lose_track("registered anew")
        self._registered = self._connected = True
        self._superseded = False
        self._problem = ""
        self._next_heartbeat = 0.0
        logger.info(
            "registered as replica %s of service %s, generation %s",
            registration.replica_id,
            registration.service,
            self._generation,
        )

    async def _check_server(self) -> None:
        memory = await self._redis.info("memory")
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise RegistrationRefused(
                f"Redis has maxmemory-policy {policy}; the prefix index needs noeviction"
            )

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
        stats = self._stats
        # Only a fresh report may say "idle": an old one does not know of prefills begun since.
        idle = self._stats_fresh and stats is not None and not (stats.running or stats.waiting)
        self._stats_fresh = False
        self._next_heartbeat = now + HEARTBEAT_SECONDS
        keys = self._keys
        answer = await self._call(
            "heartbeat",
            [keys.replicas, keys.leases, keys.load(self._generation)],
            [
                self._registration.replica_id,
                self._generation,
                self._lease_ms,
                int(self._state()),
                self._report().pack(),
                "1" if idle else "0",
            ],
        )
        self._connected = True
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
            self._draining = self._draining or answer == index.DRAINING

    async def _send_admitted(self) -> None:
        if not self._admitted:
            return
        rate = self._registration.prefill_tokens_per_second
        ids = [self._admitted.popleft() for _ in range(min(len(self._admitted), 1024))]
        keys = self._keys
        await self._call(
            "admit",
            [keys.reserved, keys.load(self._generation), keys.leases],
            [self._generation, 1000.0 / rate if rate > 0 else 0.0, *ids],
        )

    async def _send_events(self) -> None:
        """Sends buffered events, a few batches a round trip."""
        while self._events and self._synchronised:
            batches = self._cut_batches()
            keys = [
                self._keys.leases,
                self._keys.sequences,
                self._keys.tree("gpu", self._generation),
                self._keys.tree("host", self._generation),
            ]
            calls: list[Call] = []
            for batch in batches:
                before, self._redis_sequence = self._redis_sequence, self._redis_sequence + 1
                flat = [part for operation in batch for part in operation]
                calls.append((keys, [self._generation, before, self._redis_sequence, *flat]))
            if not calls:
                return
            for answer in await self._pipeline("events", calls):
                if not self._followed(answer):
                    return

    def _followed(self, answer: bytes) -> bool:
        """Whether Redis took an update; if not, what follows from it is set in motion."""
        if answer == index.OK:
            return True
        if answer == index.UNKNOWN:
            self._registered = False
        self._lose_track("Redis " + answer.decode("ascii", "replace"))
        return False

    def _cut_batches(self) -> list[list[Operation]]:
        """Takes up to `PIPELINE_BATCHES` batches off the buffer, order kept."""
        batches: list[list[Operation]] = []
        batch: list[Operation] = []
        room = index.BATCH_MEMBERS
        while self._events and len(batches) < PIPELINE_BATCHES:
            _, operations = self._events.popleft()
            self._buffered -= _count(operations)
            for kind, packed in operations:
                while packed:
                    part, packed = packed[: room * MEMBER_BYTES], packed[room * MEMBER_BYTES :]
                    room -= len(part) // MEMBER_BYTES
                    if batch and batch[-1][0] == kind:
                        batch[-1] = (kind, batch[-1][1] + part)
                    else:
                        batch.append((kind, part))
                    if room == 0:
                        batches.append(batch)
                        batch, room = [], index.BATCH_MEMBERS
        if batch:
            batches.append(batch)
        return batches

    async def _synchronise(self) -> None:
        """Asks the engine for its tree, or sends it once it is complete."""
        now = time.monotonic()
        snapshot = self._snapshot
        if snapshot is None or now > snapshot.deadline:
            # After a timeout the unanswered request counts as lost.
            self._snapshots_due = self._snapshots_due + 1 if snapshot is None else 1
            self._snapshot = _Snapshot(deadline=now + SNAPSHOT_TIMEOUT)
            self._request_snapshot()
            return
        if not snapshot.complete:
            return
        keys = [
            self._keys.leases,
            self._keys.sequences,
            *(self._keys.tree(tier, self._generation) for tier in ("gpu", "host")),
            *(self._keys.snapshot(tier, self._generation) for tier in ("gpu", "host")),
        ]
        arguments: list[list[bytes | str | int]] = [[self._generation, "begin"]]
        size = index.SNAPSHOT_CHUNK_MEMBERS * MEMBER_BYTES
        for kind, packed in snapshot.operations:
            for offset in range(0, len(packed), size):
                arguments.append([self._generation, kind[1:], packed[offset : offset + size]])
        for start in range(0, len(arguments), PIPELINE_BATCHES):
            calls = [(keys, part) for part in arguments[start : start + PIPELINE_BATCHES]]
            for answer in await self._pipeline("snapshot", calls):
                if not self._followed(answer):
                    return
            await self._keep_lease()
        self._redis_sequence = 0
        answer = await self._call("snapshot", keys, [self._generation, "commit", 0])
        if self._snapshot is not snapshot or not self._followed(answer):
            return  # a gap opened meanwhile: the next snapshot is on its way
        while self._events and self._events[0][0] <= snapshot.sequence:
            self._buffered -= _count(self._events.popleft()[1])
        self._snapshot = None
        self._synchronised = True
        await self._send_events()

    async def _keep_lease(self) -> None:
        """A long snapshot must not cost the lease."""
        now = time.monotonic()
        if now >= self._next_heartbeat:
            await self._heartbeat(now)

    # ---- Redis -----------------------------------------------------------------------------

    async def _call(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        return (await self._pipeline(name, [(keys, args)]))[0]

    async def _pipeline(self, name: str, calls: Sequence[Call]) -> list[Any]:
        """Runs one script several times in one round trip; loads it when Redis lacks it."""
        script = index.script(name)
        for attempt in (0, 1):
            pipeline = self._redis.pipeline(transaction=False)
            for keys, args in calls:
                pipeline.evalsha(script.sha, len(keys), *keys, *args)
            try:
                return await pipeline.execute()
            except NoScriptError:
                # A server without the script has run none of the calls.
                if attempt:
                    raise
                await self._redis.script_load(script.text)
        raise AssertionError("unreachable")


@dataclass(slots=True)
class _Snapshot:
    """The engine's tree on its way from the engine to Redis."""

    deadline: float  # monotonic
    sequence: int = 0
    operations: list[Operation] = field(default_factory=list)
    members: int = 0
    complete: bool = False


def _count(operations: Sequence[Operation]) -> int:
    return sum(len(packed) // MEMBER_BYTES for _, packed in operations)

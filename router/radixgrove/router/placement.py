"""Which replica gets a request, and the booking of its load there.

Registered replicas are chosen by one script in Redis, the same truth for every router. Static ones,
and all of them while Redis is away, are chosen here by the same cost: estimated milliseconds of
uncached prefill, queued prefill and running requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec

from radixgrove.protocol.blocks import MEMBER_BYTES
from radixgrove.protocol.errors import PeerError
from radixgrove.protocol.keys import ServiceKeys
from radixgrove.protocol.placing import DECODE_TOKENS, cost
from radixgrove.protocol.registry import ROUTER_LEASE_SECONDS
from radixgrove.protocol.settings import RouterSettings, RoutingPolicy
from radixgrove.router import metrics
from radixgrove.router.costs import PlacementFacts
from radixgrove.router.deadlines import AnswerLate, Deadlines
from radixgrove.router.replicas import Replica, Service
from radixgrove.service.cluster_directory import side_by_side
from radixgrove.service.complaints import Complaints
from radixgrove.service.redis_link import RedisLink
from radixgrove.service.redis_rules import RedisRefused, RedisUnavailable
from radixgrove.service.redis_wire import Argument

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
COMPARE_SECONDS = 30.0  # between looks for bookings in Redis that this router has not
_LEASE_MS = int(ROUTER_LEASE_SECONDS * 1000)
AFFINITY_BLOCKS = 16
AFFINITY_TOKENS = 256  # of load that affinity outweighs
MAX_TEMPLATES = 32  # candidate sets remembered per service
NO_CEILING = 1e15


@dataclass(slots=True)
class PlacementRequest:
    """What placement knows of a request."""

    prompt_tokens: int  # to compute where nothing is cached: what prompts share counts once
    members: bytes  # of the longest prompt's full blocks that a cache could serve, packed
    block_tokens: int
    sequences: int = 1  # choices × prompts: how many the replica will run
    length: int = 0  # tokens of its longest prompt and what follows it; 0: unknown
    # Of its other prompts: members, and how many of them prompts before it have too.
    others: list[tuple[bytes, int]] = field(default_factory=list)

    @property
    def paths(self) -> list[tuple[bytes, int]]:
        return [(self.members, 0), *self.others]


@dataclass(slots=True)
class Placement:
    """A replica, booked until `Placer.release`."""

    service: Service
    replica: Replica
    reservation: str
    matched_tokens: int
    host_tokens: int
    time_ms: float  # estimated to the first token
    decided: str  # "redis", "local" or "degraded"
    sequences: int
    generation: str = ""  # set when the booking is in Redis
    cost: float = 0.0  # of a booking made here, as lua/place.lua defines it
    work_ms: float = 0.0  # of prefill, that the booking added to the replica's queue


@dataclass(slots=True)
class _Template:
    """The constant part of a placement call for one set of candidates."""

    keys: list[bytes]
    facts: bytes
    replicas: list[Replica]


@dataclass(slots=True)
class _Bookings:
    """What this router has booked in Redis for one service."""

    keys: ServiceKeys
    requests: Counter[str] = field(default_factory=Counter)  # by generation
    open: dict[str, tuple[str, int]] = field(default_factory=dict)  # id → generation, tokens
    unanswered: set[str] = field(default_factory=set)
    compared: float = -math.inf  # monotonic; with those in Redis
    templates: dict[tuple[str, ...], _Template] = field(default_factory=dict)


class IndexLost(PeerError):
    """Redis cannot tell who is alive: leases ran out, or went, while it could not be used.

    `replicas` are those of which it cannot.
    """

    def __init__(self, replicas: list[Replica]) -> None:
        super().__init__()
        self.replicas = replicas


class Placer:
    """Places requests and keeps the books."""

    def __init__(self, settings: RouterSettings, router_id: str, link: RedisLink | None) -> None:
        self._policy = settings.policy
        self._prefix = settings.redis_prefix
        self._router_id = router_id
        self._link = link
        self._patience = settings.redis_timeout
        self._deadlines = Deadlines(settings.redis_timeout)
        self._complaints = Complaints(logger, logging.WARNING)
        self._ledgers: dict[str, _Bookings] = {}
        self._serial = itertools.count()
        self._random = random.Random()

    async def place(
        self, service: Service, ask: PlacementRequest, excluded: Iterable[Replica] = ()
    ) -> Placement | None:
        """Chooses and books; None when no replica can take the request now."""
        fitting = [
            replica
            for replica in service.replicas.values()
            if replica not in excluded and _fits(replica, ask)
        ]
        candidates = [replica for replica in fitting if replica.available()]
        if not candidates:  # requests that fail everywhere must not close a model to all others
            candidates = [replica for replica in fitting if replica.available(at_need=True)]
        candidates = self._by_policy(service, candidates)
        if not candidates:
            return None
        if self._policy is not RoutingPolicy.PREFIX:
            ask = replace(ask, members=b"", others=[])
        decision = await self._choose(service, candidates, ask)
        if decision is not None and not decision.generation:
            for members, _ in ask.paths:
                decision.replica.sent.add(members)
        return decision

    async def _choose(
        self, service: Service, candidates: list[Replica], ask: PlacementRequest
    ) -> Placement | None:
        registered = [replica for replica in candidates if replica.registration is not None]
        others = [replica for replica in candidates if replica.registration is None]
        link = self._link
        if not registered:
            return self._local(service, others, ask, "local")
        if link is not None and link.up:
            if link.round_trip <= self._patience:
                try:
                    return await self._shared(link, service, registered, others, ask)
                except (RedisUnavailable, RedisRefused, AnswerLate) as error:
                    text = f"placing requests of {service.name} without Redis: {error}"
                    self._complaints.say(service.name, text)
                except IndexLost as lost:
                    candidates = lost.replicas + others
            else:  # asking would only cost each request `redis_timeout`
                text = f"Redis takes {1000 * link.round_trip:.0f} ms: placing requests without it"
                self._complaints.say("slow", text)
        return self._local(service, candidates, ask, "degraded")

    def release(self, decision: Placement) -> None:
        """The request is over, however it ended. Call it exactly once."""
        replica = decision.replica
        replica.in_flight = max(0, replica.in_flight - decision.sequences)
        _end_work(replica, decision.work_ms)
        if not decision.generation:
            return
        ledger = self._ledgers[decision.service.name]
        ledger.open.pop(decision.reservation, None)
        ledger.requests[decision.generation] -= decision.sequences
        if ledger.requests[decision.generation] <= 0:
            del ledger.requests[decision.generation]
        self._give_back(ledger, decision.reservation, decision.generation, decision.sequences)

    def _give_back(
        self, ledger: _Bookings, reservation: str, generation: str, sequences: int
    ) -> None:
        """Ends a booking in Redis."""
        assert self._link is not None
        self._link.post_script(
            "release",
            [ledger.keys.reserved, ledger.keys.load(generation), ledger.keys.leases],
            reservation,
            generation,
            self._router_id,
            sequences,
        )

    # ---- shared ----------------------------------------------------------------------------

    async def _shared(
        self,
        link: RedisLink,
        service: Service,
        registered: list[Replica],
        others: list[Replica],
        ask: PlacementRequest,
    ) -> Placement | None:
        """Raises RedisUnavailable, RedisRefused, AnswerLate or IndexLost: Redis does not decide."""
        ledger = self._ledger(service.name)
        template = _template(ledger, service, registered)
        # Booked at once, taken back if Redis knows better: others are deciding meanwhile.
        fallback = self._local(service, others, ask, "local")
        ceiling = fallback.cost if fallback is not None else NO_CEILING
        reservation = f"{self._router_id}-{next(self._serial)}"
        try:
            answer = await self._ask(link, ledger, template, ask, reservation, ceiling)
            if answer[0] == 0 and answer[1] < len(registered) and not link.settled:
                unproven = [replica for replica in registered if not replica.leased]
                raise IndexLost(unproven if answer[1] else registered)
            if answer[0] <= 0:
                return fallback
        except BaseException:
            if fallback is not None:
                self._take_back(fallback)
            raise
        if fallback is not None:
            self._take_back(fallback)
        chosen, matched, host, booked = (int(value) for value in answer[:4])
        replica = template.replicas[chosen - 1]
        generation = replica.generation
        ledger.open[reservation] = (generation, booked)
        ledger.requests[generation] += ask.sequences
        replica.in_flight += ask.sequences
        return Placement(
            service=service,
            replica=replica,
            reservation=reservation,
            matched_tokens=matched * ask.block_tokens,
            host_tokens=host * ask.block_tokens,
            time_ms=float(answer[4]),
            decided="redis",
            sequences=ask.sequences,
            generation=generation,
        )

    async def _ask(
        self,
        link: RedisLink,
        ledger: _Bookings,
        template: _Template,
        ask: PlacementRequest,
        reservation: str,
        ceiling: float,
    ) -> list[Any]:
        """The script's answer. What it books, but says too late, is given back.

        Raises:
            RedisUnavailable, RedisRefused: there is none.
            AnswerLate: it has not come within `redis_timeout`.
        """
        arguments: list[Argument] = [
            template.facts,
            ask.members,
            self._router_id,
            reservation,
            ask.prompt_tokens,
            ask.block_tokens,
            ask.sequences,
            self._random.getrandbits(31),
            ceiling,
            _LEASE_MS,
        ]
        for members, shared in ask.others:
            arguments += (members, shared)
        ledger.unanswered.add(reservation)
        future: asyncio.Future[list[Any]] | None = None
        try:
            future = link.ask_script("place", template.keys, *arguments)
            self._deadlines.watch(future)
            try:
                answer = await future
            except RedisRefused as error:
                if error.code != "NOSCRIPT":
                    raise
                link.load_script("place")
                future = link.ask_script("place", template.keys, *arguments)
                self._deadlines.watch(future)
                answer = await future
        except (AnswerLate, asyncio.CancelledError):
            assert future is not None
            late = partial(self._came_late, ledger, template, reservation, ask.sequences)
            link.give_up(future, late)
            raise
        except BaseException:
            ledger.unanswered.discard(reservation)
            raise
        ledger.unanswered.discard(reservation)
        return answer

    def _came_late(
        self,
        ledger: _Bookings,
        template: _Template,
        reservation: str,
        sequences: int,
        answer: list[Any] | None,
    ) -> None:
        ledger.unanswered.discard(reservation)
        if answer is not None and answer[0] > 0:
            generation = template.replicas[answer[0] - 1].generation
            self._give_back(ledger, reservation, generation, sequences)

    def _ledger(self, service: str) -> _Bookings:
        ledger = self._ledgers.get(service)
        if ledger is None:
            ledger = self._ledgers[service] = _Bookings(ServiceKeys(self._prefix, service))
        return ledger

    async def heartbeat(self, services: Iterable[Service]) -> None:
        """Overwrites this router's load in Redis with absolute values, service by service.

        Raises:
            RedisUnavailable: it was not done.
        """
        link = self._link
        if link is None:
            return
        services = list(services)
        names = {service.name for service in services}
        for name, ledger in list(self._ledgers.items()):
            if name not in names and not (ledger.open or ledger.unanswered or ledger.requests):
                del self._ledgers[name]
        outcomes = await side_by_side([self._report(link, service) for service in services])
        for service, outcome in zip(services, outcomes, strict=True):
            if isinstance(outcome, RedisRefused):
                text = f"the load of service {service.name} cannot be reported: {outcome}"
                self._complaints.say(f"load {service.name}", text)
            elif isinstance(outcome, Exception):
                raise outcome

    async def _report(self, link: RedisLink, service: Service) -> None:
        ledger = self._ledger(service.name)
        generations = sorted(
            {r.generation for r in service.replicas.values() if r.registration is not None}
            | set(ledger.requests)
        )
        if not generations:
            return
        index = {generation: i + 1 for i, generation in enumerate(generations)}
        now = time.monotonic()
        compare = now - ledger.compared >= COMPARE_SECONDS
        state = {
            "generations": generations,
            "requests": [ledger.requests[generation] for generation in generations],
            "open": {
                reservation: (index[generation], tokens)
                for reservation, (generation, tokens) in ledger.open.items()
                if generation in index
            },
            "unanswered": list(ledger.unanswered),
            "compare": compare,
        }
        admitted = await link.run_script(
            "router_heartbeat",
            [
                ledger.keys.routers,
                ledger.keys.reserved,
                *(ledger.keys.load(generation) for generation in generations),
            ],
            self._router_id,
            _LEASE_MS,
            msgspec.msgpack.encode(state),
        )
        if compare:
            ledger.compared = now
        for reservation in admitted:
            ledger.open.pop(reservation.decode(), None)

    # ---- local -----------------------------------------------------------------------------

    def _by_policy(self, service: Service, candidates: list[Replica]) -> list[Replica]:
        if not candidates:
            return candidates
        if self._policy is RoutingPolicy.ROUND_ROBIN:
            service.turn += 1
            return [sorted(candidates, key=lambda r: r.id)[service.turn % len(candidates)]]
        if self._policy is RoutingPolicy.RANDOM:
            return [self._random.choice(candidates)]
        return candidates

    def _local(
        self, service: Service, candidates: Sequence[Replica], ask: PlacementRequest, decided: str
    ) -> Placement | None:
        if not candidates:
            return None
        now = time.monotonic()
        costs = [(*_cost(replica, ask, now), replica) for replica in candidates]
        lowest = min(cost for cost, _, _ in costs)
        if decided == "degraded" and ask.members:
            # Routers do not see each other's load now, but they agree on the prefix's hash.
            slowest = max(replica.token_ms for replica in candidates)
            window = lowest + AFFINITY_TOKENS * slowest
            depth = min(AFFINITY_BLOCKS, len(ask.members) // MEMBER_BYTES)
            key = ask.members[(depth - 1) * MEMBER_BYTES : depth * MEMBER_BYTES]
            near = [entry for entry in costs if entry[0] <= window]
            cost, matched, replica = max(near, key=lambda entry: _affinity(key, entry[2].id))
        else:
            near = [entry for entry in costs if entry[0] <= lowest]
            cost, matched, replica = self._random.choice(near)
        uncached = ask.prompt_tokens - matched * ask.block_tokens
        work_ms = uncached * replica.token_ms
        wait_ms = max(0.0, replica.busy_until - now) * 1000
        replica.in_flight += ask.sequences
        replica.busy_until = max(now, replica.busy_until) + work_ms / 1000
        replica.open_ms += work_ms
        return Placement(
            service=service,
            replica=replica,
            reservation=f"{self._router_id}-{next(self._serial)}",
            matched_tokens=matched * ask.block_tokens,
            host_tokens=0,
            time_ms=wait_ms + work_ms,
            decided=decided,
            sequences=ask.sequences,
            cost=cost,
            work_ms=work_ms,
        )

    @staticmethod
    def _take_back(decision: Placement) -> None:
        """Undoes a booking made here that came to nothing."""
        replica = decision.replica
        replica.in_flight = max(0, replica.in_flight - decision.sequences)
        replica.busy_until -= decision.work_ms / 1000
        replica.open_ms = max(0.0, replica.open_ms - decision.work_ms)


def _end_work(replica: Replica, work_ms: float) -> None:
    """A request's prefill is done, whatever was estimated: what others need keeps it busy."""
    if replica.in_flight == 0:
        replica.open_ms = replica.busy_until = 0.0
        return
    replica.open_ms = max(0.0, replica.open_ms - work_ms)
    replica.busy_until = min(replica.busy_until, time.monotonic() + replica.open_ms / 1000)


def count(decision: Placement, ask: PlacementRequest, seconds: float) -> None:
    """Metrics of one placement, which took so long."""
    series, model = metrics.series, decision.service.model
    metrics.PLACEMENT_SECONDS.observe(seconds)
    series(metrics.PLACEMENTS, decision.replica.id, decision.decided).inc()
    series(metrics.PROMPT_TOKENS, model).inc(ask.prompt_tokens)
    series(metrics.PREDICTED_TOKENS, model).inc(decision.matched_tokens)


def _fits(replica: Replica, ask: PlacementRequest) -> bool:
    registration = replica.registration
    return registration is None or ask.length <= registration.engine.max_model_len


def _cost(replica: Replica, ask: PlacementRequest, now: float) -> tuple[float, int]:
    """Cost (`placing.cost`) and matched blocks, by this process's own view."""
    token_ms = replica.token_ms
    matched = sum(max(0, replica.sent.match(path) - shared) for path, shared in ask.paths)
    load = max(0.0, replica.busy_until - now) * 1000 + replica.in_flight * DECODE_TOKENS * token_ms
    return cost(load, ask.prompt_tokens, matched * ask.block_tokens, token_ms), matched


def _affinity(key: bytes, replica_id: str) -> bytes:
    """Rendezvous hashing (Thaler, Ravishankar 1998): a replica that goes moves only its keys."""
    return blake2b(key + replica_id.encode(), digest_size=8).digest()


def _template(ledger: _Bookings, service: Service, replicas: list[Replica]) -> _Template:
    generations = tuple([replica.generation for replica in replicas])
    template = ledger.templates.get(generations)
    if template is None:
        if len(ledger.templates) >= MAX_TEMPLATES:
            ledger.templates.clear()
        template = ledger.templates[generations] = _make_template(ledger.keys, service, replicas)
    return template


def _make_template(keys: ServiceKeys, service: Service, replicas: list[Replica]) -> _Template:
    assert service.registration is not None
    names = [keys.leases, keys.reserved, *keys.pending, keys.routers]
    for replica in replicas:
        generation = replica.generation
        names += [keys.tree("gpu", generation), keys.tree("host", generation)]
        names.append(keys.load(generation))
    facts = PlacementFacts.of(replicas, service.registration)
    return _Template(
        [name.encode() for name in names], msgspec.msgpack.encode(facts), list(replicas)
    )

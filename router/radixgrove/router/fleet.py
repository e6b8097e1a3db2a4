"""Which replicas exist, what they serve and whether they may be used.

Registered replicas come from Redis (lease and generation), static ones from the settings (active
probes). What was registered is remembered for a while when Redis goes away or comes back empty, so
that the router keeps serving; then, too, probes tell who is alive.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable

import aiohttp
import msgspec

from radixgrove.protocol.blocks import HASH_SCHEME, BlockHasher
from radixgrove.protocol.keys import ServiceKeys, services_key
from radixgrove.protocol.model_table import ModelEntry, ModelTable, table_key
from radixgrove.protocol.openai.errors import ApiError, model_not_found, overloaded
from radixgrove.protocol.registry import (
    PROTOCOL_VERSION,
    Lease,
    LeaseState,
    Registration,
    root_fingerprint,
)
from radixgrove.protocol.settings import RouterSettings, reveal
from radixgrove.router import metrics
from radixgrove.router.demand import DemandReport
from radixgrove.router.redis_link import RedisLink, RedisRefused, RedisUnavailable
from radixgrove.router.replicas import Breaker, Replica, Service

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
PROBE_SECONDS = 1.0
PROBE_TIMEOUT = 2.0
JANITOR_SECONDS = 5.0
LEASE_GRACE_MS = 30_000  # a paused worker may come back to its sets
REMEMBER_SECONDS = 15.0  # registered replicas outlive a Redis that went or lost everything
MODEL_MEMORY_SECONDS = 300.0  # a model without replicas is away for so long, then unknown
TABLE_PATIENCE_SECONDS = 60.0  # of a new router, with an operator that does not write
MAX_REPLICAS = 1024  # of one service
MAX_RESERVATION_MS = 3_600_000


class _Listing(msgspec.Struct):
    class Model(msgspec.Struct):
        id: str

    data: list[Model]


class Fleet:
    """Owns every `Replica` and `Service` of this process."""

    def __init__(
        self,
        settings: RouterSettings,
        router_id: str,
        link: RedisLink | None,
        session: Callable[[], aiohttp.ClientSession],
    ) -> None:
        self._settings = settings
        self._link = link
        self._session = session
        self._secret = (reveal(settings.cluster_secret) or "").encode()
        self._static = [self._static_replica(text) for text in settings.replicas]
        self._registered: dict[str, dict[str, Replica]] = {}  # service → replica id → replica
        self._services: dict[str, Service] = {}
        self._by_model: dict[str, Service] = {}
        self._table: ModelTable | None = None
        self._complaints: dict[str, str] = {}
        self._refused: set[str] = set()
        self._dead: dict[str, dict[str, str]] = {}  # service → dead generation → replica id
        self._changed = asyncio.Event()
        self._next_janitor = 0.0
        self._first_poll = math.inf  # monotonic time at which Redis was first read
        self._demand = DemandReport(settings.redis_prefix, router_id)
        self._rebuild()

    # ---- looking up ------------------------------------------------------------------------

    @property
    def services(self) -> Iterable[Service]:
        return self._services.values()

    def resolve(self, model: str) -> Service:
        """The service of a model name or alias.

        Raises:
            ApiError: 404, nobody serves it; 503, this router does not know yet.
        """
        service = self._by_model.get(model)
        if service is None:
            raise model_not_found(model) if self.informed else overloaded("Starting.", 2.0)
        return service

    @property
    def informed(self) -> bool:
        """Whether this router has ever known what there is to serve.

        Where the operator's table does not come, the replicas that are there have to do.
        """
        if self._link is None or self._table is not None:
            return True
        patience = 0.0 if self._settings.model_table is None else TABLE_PATIENCE_SECONDS
        return time.monotonic() - self._first_poll >= patience

    def only_service(self) -> Service | None:
        """The service, when there is just one."""
        return next(iter(self._services.values())) if len(self._services) == 1 else None

    def find(self, replica_id: str) -> tuple[Service, Replica] | None:
        for service in self._services.values():
            if replica_id in service.replicas:
                return service, service.replicas[replica_id]
        return None

    def ready(self) -> bool:
        return any(r.ready for s in self._services.values() for r in s.replicas.values())

    async def wait_for_change(self, seconds: float) -> None:
        """Returns when replicas came, went or changed state, or after `seconds`."""
        changed = self._changed
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            pass

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- services --------------------------------------------------------------------------

    def _rebuild(self) -> None:
        """Makes services of registered and static replicas; keeps the objects that stay."""
        old, new = self._services, {}
        by_model: dict[str, Service] = {}
        listed = [entry.service for entry in self._table.entries] if self._table else []
        # Of two services that claim a name, the one that the table has first keeps it.
        for name in dict.fromkeys([*listed, *sorted(self._registered)]):
            replicas = self._registered.get(name)
            if replicas is None:
                continue
            entry = self._table_entry(name)
            models = list(entry.names) if entry else _models(replicas.values())
            known = old.get(name)
            if known is not None and known.replicas:
                known.served = time.monotonic()
            if not models and known is not None and self._remembers(name):
                models = known.models
            if not models:
                continue
            service = known or Service(name, models, created=int(time.time()))
            service.models = models
            service.off = entry is not None and entry.desired == 0 and not entry.wakes
            service.set_replicas(dict(replicas))
            new[name] = service
            for model in models:
                if by_model.setdefault(model, service) is not service:
                    self._complain(f"{name}/{model}", f"two services serve {model!r}")
        for replica in self._static:
            for model in replica.models:
                name = f"static:{model}"
                joined = by_model.get(model)
                if joined is None:
                    joined = old.get(name) or Service(name, [model], created=int(time.time()))
                    joined.set_replicas({})
                    new[name] = by_model[model] = joined
                joined.replicas[replica.id] = replica
        self._services, self._by_model = new, by_model
        self._announce()

    def _table_entry(self, service: str) -> ModelEntry | None:
        if self._table is None:
            return None
        return next((entry for entry in self._table.entries if entry.service == service), None)

    def _complain(self, key: str, problem: str) -> None:
        """Says it once, not at every poll."""
        if self._complaints.get(key) != problem:
            logger.error("%s", problem)
            self._complaints[key] = problem

    # ---- registered replicas ---------------------------------------------------------------

    async def run(self) -> None:
        """Follows Redis until cancelled."""
        while True:
            if self._link is not None and self._link.up:
                try:
                    await self._poll(self._link)
                except (RedisUnavailable, RedisRefused) as error:
                    logger.warning("cannot read the fleet from Redis: %s", error)
            self._forget_lost()
            self._count_states()
            if self._link is not None and not self._link.up:
                await self._link.wait_until_up(POLL_SECONDS)
            else:
                await asyncio.sleep(POLL_SECONDS)

    async def _poll(self, link: RedisLink) -> None:
        changed = False
        if self._settings.model_table is not None:
            changed = await self._read_table(link, self._settings.model_table)
        names = {name.decode() for name in await link.call("SMEMBERS", services_key(self._prefix))}
        if self._table is not None:
            # Asleep services have no replicas, but requests for them are held, not refused.
            names = {entry.service for entry in self._table.entries}
        for name in sorted(names):
            changed = await self._poll_service(link, name) or changed
        for name in self._registered.keys() - names:
            gone = not self._registered[name] and not self._remembers(name)
            if gone or self._table is not None:
                del self._registered[name]
                changed = True
        if changed:
            self._rebuild()
        self._first_poll = min(self._first_poll, time.monotonic())
        if self._settings.model_table is not None:
            await self._demand.send(link, self.services)
        if time.monotonic() >= self._next_janitor:
            self._next_janitor = time.monotonic() + JANITOR_SECONDS
            await self._clean(link)

    @property
    def _prefix(self) -> str:
        return self._settings.redis_prefix

    async def _read_table(self, link: RedisLink, table: str) -> bool:
        """Whether the table is another one than before."""
        data = await link.call("GET", table_key(self._prefix, table))
        if data is None:
            return False  # Redis came back empty: the operator writes it again
        before = self._table
        try:
            self._table = ModelTable.decode(data)
        except (ValueError, msgspec.DecodeError):
            self._complain("table", "the model table is malformed; the last one stays in force")
        return self._table != before

    async def _poll_service(self, link: RedisLink, name: str) -> bool:
        keys = ServiceKeys(self._prefix, name)
        registrations, packed, clock = await asyncio.gather(
            link.call("HGETALL", keys.replicas),
            link.call("HGETALL", keys.leases),
            link.call("TIME"),
        )
        now_ms = int(clock[0]) * 1000 + int(clock[1]) // 1000
        leases = _decode_leases(packed)
        known = self._registered.setdefault(name, {})
        before = {(r.id, r.generation, r.state) for r in known.values()}
        listed: dict[str, Registration] = {}
        entry = self._table_entry(name)
        for raw in registrations[1::2]:
            registration = self._accept(raw)
            if registration is None or len(listed) >= MAX_REPLICAS:
                continue
            if entry is None or registration.replica_id in entry.attempts:
                listed[registration.replica_id] = registration
        for replica_id, registration in listed.items():
            lease = leases.get(registration.generation)
            alive = lease is not None and lease.expires_ms > now_ms
            replica = known.get(replica_id)
            if not alive and (replica is None or replica.generation != registration.generation):
                continue  # a restart that died again; the one before it is gone too
            if replica is None or replica.generation != registration.generation:
                replica = known[replica_id] = self._registered_replica(registration)
            replica.lease = lease
            replica.ready = alive and lease is not None and lease.state is LeaseState.READY
            if alive:
                replica.seen = time.monotonic()
        for replica_id in known.keys() - listed.keys():
            fenced = entry is not None and replica_id not in entry.attempts
            if fenced or not self._remembering():
                del known[replica_id]
        current = {registration.generation for registration in listed.values()}
        self._dead[name] = {
            generation: ""
            for generation, lease in leases.items()
            if lease.expires_ms + LEASE_GRACE_MS < now_ms or generation not in current
        }
        for registration in listed.values():
            if registration.generation in self._dead[name]:
                self._dead[name][registration.generation] = registration.replica_id
        return before != {(r.id, r.generation, r.state) for r in known.values()}

    def _accept(self, raw: bytes) -> Registration | None:
        """A registration this router can work with; anything else is refused loudly, once."""
        try:
            registration = msgspec.json.decode(raw, type=Registration)
            registration.check()
        except (msgspec.DecodeError, ValueError):
            self._complain("malformed", "a malformed registration in Redis is ignored")
            return None
        problem = ""
        if registration.protocol_version != PROTOCOL_VERSION:
            problem = f"protocol version {registration.protocol_version}, not {PROTOCOL_VERSION}"
        elif registration.hash_scheme != HASH_SCHEME:
            problem = f"hash scheme {registration.hash_scheme}, not {HASH_SCHEME}"
        elif root_fingerprint(self.hasher(registration)) != registration.root:
            problem = "another cluster secret than this router's"
        replica_id = registration.replica_id
        if problem:
            self._refused.add(replica_id)
            self._complain(replica_id, f"replica {replica_id} is refused: it has {problem}")
            return None
        self._refused.discard(replica_id)
        self._complaints.pop(replica_id, None)
        return registration

    def hasher(self, registration: Registration) -> BlockHasher:
        return BlockHasher(self._secret, registration.namespace, registration.index_block)

    def _registered_replica(self, registration: Registration) -> Replica:
        logger.info(
            "replica %s of service %s, generation %s",
            registration.replica_id,
            registration.service,
            registration.generation,
        )
        return Replica(
            id=registration.replica_id,
            url=registration.url.rstrip("/"),
            breaker=self._breaker(),
            registration=registration,
            models=registration.models,
        )

    def _breaker(self) -> Breaker:
        return Breaker(self._settings.breaker_failures, self._settings.breaker_seconds)

    def _remembering(self) -> bool:
        """Whether Redis is away, or came back so recently that replicas may not have yet."""
        link = self._link
        return link is None or not link.up or time.monotonic() - link.since < REMEMBER_SECONDS

    def _forget_lost(self) -> None:
        """Registered replicas that a living Redis no longer speaks for."""
        if self._remembering():
            return
        oldest = time.monotonic() - REMEMBER_SECONDS
        lost = [
            (replicas, replica.id)
            for replicas in self._registered.values()
            for replica in replicas.values()
            if replica.seen < oldest
        ]
        for replicas, replica_id in lost:
            del replicas[replica_id]
        away = [name for name, replicas in self._registered.items() if not replicas]
        unknown = any(name in self._services and not self._remembers(name) for name in away)
        if lost or (unknown and self._table is None):
            self._rebuild()

    def _remembers(self, name: str) -> bool:
        """Whether a service had replicas so lately that they may come back."""
        service = self._services.get(name)
        if service is None:
            return False
        return bool(service.replicas) or time.monotonic() - service.served < MODEL_MEMORY_SECONDS

    async def _clean(self, link: RedisLink) -> None:
        """Takes away what dead generations and dead routers left in Redis."""
        for name, generations in self._dead.items():
            keys = ServiceKeys(self._prefix, name)
            for generation, replica_id in generations.items():
                await link.run_script(
                    "janitor",
                    [keys.leases, keys.replicas, keys.sequences, *keys.of_generation(generation)],
                    generation,
                    replica_id,
                    LEASE_GRACE_MS,
                )
            await link.run_script("sweep", [keys.routers, keys.reserved], MAX_RESERVATION_MS)

    # ---- static replicas, and registered ones without Redis ---------------------------------

    def _static_replica(self, text: str) -> Replica:
        model, separator, url = text.partition("=")
        if not separator or "://" in model:
            model, url = "", text
        url = url.rstrip("/")
        return Replica(
            id=url.partition("://")[2],
            url=url,
            breaker=self._breaker(),
            models=[model] if model else [],
        )

    async def probe(self) -> None:
        """Probes whoever no lease speaks for, until cancelled."""
        while True:
            targets = list(self._static)
            if self._link is not None and not self._link.up:
                targets += [r for group in self._registered.values() for r in group.values()]
            if targets:
                before = [(replica.ready, tuple(replica.models)) for replica in targets]
                await asyncio.gather(*(self._probe(replica) for replica in targets))
                if before != [(replica.ready, tuple(replica.models)) for replica in targets]:
                    self._rebuild()
            await asyncio.sleep(PROBE_SECONDS)

    async def _probe(self, replica: Replica) -> None:
        try:
            status = await self._status(replica.url + "/readyz")
            if status == 404:  # vLLM and SGLang
                status = await self._status(replica.url + "/health")
            if status == 200 and not replica.models:
                replica.models = await self._listed_models(replica)
            replica.ready = status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            replica.ready = False
        if replica.ready:
            replica.seen = time.monotonic()

    async def _status(self, url: str) -> int:
        async with self._session().get(url, timeout=_PROBE) as response:
            await response.read()
            return response.status

    async def _listed_models(self, replica: Replica) -> list[str]:
        async with self._session().get(replica.url + "/v1/models", timeout=_PROBE) as response:
            if response.status != 200:
                return []
            try:
                listing = msgspec.json.decode(await response.read(), type=_Listing)
            except msgspec.DecodeError:
                return []
            return [model.id for model in listing.data[:64]]

    # ---- management --------------------------------------------------------------------------

    async def drain(self, replica_id: str) -> None:
        """No new requests for a replica, from any router when it is registered.

        Raises:
            ApiError: 404, there is no such replica; 503, Redis cannot be told.
        """
        found = self.find(replica_id)
        if found is None:
            raise ApiError(404, f"There is no replica '{replica_id[:128]}'.", code="not_found")
        service, replica = found
        replica.drained = True
        if replica.registration is not None and self._link is not None:
            keys = ServiceKeys(self._prefix, service.name)
            try:
                await self._link.run_script("drain", [keys.leases], replica.generation)
            except (RedisUnavailable, RedisRefused):
                raise ApiError(
                    503,
                    "Redis is away: only this router process drains the replica.",
                    type="server_error",
                    code="service_unavailable",
                ) from None
        self._rebuild()

    def _count_states(self) -> None:
        metrics.REFUSED_REPLICAS.set(len(self._refused))
        for service in self._services.values():
            states = [replica.state for replica in service.replicas.values()]
            for state in ("ready", "draining", "broken", "not-ready"):
                metrics.REPLICAS.labels(service.model, state).set(states.count(state))


_PROBE = aiohttp.ClientTimeout(total=PROBE_TIMEOUT)


def _models(replicas: Iterable[Replica]) -> list[str]:
    """All names under which registered replicas serve; the common id first."""
    return list(dict.fromkeys(name for replica in replicas for name in replica.models))


def _decode_leases(packed: list[bytes]) -> dict[str, Lease]:
    leases = {}
    for generation, record in zip(packed[::2], packed[1::2], strict=True):
        try:
            leases[generation.decode()] = Lease.unpack(record)
        except ValueError:
            logger.warning("a malformed lease in Redis is ignored")
    return leases

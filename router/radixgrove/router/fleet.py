"""Which replicas exist, what they serve and whether they may be used.

Registered replicas come from Redis (`registered`), static ones from the settings. Those that no
lease speaks for, all static ones and registered ones while Redis is away, are probed (`probing`);
so are those where requests failed, or wait though the lease has ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

import aiohttp
import msgspec

from radixgrove.protocol import index
from radixgrove.protocol.keys import ServiceKeys
from radixgrove.protocol.openai.errors import ApiError, model_not_found, overloaded
from radixgrove.protocol.registry import LeaseState
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router import metrics
from radixgrove.router.demand import DemandReport
from radixgrove.router.probing import Probe, Prober
from radixgrove.router.recovery import NO_RESOURCES, Failure
from radixgrove.router.registered import RegisteredReplicas
from radixgrove.router.replicas import SILENT_SECONDS, Breaker, Replica, Service, static_address
from radixgrove.service.complaints import Complaints
from radixgrove.service.redis_link import RedisLink
from radixgrove.service.redis_rules import RedisRefused, RedisUnavailable

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
MODEL_MEMORY_SECONDS = 300.0  # a model without replicas is away for so long, then unknown
MEMORY_SECONDS = 600.0  # counts of a replica or model that is gone have been scraped by then
TABLE_PATIENCE_SECONDS = 60.0  # of a new router, with an operator that does not write


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
        self._registered = (
            RegisteredReplicas(settings, link, self._remembers) if link is not None else None
        )
        self._static = [self._static_replica(text) for text in settings.replicas]
        self._services: dict[str, Service] = {}
        self._by_model: dict[str, Service] = {}
        self._complaints = Complaints(logger)
        self._changed = asyncio.Event()
        self._counted: set[str] = set()  # models of which the gauge has values
        # Monotonic times, by replica id and by model.
        self._last_there: dict[str, float] = {}
        self._last_served: dict[str, float] = {}
        self._demand = DemandReport(settings.redis_prefix, router_id)
        self._prober = Prober(session, self._to_probe, self._noticed)
        self._departed: set[Replica] = set()  # with requests that are not over
        self._rebuild()

    # ---- looking up ------------------------------------------------------------------------

    @property
    def services(self) -> Iterable[Service]:
        return self._services.values()

    def listed(self) -> list[str]:
        """Names of the services in the model table; none where there is none."""
        table = self._registered.table if self._registered is not None else None
        return [entry.service for entry in table.entries] if table is not None else []

    def resolve(self, model: str) -> Service:
        """The service of a model name or alias.

        Raises:
            ApiError: 404, no service has it; 503, this router does not know yet.
        """
        service = self._by_model.get(model)
        if service is None:
            raise model_not_found(model) if self.informed else overloaded(self.starting, 2.0)
        return service

    @property
    def informed(self) -> bool:
        """Whether this router has ever known what there is to serve.

        Where the operator's table does not come, the replicas that are there have to do.
        """
        registered = self._registered
        if registered is None or registered.table is not None:
            return True
        patience = 0.0 if self._settings.model_table is None else TABLE_PATIENCE_SECONDS
        return time.monotonic() - registered.first_poll >= patience

    @property
    def starting(self) -> str:
        """What is said while this router is not informed."""
        unusable = self._link is not None and not self._link.up
        return "Starting: Redis cannot be used yet." if unusable else "Starting."

    def only_service(self) -> Service | None:
        """The service, when there is just one."""
        return next(iter(self._services.values())) if len(self._services) == 1 else None

    def find(self, name: str) -> list[tuple[Service, Replica]]:
        """A replica by its id, or all of a group."""
        return [
            (service, replica)
            for service in self._services.values()
            for replica in service.replicas.values()
            if name in (replica.id, replica.group)
        ]

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
        new: dict[str, Service] = {}
        by_model: dict[str, Service] = {}
        if self._registered is not None:
            # Of two services that claim a name, the one that the table has first keeps it.
            for name in dict.fromkeys([*self.listed(), *sorted(self._registered.services)]):
                service = self._registered_service(name)
                if service is None:
                    continue
                new[name] = service
                for model in (*service.models, *service.scoped):
                    if by_model.setdefault(model, service) is not service:
                        text = f"two services serve {model!r}"
                        self._complaints.say(f"{name}/{model}", text)
        for replica in self._static:
            for model in replica.models:
                name = f"static:{model}"
                joined = by_model.get(model)
                if joined is None:
                    joined = self._services.get(name)
                    joined = joined or Service(name, [model], created=int(time.time()))
                    joined.set_replicas({})
                    new[name] = by_model[model] = joined
                joined.replicas[replica.id] = replica
        before, self._services, self._by_model = self._services, new, by_model
        self._departed = (self._departed | _replicas(before)) - _replicas(new)
        self._announce()

    def _registered_service(self, name: str) -> Service | None:
        """None where there is nothing to serve, or nothing is known of it yet."""
        assert self._registered is not None
        replicas = self._registered.services.get(name)
        if replicas is None:
            return None
        entry = self._registered.entry(name)
        models = list(entry.names) if entry else _models(replicas.values())
        known = self._services.get(name)
        if known is not None and known.replicas:
            known.served = time.monotonic()
        if not models and known is not None and self._remembers(name):
            models = known.models
        if not models:
            return None
        service = known or Service(name, models, created=int(time.time()))
        service.models = models
        service.scoped = list(entry.scoped) if entry else []
        service.off = entry is not None and entry.desired == 0 and not entry.wakes
        service.set_replicas(dict(replicas))
        return service

    def _remembers(self, name: str) -> bool:
        """Whether a service had replicas so lately that they may come back."""
        service = self._services.get(name)
        if service is None:
            return False
        return bool(service.replicas) or time.monotonic() - service.served < MODEL_MEMORY_SECONDS

    def _static_replica(self, text: str) -> Replica:
        model, url = static_address(text)
        return Replica(
            id=url.partition("://")[2],
            url=url,
            breaker=Breaker(self._settings.breaker_failures, self._settings.breaker_seconds),
            models=[model] if model else [],
        )

    # ---- following -------------------------------------------------------------------------

    async def run(self) -> None:
        """Follows Redis until cancelled."""
        link = self._link
        while True:
            if link is not None and self._registered is not None:
                await self._follow(link, self._registered)
            self._count_states()
            if link is not None and not link.up:
                await link.wait_until_up(POLL_SECONDS)
            else:
                await asyncio.sleep(POLL_SECONDS)

    async def _follow(self, link: RedisLink, registered: RegisteredReplicas) -> None:
        try:
            if link.connected and await registered.poll():
                self._rebuild()
            if link.up and self._settings.model_table is not None:
                await self._demand.send(link, self.services)
        except (RedisUnavailable, RedisRefused) as error:
            self._complaints.say("poll", f"the fleet cannot be followed in Redis: {error}")
        lost = registered.forget_lost()
        away = [name for name, replicas in registered.services.items() if not replicas]
        unknown = any(name in self._services and not self._remembers(name) for name in away)
        if lost or (unknown and registered.table is None):
            self._rebuild()

    # ---- failures and probes -----------------------------------------------------------------

    def failed(self, replica: Replica, failure: Failure) -> None:
        """A request failed there: it is asked at once whether it serves."""
        if failure is NO_RESOURCES:
            return
        replica.doubted = time.monotonic()
        self._prober.hurry()
        if failure.blame:
            replica.breaker.failed(unreachable=failure.unreachable, answered=failure.answered)
            metrics.FAILURES.labels(replica.id, failure.reason).inc()

    async def probe(self) -> None:
        """Asks replicas for which no lease speaks, or that are in doubt, until cancelled."""
        await self._prober.run()

    def _to_probe(self) -> set[Replica]:
        self._departed = {replica for replica in self._departed if replica.in_flight}
        targets = self._departed.union(self._static)
        if self._registered is not None:
            targets.update(self._registered.unproven())
        for service in self._services.values():
            for replica in service.replicas.values():
                if replica.doubtful or (replica.in_flight and self._lapsed(replica)):
                    targets.add(replica)
        return targets

    def _lapsed(self, replica: Replica) -> bool:
        """Whether its lease has ended, or it is not known any more."""
        if replica.registration is None or self._registered is None:
            return False
        return replica in self._departed or self._registered.has_lapsed(replica)

    def _is_ready_if_it_says_so(self, replica: Replica) -> bool:
        if replica.registration is None or self._registered is None:
            return True
        return self._registered.is_unproven(replica)

    def _noticed(self, replica: Replica, probe: Probe) -> None:
        if self._is_ready_if_it_says_so(replica):
            changed = replica.ready != probe.serves or bool(probe.models)
            replica.ready = probe.serves
            replica.models = replica.models or probe.models
            if probe.serves:
                replica.seen = probe.sent
            if changed:
                self._rebuild()
        doubtful = replica.doubtful
        if probe.serves:
            replica.proven = probe.sent
            if doubtful and not replica.in_doubt:
                replica.breaker.reached()
                self._announce()
        if probe.answered:
            replica.silent_since = math.inf
            return
        replica.silent_since = min(replica.silent_since, probe.sent)
        silent = time.monotonic() - replica.silent_since
        if silent >= SILENT_SECONDS or self._lapsed(replica):
            replica.give_up_waiting()

    # ---- management --------------------------------------------------------------------------

    async def drain(self, name: str) -> None:
        """No new requests for a replica, or a group, from any router when it is registered.

        Raises:
            ApiError: 404, there is no such replica; 503, Redis takes no writes.
        """
        await self._set_drained(name, True)

    async def undrain(self, name: str) -> None:
        """What was drained gets requests again. Raises ApiError as `drain`."""
        await self._set_drained(name, False)

    async def _set_drained(self, name: str, drained: bool) -> None:
        found = self.find(name)
        if not found:
            raise ApiError(404, f"There is no replica '{name[:128]}'.", code="not_found")
        for _, replica in found:
            replica.drained = drained
        try:
            for service, replica in found:
                if replica.registration is not None and self._link is not None:
                    await self._set_lease_drained(self._link, service, replica, drained)
        finally:
            self._rebuild()

    async def _set_lease_drained(
        self, link: RedisLink, service: Service, replica: Replica, drained: bool
    ) -> None:
        keys = ServiceKeys(self._settings.redis_prefix, service.name)
        script = "drain" if drained else "undrain"
        try:
            answer = await link.run_script(script, [keys.leases], replica.generation)
        except (RedisUnavailable, RedisRefused):
            raise ApiError(
                503,
                f"Redis is away: only this router process {script}s the replica.",
                type="server_error",
                code="service_unavailable",
            ) from None
        if answer != index.OK:  # no lease says so: this process alone knows
            return
        # From here on its lease says so, to every process of every router.
        replica.drained = False
        state = LeaseState.DRAINING if drained else LeaseState.READY
        if replica.lease is not None and (drained or replica.lease.state is LeaseState.DRAINING):
            replica.lease = msgspec.structs.replace(replica.lease, state=state)
            replica.ready = not drained

    def _count_states(self) -> None:
        registered = self._registered
        metrics.REFUSED_REPLICAS.set(registered.refused if registered is not None else 0)
        counts = {service.model: [0] * len(metrics.STATES) for service in self._services.values()}
        now = time.monotonic()
        for service in self._services.values():
            self._last_served[service.model] = now
            for replica in service.replicas.values():
                counts[service.model][metrics.STATES.index(replica.state)] += 1
                self._last_there[replica.id] = now
        for name in _gone(self._last_there, now):
            metrics.forget_replica(name)
        for model in _gone(self._last_served, now):
            metrics.forget_counts(model)
        for model in self._counted - counts.keys():
            metrics.forget_model(model)
        for model, values in counts.items():
            for state, value in zip(metrics.STATES, values, strict=True):
                metrics.REPLICAS.labels(model, state).set(value)
        self._counted = set(counts)


def _replicas(services: Mapping[str, Service]) -> set[Replica]:
    return {replica for service in services.values() for replica in service.replicas.values()}


def _models(replicas: Iterable[Replica]) -> list[str]:
    """All names under which registered replicas serve; the common id first."""
    return list(dict.fromkeys(name for replica in replicas for name in replica.models))


def _gone(last: dict[str, float], now: float) -> list[str]:
    """Takes out what has not been there for long."""
    names = [name for name, at in last.items() if at < now - MEMORY_SECONDS]
    for name in names:
        del last[name]
    return names

"""Takes away what the dead left in Redis, and says how full it is.

Every key has an owner and an end: a generation's sets, its load and its lease end with it; what a
service has beside them ends with its last generation, whether or not a model table lists it;
what routers write ends with their heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from radixgrove.protocol.keys import ServiceKeys, services_key
from radixgrove.router import metrics
from radixgrove.service.cluster_directory import ClusterDirectory, ServiceRecord, side_by_side
from radixgrove.service.complaints import Complaints
from radixgrove.service.redis_link import RedisLink
from radixgrove.service.redis_rules import RedisRefused, RedisUnavailable, parse_info

logger = logging.getLogger(__name__)

JANITOR_SECONDS = 5.0
LEASE_GRACE_SECONDS = 20.0  # a paused worker may come back to its sets
MAX_RESERVATION_MS = 3_600_000


class Janitor:
    """Any number of routers may have one: the scripts look again before they take anything."""

    def __init__(
        self,
        link: RedisLink,
        prefix: str,
        listed: Callable[[], Collection[str]] = tuple,
        service: str | None = None,
    ) -> None:
        """
        Args:
            listed: services of the model table, which need not be among those in Redis.
            service: this router may touch its keys alone; None: it may touch all.
        """
        self._listed = listed
        self._service = service
        self._link = link
        self._prefix = prefix
        self._directory = ClusterDirectory(link, prefix)
        self._complaints = Complaints(logger)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            if self._link.up:
                try:
                    await self.measure()
                    await self.clean()
                except (RedisUnavailable, RedisRefused) as error:
                    self._complaints.say("clean", f"Redis is not cleaned up: {error}")
            await asyncio.sleep(JANITOR_SECONDS)

    async def measure(self) -> None:
        """Raises RedisUnavailable, RedisRefused."""
        keys, memory = await asyncio.gather(
            self._link.call("DBSIZE"), self._link.call("INFO", "memory")
        )
        info = parse_info(memory)
        metrics.REDIS_KEYS.set(keys)
        metrics.REDIS_BYTES.set(float(info.get("used_memory", 0)))
        metrics.REDIS_MAX_BYTES.set(float(info.get("maxmemory", 0)))
        metrics.REDIS_SECONDS.set(self._link.round_trip)

    async def clean(self) -> None:
        """Raises RedisUnavailable, RedisRefused: the services cannot be read."""
        records = await self._directory.records(await self._names())
        work = [
            self._clean_service(name, record)
            for name, record in records.items()
            if isinstance(record, ServiceRecord)
        ]
        for outcome in await side_by_side(work):
            if isinstance(outcome, Exception):
                self._complaints.say("service", f"a service in Redis is not cleaned up: {outcome}")

    async def _names(self) -> set[str]:
        if self._service is not None:
            return {self._service}
        try:
            names, unreadable = await self._directory.services()
        except RedisRefused as error:
            self._complaints.say("services", f"the services cannot be read from Redis: {error}")
            return set(self._listed())
        if unreadable:  # no part of ours writes such a name
            await self._link.call("SREM", services_key(self._prefix), *unreadable)
        return names.union(self._listed())

    async def _clean_service(self, name: str, record: ServiceRecord) -> None:
        keys = ServiceKeys(self._prefix, name)
        owners = {r.generation: r.replica_id for r in record.registrations.values()}
        dead = [
            generation
            for generation, lease in record.leases.items()
            if self._is_dead(lease.expires_ms, record.now_ms)
        ]
        for generation in dead:
            await self._link.run_script(
                "janitor",
                [keys.leases, keys.replicas, keys.sequences, *keys.of_generation(generation)],
                generation,
                owners.get(generation, ""),
                int(LEASE_GRACE_SECONDS * 1000),
            )
        if len(dead) < len(record.leases):
            await self._link.run_script("sweep", [keys.routers, keys.reserved], MAX_RESERVATION_MS)
        else:
            own = keys.of_service()
            shared = [] if self._service is not None else [services_key(self._prefix)]
            await self._link.run_script("retire", [*own, *shared], name, len(own))

    def _is_dead(self, expires_ms: float, now_ms: int) -> bool:
        """Replaced, left, or expired for long: while Redis could be used all the time, that is."""
        if expires_ms <= 0:
            return True
        usable = time.monotonic() - self._link.since
        grace = LEASE_GRACE_SECONDS
        return usable >= grace and expires_ms + 1000 * grace < now_ms

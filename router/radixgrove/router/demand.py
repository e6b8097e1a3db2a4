"""What a router tells the operator's autoscaler: how many requests want for a replica."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable

from radixgrove.protocol.keys import ServiceKeys
from radixgrove.protocol.model_table import DEMAND_SECONDS, Demand
from radixgrove.router.replicas import Service
from radixgrove.service.cluster_directory import side_by_side
from radixgrove.service.complaints import Complaints
from radixgrove.service.redis_link import RedisLink
from radixgrove.service.redis_rules import RedisRefused

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 2.0
_LIFE_MS = 60_000  # of a service's demand that no router reports any more


class DemandReport:
    """One router's fields in services' demand: there while it holds requests, and only then."""

    def __init__(self, prefix: str, router_id: str) -> None:
        self._prefix = prefix
        self._router_id = router_id
        self._complaints = Complaints(logger)
        self._told: dict[str, float] = {}  # monotonic time of the last report, by service

    async def send(self, link: RedisLink, services: Iterable[Service]) -> None:
        """Reports a new demand at once, one that lasts every few seconds, and its end.

        What Redis refuses of one service leaves the others alone.

        Raises:
            RedisUnavailable: not published; the next call tries again.
        """
        now = time.monotonic()
        wanted = {service.name: _demand(service, now) for service in services}
        due = [
            self._report(link, name, held, now)
            for name, held in wanted.items()
            if held and now - self._told.get(name, 0.0) >= _REPORT_SECONDS
        ]
        ended = [self._end(link, name) for name in self._told if not wanted.get(name)]
        for outcome in await side_by_side([*due, *ended]):
            if isinstance(outcome, RedisRefused):
                self._complaints.say("demand", f"a service's demand is not reported: {outcome}")
            elif outcome is not None:
                raise outcome

    async def _report(self, link: RedisLink, name: str, held: int, now: float) -> None:
        seconds, _ = await link.call("TIME")
        demand = Demand(held=held, at_ms=int(seconds) * 1000)
        key = self._key(name)
        await asyncio.gather(
            link.call("HSET", key, self._router_id, demand.encode()),
            link.call("PEXPIRE", key, _LIFE_MS),
        )
        self._told[name] = now

    async def _end(self, link: RedisLink, name: str) -> None:
        await link.call("HDEL", self._key(name), self._router_id)
        del self._told[name]

    def _key(self, service: str) -> str:
        return ServiceKeys(self._prefix, service).demand


def _demand(service: Service, now: float) -> int:
    """Requests held now; one for a while after the last was given up, so that it still wakes the
    service."""
    if service.held or any(replica.available() for replica in service.replicas.values()):
        return service.held
    return int(now - service.last_held < DEMAND_SECONDS)

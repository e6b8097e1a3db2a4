"""What the operator keeps and reads in Redis: the model tables, leases, load and demand.

Redis away is no reason to stop: the cluster is looked after, and a condition says what is missing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

import redis

from radixgrove.operator.planning.autoscale import Load
from radixgrove.protocol.keys import ServiceKeys, services_key
from radixgrove.protocol.model_table import (
    SHARED,
    Demand,
    ModelEntry,
    ModelTable,
    table_key,
    total_demand,
)
from radixgrove.protocol.registry import LeaseState
from radixgrove.service.cluster_directory import BlockingDirectory
from radixgrove.service.redis_client import WrongType, ask
from radixgrove.service.redis_rules import RedisUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FORGET_DEMAND_MS = 60_000
_EXPECT_SECONDS = 60.0


class RedisStore:
    """Thread-safe; every call has the client's timeout."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._directory = BlockingDirectory(client, prefix)
        self._lock = threading.Lock()
        # By table and service: when the resource was created, and its entry. Older ones come first.
        self._tables: dict[str, dict[str, tuple[float, ModelEntry]]] = {}
        self._expected: set[str] = set()
        self._expected_until = 0.0  # monotonic

    # ---- model tables ----------------------------------------------------------------------------

    def expect(self, services: Collection[str]) -> None:
        """Before anything else: where Redis has no shared table, the first one waits for these.

        Routers drop what a table does not list: a new leader must not write half of it.
        """
        self._expected = set(services)
        self._expected_until = time.monotonic() + _EXPECT_SECONDS

    def put(self, table: str, created: float, entry: ModelEntry) -> None:
        """Routers serve what `entry` lists. Raises RedisUnavailable: they do not know yet."""
        with self._lock:
            entries = self._table(table)
            awaited = entry.service in self._expected
            self._expected.discard(entry.service)
            for name, others in list(self._tables.items()):
                if name != table and entry.service in others:
                    del others[entry.service]
                    self._write(name)
            before = entries.get(entry.service)
            if before == (created, entry):
                return
            entries[entry.service] = (created, entry)
            try:
                self._write(table)
            except RedisUnavailable:
                # Not known to routers, so not known here: the next call tries again.
                del entries[entry.service]
                if awaited:
                    self._expected.add(entry.service)
                raise

    def drop(self, service: str) -> None:
        """Routers forget the service. Raises RedisUnavailable."""
        with self._lock:
            self._table(SHARED)
            self._expected.discard(service)
            for table, entries in list(self._tables.items()):
                if service in entries:
                    self._leave_to_janitors([service])
                    del entries[service]
                    self._write(table)

    def keep_only(self, services: Collection[str]) -> None:
        """Forgets deleted services, also those that a former leader wrote."""
        with self._lock:
            self._table(SHARED)
            for table in self._dedicated():
                self._table(table)
            for table, entries in list(self._tables.items()):
                gone = entries.keys() - set(services)
                self._leave_to_janitors(gone)
                for service in gone:
                    del entries[service]
                if gone or (table != SHARED and not entries):
                    self._write(table)

    def _leave_to_janitors(self, services: Collection[str]) -> None:
        """What no table lists is found in the set of services, into which workers may not write."""
        if not services:
            return
        key = services_key(self._prefix)
        try:
            self._call(partial(self._client.sadd, key, *services))
        except WrongType:
            self._call(partial(self._client.delete, key))
            self._call(partial(self._client.sadd, key, *services))

    def _dedicated(self) -> list[str]:
        """Tables of dedicated routers, those that a former leader wrote among them."""
        prefix = table_key(self._prefix, "")
        scan = partial(self._client.scan_iter, match=f"{prefix}*", count=1000)
        names = [key.decode().removeprefix(prefix) for key in self._call(lambda: list(scan()))]
        return [name for name in names if name != SHARED]

    def rewrite(self) -> None:
        """Puts back what a Redis that lost its memory misses."""
        with self._lock:
            for table in list(self._tables):
                if self._stored(table) != self._encoded(table):
                    self._write(table)

    def _table(self, table: str) -> dict[str, tuple[float, ModelEntry]]:
        """Entries of a former leader stay until their service has been looked at."""
        if table in self._tables:
            return self._tables[table]
        old: list[ModelEntry] = []
        try:
            found = self._directory.table(table)
        except (ValueError, WrongType):
            logger.warning("the model table %s was malformed and is made anew", table)
            found = ModelTable(entries=[])
        if found is not None:
            old = found.entries
            if table == SHARED:
                self._expected.clear()
        entries = {entry.service: (float(place), entry) for place, entry in enumerate(old)}
        return self._tables.setdefault(table, entries)

    def _stored(self, table: str) -> object:
        try:
            return self._call(partial(self._client.get, self._key(table)))
        except WrongType:  # which is overwritten
            return None

    def _write(self, table: str) -> None:
        if table == SHARED and self._expected and time.monotonic() < self._expected_until:
            return  # `rewrite` comes by
        if table != SHARED and not self._tables[table]:  # its router goes with its service
            self._call(partial(self._client.delete, self._key(table)))
            del self._tables[table]
        else:
            self._call(partial(self._client.set, self._key(table), self._encoded(table)))

    def _encoded(self, table: str) -> bytes:
        entries = sorted(self._tables[table].items(), key=lambda item: (item[1][0], item[0]))
        return ModelTable(entries=[entry for _, (_, entry) in entries]).encode()

    def _key(self, table: str) -> str:
        return table_key(self._prefix, table)

    # ---- leases and load -------------------------------------------------------------------------

    def holds_lease(self, service: str, group: str) -> bool:
        """Whether that group's worker still renews a lease. Raises RedisUnavailable."""
        record = self._directory.service(service)
        return any(record.lease_of(member) is not None for member in record.members(group))

    def members(self, service: str) -> dict[str, dict[str, LeaseState]]:
        """By group, the replicas that hold leases, and what those say. Raises RedisUnavailable."""
        record = self._directory.service(service)
        found: defaultdict[str, dict[str, LeaseState]] = defaultdict(dict)
        for member in sorted(record.registrations.values(), key=lambda member: member.dp_rank):
            if (lease := record.lease_of(member)) is not None:
                found[member.group][member.replica_id] = lease.state
        return dict(found)

    def load(self, service: str, serving: Collection[str]) -> Load:
        """Load over the groups in `serving` that hold leases. Raises RedisUnavailable."""
        record = self._directory.service(service)
        reports, slots = [], []
        for group in serving:
            leases = [
                (member, lease)
                for member in record.members(group)
                if (lease := record.lease_of(member)) and lease.state is LeaseState.READY
            ]
            reports += [lease.report for _, lease in leases]
            if leases:
                slots.append(sum(member.engine.max_running for member, _ in leases))
        used = [1 - r.pages_free / r.pages_total for r in reports if r.pages_total]
        return Load(
            replicas=len(slots),
            running=sum(report.running for report in reports),
            waiting=sum(report.waiting for report in reports),
            held=self._held(service, record.now_ms),
            kv_used=sum(used) / len(used) if used else 0.0,
            slots=min(slots, default=0),
        )

    def _held(self, service: str, now_ms: int) -> int:
        key = ServiceKeys(self._prefix, service).demand
        try:
            raw = self._directory.demand(service)
        except WrongType:
            logger.warning("the demand in Redis was no hash; routers report it anew")
            self._call(partial(self._client.delete, key))
            return 0
        demands: list[Demand] = []
        stale = []
        for field, value in raw.items():
            try:
                demand = Demand.decode(value)
                demands.append(demand)
            except ValueError:
                stale.append(field)
                continue
            if demand.at_ms < now_ms - _FORGET_DEMAND_MS:  # of a router that died
                stale.append(field)
        if stale:
            self._call(partial(self._client.hdel, key, *stale))
        return total_demand(demands, now_ms)

    def _call(self, call: Callable[[], T]) -> T:
        return ask(self._client, call)

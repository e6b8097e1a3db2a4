"""Replicas that registered in Redis: which there are, and what their leases say of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from radixgrove.protocol.blocks import HASH_SCHEME
from radixgrove.protocol.model_table import ModelEntry, ModelTable
from radixgrove.protocol.registry import (
    PROTOCOL_VERSION,
    LeaseState,
    Registration,
)
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router.replicas import Breaker, Replica
from radixgrove.router.trust import ReplicaKeys, Trust
from radixgrove.service.cluster_directory import ClusterDirectory, ServiceRecord
from radixgrove.service.complaints import Complaints
from radixgrove.service.redis_link import RedisLink
from radixgrove.service.redis_rules import RedisRefused

logger = logging.getLogger(__name__)

REMEMBER_SECONDS = 15.0  # registered replicas outlive a Redis that went or lost everything
MAX_REPLICAS = 1024  # of one service


class RegisteredReplicas:
    """What Redis says, and for a while what it said last.

    A lease that ran out proves its replica dead only where this router's own writes have been
    accepted for a while (`RedisLink.settled`). Else the last known replicas stay, and are asked
    directly: `unproven` has them.
    """

    def __init__(
        self, settings: RouterSettings, link: RedisLink, remembers: Callable[[str], bool]
    ) -> None:
        """`remembers(service)`: whether a service without replicas is kept for those to come."""
        self._settings = settings
        self._link = link
        self._remembers = remembers
        self._directory = ClusterDirectory(link, settings.redis_prefix)
        self._trust = Trust(settings)
        self._complaints = Complaints(logger)
        self._refused: dict[str, set[str]] = {}  # service → replica ids
        self.services: dict[str, dict[str, Replica]] = {}  # service → replica id → replica
        self.table: ModelTable | None = None
        self.first_poll = math.inf  # monotonic time at which Redis was first read

    @property
    def refused(self) -> int:
        """Registered replicas that this router cannot use."""
        return sum(map(len, self._refused.values()))

    def entry(self, service: str) -> ModelEntry | None:
        """What the model table says of a service."""
        if self.table is None:
            return None
        return next((entry for entry in self.table.entries if entry.service == service), None)

    def unproven(self) -> list[Replica]:
        """Replicas of which no lease tells whether they live."""
        if self._link.settled:
            return []
        replicas = [r for group in self.services.values() for r in group.values()]
        return [replica for replica in replicas if self.is_unproven(replica)]

    def is_unproven(self, replica: Replica) -> bool:
        return not (self._link.settled or (self._link.up and replica.leased))

    def has_lapsed(self, replica: Replica) -> bool:
        """Whether a Redis that proves it says that its lease has ended."""
        return self._link.settled and not replica.leased

    # ---- following Redis -------------------------------------------------------------------

    async def poll(self) -> bool:
        """Reads table, registrations and leases; whether anything changed.

        What cannot be read of one service leaves the others alone.

        Raises:
            RedisUnavailable, RedisRefused: nothing could be read.
        """
        changed = False
        if self._settings.model_table is not None:
            changed = await self._read_table(self._settings.model_table)
        names = await self._names()
        for name, record in (await self._directory.records(names, measured=True)).items():
            try:
                if isinstance(record, Exception):
                    raise record
                changed = self._follow(name, record) or changed
            except Exception as error:  # of one service, whatever it is: others go on
                text = f"service {name!r} cannot be read from Redis: {error!r}"
                self._complaints.say(f"service {name}", text)
        for name in self.services.keys() - names:
            del self.services[name]
            self._refused.pop(name, None)
            changed = True
        self.first_poll = min(self.first_poll, time.monotonic())
        return changed

    async def _names(self) -> set[str]:
        if self.table is not None:
            # Asleep services have no replicas, but requests for them are held, not refused.
            return {entry.service for entry in self.table.entries}
        kept = {name for name, group in self.services.items() if group or self._remembers(name)}
        try:
            names, unreadable = await self._directory.services()
        except RedisRefused as error:
            self._complaints.say("services", f"the services cannot be read from Redis: {error}")
            return kept
        if unreadable:
            text = f"{len(unreadable)} names of services in Redis are not UTF-8 and are ignored"
            self._complaints.say("names", text)
        return names | kept

    async def _read_table(self, name: str) -> bool:
        """Whether the table is another one than before."""
        try:
            table = await self._directory.table(name)
        except (ValueError, RedisRefused) as error:
            text = f"the model table is malformed ({error}); the last one stays in force"
            self._complaints.say("table", text)
            return False
        if table is None:
            return False  # Redis came back empty: the operator writes it again
        before, self.table = self.table, table
        return table != before

    def _follow(self, name: str, record: ServiceRecord) -> bool:
        """Whether anything of the service changed."""
        if record.malformed:
            text = f"{record.malformed} malformed entries of service {name!r} in Redis are ignored"
            self._complaints.say(f"malformed {name}", text)
        known = self.services.setdefault(name, {})
        before = {(r.id, r.generation, r.state) for r in known.values()}
        entry = self.entry(name)
        refused: set[str] = set()
        listed: dict[str, Registration] = {}
        keys: dict[str, ReplicaKeys] = {}
        for replica_id, registration in record.registrations.items():
            if len(listed) >= MAX_REPLICAS or not _is_listed(registration, entry):
                continue
            found = self._trust.keys(registration, entry.namespace if entry else "")
            if self._accepts(registration, entry, found):
                listed[replica_id], keys[replica_id] = registration, found or ReplicaKeys()
            else:
                refused.add(replica_id)
        self._refused[name] = refused
        for replica_id, registration in listed.items():
            self._take(known, registration, keys[replica_id], record)
        for replica_id in known.keys() - listed.keys():
            fenced = entry is not None and known[replica_id].group not in entry.attempts
            if fenced or not self._remembering():
                del known[replica_id]
            else:
                known[replica_id].leased = False
        return before != {(r.id, r.generation, r.state) for r in known.values()}

    def _take(
        self,
        known: dict[str, Replica],
        registration: Registration,
        keys: ReplicaKeys,
        record: ServiceRecord,
    ) -> None:
        lease = record.lease_of(registration)
        replica = known.get(registration.replica_id)
        new = replica is None or replica.generation != registration.generation
        if replica is None or replica.generation != registration.generation:
            if lease is None and (self._link.up or replica is not None):
                return  # a restart that died again; the one before it is gone too
            replica = known[registration.replica_id] = self._replica(registration, keys)
        replica.lease = record.leases.get(registration.generation)
        replica.measured = record.measured.get(registration.generation, replica.measured)
        replica.leased = lease is not None
        if lease is not None and (new or self._link.up):
            replica.ready = lease.state is LeaseState.READY
            replica.seen = time.monotonic()
        elif lease is None and self._link.settled:
            replica.ready = False

    def _accepts(
        self, registration: Registration, entry: ModelEntry | None, keys: ReplicaKeys | None
    ) -> bool:
        """Whether this router can work with it; it is refused loudly."""
        problem = ""
        if registration.protocol_version != PROTOCOL_VERSION:
            problem = f"protocol version {registration.protocol_version}, not {PROTOCOL_VERSION}"
        elif registration.hash_scheme != HASH_SCHEME:
            problem = f"hash scheme {registration.hash_scheme}, not {HASH_SCHEME}"
        elif entry is not None and not _at_its_address(registration, entry):
            problem = "another address than its pod"
        elif keys is None:
            problem = "another cluster secret than this router's"
        replica_id = registration.replica_id
        if problem:
            text = f"replica {replica_id} is refused: it has {problem}"
            self._complaints.say(f"replica {replica_id}", text)
        else:
            self._complaints.settle(f"replica {replica_id}")
        return not problem

    def _replica(self, registration: Registration, keys: ReplicaKeys) -> Replica:
        logger.info(
            "replica %s of service %s, generation %s",
            registration.replica_id,
            registration.service,
            registration.generation,
        )
        return Replica(
            id=registration.replica_id,
            url=registration.url.rstrip("/"),
            breaker=Breaker(self._settings.breaker_failures, self._settings.breaker_seconds),
            registration=registration,
            keys=keys,
            models=registration.models,
        )

    # ---- remembering -----------------------------------------------------------------------

    def _remembering(self) -> bool:
        """Whether Redis is away, or came back so recently that replicas may not have yet."""
        return not self._link.up or time.monotonic() - self._link.since < REMEMBER_SECONDS

    def forget_lost(self) -> bool:
        """Drops replicas that a usable Redis no longer speaks for; whether there were any."""
        if self._remembering():
            return False
        oldest = time.monotonic() - REMEMBER_SECONDS
        lost = False
        for replicas in self.services.values():
            for replica in [r for r in replicas.values() if r.seen < oldest]:
                del replicas[replica.id]
                lost = True
        return lost


def _is_listed(registration: Registration, entry: ModelEntry | None) -> bool:
    """Whether the operator lists the attempt, and knows its pod."""
    if entry is None:
        return True
    known = entry.urls is None or registration.group in entry.urls
    return known and registration.group in entry.attempts


def _at_its_address(registration: Registration, entry: ModelEntry) -> bool:
    """A replica elsewhere would be sent keys and prompts."""
    return entry.urls is None or entry.urls[registration.group] == registration.url.rstrip("/")

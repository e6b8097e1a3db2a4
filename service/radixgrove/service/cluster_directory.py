"""Who is there and what exists: registrations, leases and model tables as Redis holds them.

What is malformed is left out and counted: it harms nothing but itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import redis

from radixgrove.protocol import index
from radixgrove.protocol.foreign import decode_json
from radixgrove.protocol.keys import MEASURED, ServiceKeys, services_key
from radixgrove.protocol.model_table import ModelTable, table_key
from radixgrove.protocol.registry import (
    LONGEST_LEASE_SECONDS,
    Lease,
    Measured,
    Registration,
)
from radixgrove.service.redis_client import ask
from radixgrove.service.redis_link import RedisLink
from radixgrove.service.redis_rules import RedisUnavailable

T = TypeVar("T")

AT_ONCE = 1024  # services: the link bounds the calls under way
# Bytes of a hash, and of one field with its value: others wrote them, and may write anything.
_MOST = (8 << 20, 64 << 10)


@dataclass(slots=True)
class ServiceRecord:
    """One service at one moment of Redis's clock."""

    now_ms: int
    registrations: dict[str, Registration] = field(default_factory=dict)  # by replica id
    leases: dict[str, Lease] = field(default_factory=dict)  # by generation
    measured: dict[str, Measured] = field(default_factory=dict)  # likewise, where it was read
    malformed: int = 0  # entries of either kind

    def lease_of(self, registration: Registration) -> Lease | None:
        """The lease of that generation, if it still runs.

        One that runs for too long was given before Redis's clock was set back.
        """
        lease = self.leases.get(registration.generation)
        if lease is None or not 0 < lease.expires_ms - self.now_ms <= 1000 * LONGEST_LEASE_SECONDS:
            return None
        return lease

    def members(self, group: str) -> list[Registration]:
        """The registered replicas of a group."""
        return [entry for entry in self.registrations.values() if entry.group == group]


def _record(answer: Any) -> ServiceRecord:
    """Of what the script `read` says of registrations and leases."""
    (seconds, micros), left_out, registrations, leases = answer
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    record = ServiceRecord(now_ms, malformed=left_out)
    for name, data in _pairs(registrations):
        try:
            registration = Registration.decode(data)
            if registration.replica_id != name.decode():
                raise ValueError("registered under another name")
            record.registrations[registration.replica_id] = registration
        except ValueError:
            record.malformed += 1
    for name, data in _pairs(leases):
        try:
            record.leases[name.decode()] = Lease.unpack(data)
        except ValueError:
            record.malformed += 1
    return record


class ClusterDirectory:
    """For event loops, through a `RedisLink`.

    Every method raises RedisUnavailable or RedisRefused; the latter, for one service's keys, says
    nothing of the others.
    """

    def __init__(self, link: RedisLink, prefix: str) -> None:
        self._link = link
        self._prefix = prefix

    async def services(self) -> tuple[set[str], list[bytes]]:
        """Names under which replicas registered; and names that are none, not being UTF-8."""
        names, unreadable = set(), []
        for name in await self._link.call("SMEMBERS", services_key(self._prefix)):
            try:
                names.add(name.decode())
            except UnicodeDecodeError:
                unreadable.append(name)
        return names, unreadable

    async def service(self, name: str, *, measured: bool = False) -> ServiceRecord:
        """`measured`: with what each replica says of its speed, which takes one more answer."""
        keys = ServiceKeys(self._prefix, name)
        answer = await self._link.run_script("read", [keys.replicas, keys.leases], *_MOST)
        record = _record(answer)
        self._link.saw_clock(record.now_ms / 1000)
        if measured:
            await self._add_measured(keys, record)
        return record

    async def _add_measured(self, keys: ServiceKeys, record: ServiceRecord) -> None:
        generations = [entry.generation for entry in record.registrations.values()]
        found = await self._link.run_scripts(
            "read", [([keys.load(name)], _MOST) for name in generations]
        )
        for generation, (_, _, load) in zip(generations, found, strict=True):
            if (data := dict(_pairs(load)).get(MEASURED.encode())) is not None:
                try:
                    record.measured[generation] = decode_json(data, Measured)
                except ValueError:
                    record.malformed += 1

    async def records(
        self, names: Iterable[str], *, measured: bool = False
    ) -> dict[str, ServiceRecord | Exception]:
        """Many services, read side by side; what is wrong with one stands in its place.

        Raises:
            RedisUnavailable: nothing could be read.
        """
        names = list(names)
        outcomes = await side_by_side([self.service(name, measured=measured) for name in names])
        for outcome in outcomes:
            if isinstance(outcome, RedisUnavailable):
                raise outcome
        return dict(zip(names, outcomes, strict=True))

    async def table(self, name: str) -> ModelTable | None:
        """The named model table; None when there is none. Raises ValueError: it is malformed."""
        data = await self._link.call("GET", table_key(self._prefix, name))
        return None if data is None else ModelTable.decode(data)


class BlockingDirectory:
    """For threads, through redis-py. Every method raises RedisUnavailable."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._read = client.register_script(index.script("read").text)

    def service(self, name: str) -> ServiceRecord:
        keys = ServiceKeys(self._prefix, name)
        return _record(self._read_hashes(keys.replicas, keys.leases))

    def demand(self, name: str) -> dict[bytes, bytes]:
        """What routers report of a service, as far as it is no longer than that."""
        _, _, fields = self._read_hashes(ServiceKeys(self._prefix, name).demand)
        return dict(_pairs(fields))

    def _read_hashes(self, *keys: str) -> Any:
        return ask(self._client, partial(self._read, keys=keys, args=_MOST))

    def table(self, name: str) -> ModelTable | None:
        """As of `ClusterDirectory`."""
        data: Any = ask(self._client, partial(self._client.get, table_key(self._prefix, name)))
        return None if data is None else ModelTable.decode(data)


async def side_by_side(
    work: Sequence[Coroutine[Any, Any, T]],
) -> list[T | Exception]:
    """Results or errors of all, in order: a Redis far away answers many as soon as one."""
    outcomes: list[T | Exception] = []
    for start in range(0, len(work), AT_ONCE):
        part = work[start : start + AT_ONCE]
        for outcome in await asyncio.gather(*part, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
                raise outcome
            outcomes.append(outcome)
    return outcomes


def _pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Fields and values of a hash."""
    return zip(flat[::2], flat[1::2], strict=True)

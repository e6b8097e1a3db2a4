"""Which models exist: the table that the operator writes into Redis and routers obey.

Workers' leases say who serves; this table says what may be served, by whom. A registered replica
that is not among the listed attempts of its service belongs to a group that was replaced or is
draining: a router sends it nothing new. The attempt is thus the fencing token of a group.

    {prefix}:models:<table>    STRING  JSON of `ModelTable`; table "shared" is the shared router's

A router without a table name (no operator) serves whatever is registered. A table that vanishes
with Redis is written again by the operator; until then routers keep the last one they read.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from radixgrove.protocol.foreign import decode_json

SHARED = "shared"
MAX_TABLE_BYTES = 16 << 20


class ModelEntry(msgspec.Struct, kw_only=True, frozen=True):
    """One service."""

    service: str  # its name in Redis, as in `registry.Registration.service`
    names: list[str]  # the id first, aliases after it
    scoped: list[str] = []  # `namespace/name`s that it answers to as well, and that are not listed
    attempts: list[str]  # `registry.Registration.group`s that may serve; in no order
    desired: int  # groups wanted; 0: asleep or suspended
    wakes: bool = False  # asleep, and a held request wakes it: hold instead of refusing
    namespace: str = ""  # its replicas have this namespace's keys; "": the installation's
    # Where a group may register, by its id; one that is missing may not yet. None: anywhere.
    urls: dict[str, str] | None = None


class ModelTable(msgspec.Struct, kw_only=True, frozen=True):
    entries: list[ModelEntry]
    version: int = 1

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> ModelTable:
        """Raises ValueError when it is malformed, too large or of an unknown version."""
        if len(data) > MAX_TABLE_BYTES:
            raise ValueError(f"a model table of {len(data)} bytes is refused")
        table = decode_json(data, cls)
        if table.version != 1:
            raise ValueError(f"model table version {table.version} is unknown")
        return table


class Demand(msgspec.Struct, kw_only=True, frozen=True):
    """Requests that a router holds because no replica can take them."""

    held: int
    at_ms: int  # Redis's clock; one older than `DEMAND_SECONDS` counts as none

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Demand:
        """Raises ValueError when it is malformed."""
        return decode_json(data, cls)


DEMAND_SECONDS = 10.0


def table_key(prefix: str, table: str) -> str:
    return f"{prefix}:models:{table}"


def total_demand(demands: Iterable[Demand], now_ms: int) -> int:
    """Requests held for a service by all live routers."""
    oldest = now_ms - DEMAND_SECONDS * 1000
    return sum(demand.held for demand in demands if demand.at_ms >= oldest)

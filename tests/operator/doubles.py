"""Stand-ins for what the operator talks to besides the API server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixgrove.operator.planning.observed import Pod
from radixgrove.protocol.model_table import ModelEntry
from radixgrove.protocol.registry import LeaseState
from radixgrove.service.redis_rules import RedisUnavailable


class Table:
    """Stands for Redis: the routers' model table, and who still holds a lease."""

    def __init__(self) -> None:
        self.entries: dict[str, ModelEntry] = {}
        self.leases: set[tuple[str, str]] = set()
        self.answers = True
        self.asked = 0  # how often for leases
        self.unregistered: set[str] = set()  # replicas of the table that hold no lease

    def put(self, table: str, created: float, entry: ModelEntry) -> None:
        self.entries[entry.service] = entry

    def drop(self, service: str) -> None:
        self.entries.pop(service, None)

    def _ask(self) -> None:
        self.asked += 1
        if not self.answers:
            raise RedisUnavailable("it is away")

    def holds_lease(self, service: str, replica_id: str) -> bool:
        self._ask()
        return (service, replica_id) in self.leases

    def members(self, service: str) -> dict[str, dict[str, LeaseState]]:
        self._ask()
        found: dict[str, dict[str, LeaseState]] = {}
        attempts = self.entries[service].attempts if service in self.entries else []
        for name, replica in sorted(self.leases):
            if name == service:
                found.setdefault(replica.rpartition("/")[0], {})[replica] = LeaseState.READY
        for replica in set(attempts) - found.keys() - self.unregistered:
            found[replica] = {replica: LeaseState.READY}
        return found


class Probe:
    """Stands for requests to pods."""

    def __init__(self) -> None:
        self.hung: set[str] = set()

    def phases(self, groups: Sequence[Any], management_keys: Sequence[str]) -> list[str]:
        return []

    def silent_nodes(self, pods: Sequence[Pod]) -> set[str]:
        return {pod.node for pod in pods} & self.hung


class Users:
    """Stands for Redis's users: those of which namespaces and services were asked for last."""

    def __init__(self) -> None:
        self.services: dict[str, set[str]] = {}

    def ensure(self, services: dict[str, set[str]]) -> None:
        self.services = services

    keep = ensure

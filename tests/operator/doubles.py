"""Stand-ins for what the operator talks to besides the API server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixgrove.operator.planning.observed import Pod
from radixgrove.protocol.model_table import ModelEntry


class Table:
    """Stands for Redis: the routers' model table, and who still holds a lease."""

    def __init__(self) -> None:
        self.entries: dict[str, ModelEntry] = {}
        self.leases: set[tuple[str, str]] = set()

    def put(self, table: str, created: float, entry: ModelEntry) -> None:
        self.entries[entry.service] = entry

    def drop(self, service: str) -> None:
        self.entries.pop(service, None)

    def holds_lease(self, service: str, replica_id: str) -> bool:
        return (service, replica_id) in self.leases


class Probe:
    """Stands for requests to pods."""

    def __init__(self) -> None:
        self.hung: set[str] = set()

    def phases(self, groups: Sequence[Any]) -> list[str]:
        return []

    def silent_nodes(self, pods: Sequence[Pod]) -> set[str]:
        return {pod.node for pod in pods} & self.hung

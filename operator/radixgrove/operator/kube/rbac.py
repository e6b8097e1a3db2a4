"""What the operator may do: one table for the chart's roles, the checks and their test.

No wildcard, no secrets of others: the installation's own are named, and only creating (which
discloses nothing) cannot be limited to a name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

from radixgrove.operator.api import names


class Scope(StrEnum):
    SERVED = "served"  # every namespace with services: a ClusterRole, or a Role in each
    OWN = "own"  # the operator's namespace
    CLUSTER = "cluster"  # objects without a namespace


@dataclass(frozen=True)
class Permission:
    scope: Scope
    group: str
    resource: str
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()
    why: str = ""


KEYS_SECRET = "@keys-secret"  # replaced by the configured name
NAMES_CONFIG_MAP = "@names-config-map"
REDIS_POLICY = "@redis-policy"
LEASE = "@lease"
OWNER = "@owner"

_CHILD = ("get", "list", "watch", "patch", "create", "delete")
_APPLIED = ("get", "list", "watch", "patch", "create")

PERMISSIONS = (
    Permission(Scope.SERVED, names.GROUP, names.PLURAL, ("get", "list", "watch"), why="services"),
    Permission(Scope.SERVED, names.GROUP, f"{names.PLURAL}/status", ("patch",), why="status"),
    Permission(Scope.SERVED, names.GROUP, f"{names.PLURAL}/scale", ("patch",), why="autoscaling"),
    Permission(Scope.SERVED, "apps", "statefulsets", _CHILD, why="worker groups"),
    Permission(Scope.SERVED, "apps", "deployments", _CHILD, why="dedicated routers"),
    Permission(Scope.SERVED, "", "pods", ("list", "watch"), why="the state of groups"),
    Permission(Scope.SERVED, "", "services", _CHILD, why="names of groups and routers"),
    Permission(Scope.SERVED, "", "configmaps", _CHILD, why="frozen revisions"),
    Permission(Scope.SERVED, "", "serviceaccounts", _APPLIED, why="pods without tokens"),
    Permission(Scope.SERVED, "", "persistentvolumeclaims", _APPLIED, why="model cache"),
    Permission(Scope.SERVED, "batch", "jobs", _CHILD, why="model downloads"),
    Permission(Scope.SERVED, "policy", "poddisruptionbudgets", _CHILD, why="one group at a time"),
    Permission(
        Scope.SERVED, "autoscaling", "horizontalpodautoscalers", _CHILD, why="dedicated routers"
    ),
    Permission(
        Scope.SERVED, "networking.k8s.io", "networkpolicies", _CHILD, why="who reaches workers"
    ),
    Permission(Scope.SERVED, "", "events", ("create", "list"), why="telling, and refused pods"),
    Permission(Scope.SERVED, "", "secrets", ("create",), why="keys for workers"),
    Permission(Scope.SERVED, "", "secrets", ("get", "patch"), (KEYS_SECRET,), "keys for workers"),
    Permission(Scope.OWN, "", "secrets", ("create",), why="keys made once"),
    Permission(Scope.OWN, "", "secrets", ("get", "patch"), (KEYS_SECRET,), "keys made once"),
    Permission(Scope.OWN, "", "configmaps", ("create",), why="who has which model name"),
    Permission(
        Scope.OWN, "", "configmaps", ("get", "patch"), (NAMES_CONFIG_MAP,), "who has which name"
    ),
    Permission(Scope.OWN, "networking.k8s.io", "networkpolicies", ("create",), why="Redis"),
    Permission(
        Scope.OWN,
        "networking.k8s.io",
        "networkpolicies",
        ("get", "patch"),
        (REDIS_POLICY,),
        "who reaches Redis",
    ),
    Permission(Scope.OWN, "apps", "deployments", ("get",), (OWNER,), "owner of the keys"),
    Permission(Scope.OWN, "coordination.k8s.io", "leases", ("create",), why="leader election"),
    Permission(
        Scope.OWN, "coordination.k8s.io", "leases", ("update",), (LEASE,), "leader election"
    ),
    Permission(Scope.CLUSTER, "", "nodes", ("list", "watch"), why="lost nodes"),
    Permission(Scope.CLUSTER, "", "namespaces", ("get",), why="is a model name scoped by another"),
    Permission(
        Scope.CLUSTER, "coordination.k8s.io", "leases", ("get",), why="does any operator live"
    ),
)


def rules(
    scope: Scope,
    replacements: dict[str, str],
    permissions: Sequence[Permission] = PERMISSIONS,
) -> list[dict[str, Any]]:
    """RBAC rules of one scope."""
    found = []
    for permission in permissions:
        if permission.scope is not scope:
            continue
        rule: dict[str, Any] = {
            "apiGroups": [permission.group],
            "resources": [permission.resource],
            "verbs": list(permission.verbs),
        }
        if permission.names:
            rule["resourceNames"] = [replacements[name] for name in permission.names]
        found.append(rule)
    return found


def chart_file() -> str:
    """The table as the chart reads it (`.Files.Get`); placeholders are the chart's values."""
    known = (KEYS_SECRET, NAMES_CONFIG_MAP, REDIS_POLICY, LEASE, OWNER)
    placeholders = {name: name for name in known}
    return yaml.safe_dump(
        {scope.value: rules(scope, placeholders) for scope in Scope}, sort_keys=False
    )


if __name__ == "__main__":
    sys.stdout.write(chart_file())

"""The operator's own metrics. Names are API."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()

QUEUE_DEPTH = Gauge(
    "radixgrove_operator_queue_depth", "Services that wait to be looked at.", registry=REGISTRY
)
RECONCILE_SECONDS = Histogram(
    "radixgrove_operator_reconcile_seconds",
    "Time of one look at one service.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
    registry=REGISTRY,
)
RECONCILE_ERRORS = Counter(
    "radixgrove_operator_reconcile_errors_total",
    "Looks that ended in an error.",
    ["reason"],
    registry=REGISTRY,
)
LEADER = Gauge("radixgrove_operator_leader", "1 while this replica leads.", registry=REGISTRY)
API_REQUESTS = Counter(
    "radixgrove_operator_api_requests_total",
    "Requests to the API server.",
    ["verb", "resource", "status"],
    registry=REGISTRY,
)
GROUP_RECOVERIES = Counter(
    "radixgrove_operator_group_recoveries_total",
    "Worker groups that were recreated.",
    ["namespace", "service"],
    registry=REGISTRY,
)
GROUPS = Gauge(
    "radixgrove_operator_groups",
    "Worker groups.",
    ["namespace", "service", "state"],
    registry=REGISTRY,
)


def forget(namespace: str, service: str) -> None:
    """A deleted service leaves no series behind."""
    for state in ("ready", "desired"):
        with contextlib.suppress(KeyError):
            GROUPS.remove(namespace, service, state)
    with contextlib.suppress(KeyError):
        GROUP_RECOVERIES.remove(namespace, service)

"""The operator's own metrics. Names are API."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
GROUP_STATES = ("ready", "desired", "starting")

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
    "Worker groups; ready: of those that routers know; starting: without trouble, and in the time "
    "that a start may take.",
    ["namespace", "service", "state"],
    registry=REGISTRY,
)
FIRST_START = Gauge(
    "radixgrove_operator_first_start",
    "1 while a service that has not served yet is starting, in the time that this may take.",
    ["namespace", "service"],
    registry=REGISTRY,
)


def forget(namespace: str, service: str) -> None:
    """A deleted service leaves no series behind."""
    for state in GROUP_STATES:
        with contextlib.suppress(KeyError):
            GROUPS.remove(namespace, service, state)
    for metric in (FIRST_START, GROUP_RECOVERIES):
        with contextlib.suppress(KeyError):
            metric.remove(namespace, service)

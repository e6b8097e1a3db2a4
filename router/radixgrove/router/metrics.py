"""The router's metrics. Names are API."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, TypeVar

from prometheus_client import Counter, Gauge, Histogram

Metric = TypeVar("Metric", Counter, Gauge, Histogram)

STATES = ("ready", "draining", "broken", "not-ready")  # of a replica

REQUESTS = Counter(
    "radixgrove_router_requests_total",
    "Requests answered, by the status the client got (499: it went away first).",
    ["model", "status"],
)
IN_FLIGHT = Gauge(
    "radixgrove_router_requests_in_flight",
    "Requests being handled.",
    multiprocess_mode="livesum",
)
HELD = Gauge(
    "radixgrove_router_requests_held",
    "Requests waiting for a replica.",
    ["model"],
    multiprocess_mode="livesum",
)
PLACEMENTS = Counter(
    "radixgrove_router_placements_total",
    "Placements by replica and how they were decided: redis, local, degraded.",
    ["replica", "decided"],
)
PLACEMENT_SECONDS = Histogram(
    "radixgrove_router_placement_seconds",
    "Time to choose a replica.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1),
)
ENCODE_SECONDS = Histogram(
    "radixgrove_router_encode_seconds",
    "Time to render, tokenize and hash a prompt.",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1),
)
FIRST_BYTE_SECONDS = Histogram(
    "radixgrove_router_first_byte_seconds",
    "Time from the request's arrival to the first byte of the answer.",
    ["model"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
)
PROMPT_TOKENS = Counter("radixgrove_router_prompt_tokens_total", "Prompt tokens placed.", ["model"])
PREDICTED_TOKENS = Counter(
    "radixgrove_router_predicted_cached_tokens_total",
    "Prompt tokens that placement expected the replica to have cached.",
    ["model"],
)
REPORTED_TOKENS = Counter(
    "radixgrove_router_reported_cached_tokens_total",
    "Prompt tokens that replicas reported as cached, where an answer said so.",
    ["model"],
)
RETRIES = Counter(
    "radixgrove_router_retries_total",
    "Requests placed again before the first byte, by what had failed.",
    ["reason"],
)
FAILURES = Counter(
    "radixgrove_router_replica_failures_total",
    "Failures that count against a replica's breaker.",
    ["replica", "reason"],
)
REPLICAS = Gauge(
    "radixgrove_router_replicas",
    "Replicas known, by state.",
    ["model", "state"],
    multiprocess_mode="livemax",
)
REFUSED_REPLICAS = Gauge(
    "radixgrove_router_refused_replicas",
    "Registered replicas that this router cannot use (version, hash scheme or secret differ).",
    multiprocess_mode="livemax",
)
REDIS_UP = Gauge(
    "radixgrove_router_redis_up",
    "1 while Redis takes this router's heartbeats, 0 while the router serves without it.",
    multiprocess_mode="livemin",
)
REDIS_SECONDS = Gauge(
    "radixgrove_router_redis_seconds",
    "Round trip of the fastest of the last heartbeats to Redis.",
    multiprocess_mode="livemax",
)
REDIS_KEYS = Gauge(
    "radixgrove_router_redis_keys",
    "Keys in the database of Redis.",
    multiprocess_mode="livemax",
)
REDIS_BYTES = Gauge(
    "radixgrove_router_redis_used_bytes",
    "Memory that Redis uses.",
    multiprocess_mode="livemax",
)
REDIS_MAX_BYTES = Gauge(
    "radixgrove_router_redis_max_bytes",
    "Memory that Redis may use, its maxmemory; 0: no limit.",
    multiprocess_mode="livemax",
)


_series: dict[tuple[object, ...], Any] = {}


def series(metric: Metric, *labels: object) -> Metric:
    """`metric.labels(…)`, found in a tenth of the time that the library takes to find it."""
    key = (metric, *labels)
    found: Metric | None = _series.get(key)
    if found is None:
        found = _series[key] = metric.labels(*labels)
    return found


def forget_model(model: str) -> None:
    """A model that is served no more has no replicas, and soon no series."""
    if _shared():
        for state in STATES:
            REPLICAS.labels(model, state).set(0)
    else:
        for gauge in (REPLICAS, HELD):
            gauge.remove_by_labels({"model": model})
        _series.clear()


def forget_counts(model: str) -> None:
    """Series of a model that has not been served for long."""
    if not _shared():
        counters = (REQUESTS, FIRST_BYTE_SECONDS, PROMPT_TOKENS, PREDICTED_TOKENS, REPORTED_TOKENS)
        for counter in counters:
            counter.remove_by_labels({"model": model})
        _series.clear()


def forget_replica(replica: str) -> None:
    """Series of a replica that has been gone for long."""
    if not _shared():
        for counter in (PLACEMENTS, FAILURES):
            counter.remove_by_labels({"replica": replica})
        _series.clear()


def _shared() -> bool:
    """Whether several processes count together: series cannot be removed then."""
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ


def soon(note: Callable[[float], None], value: float) -> None:
    """Notes a value off the request's way, in the event loop's next round."""
    asyncio.get_running_loop().call_soon(note, value)

"""The router's metrics. Names are API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

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
    "Requests sent to another replica before the first byte, by what had failed.",
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
    multiprocess_mode="max",
)
REFUSED_REPLICAS = Gauge(
    "radixgrove_router_refused_replicas",
    "Registered replicas that this router cannot use (version, hash scheme or secret differ).",
    multiprocess_mode="max",
)
REDIS_UP = Gauge(
    "radixgrove_router_redis_up",
    "1 while the shared index can be used, 0 while the router serves without it.",
    multiprocess_mode="min",
)


def soon(note: Callable[[float], None], value: float) -> None:
    """Notes a value off the request's way, in the event loop's next round."""
    asyncio.get_running_loop().call_soon(note, value)

"""Metrics of the frontends. Names are API: `docs/metrics.md` describes each.

Frontends and engine write prometheus_client's multiprocess files, so that whichever frontend is
asked answers for the whole worker.
"""

from __future__ import annotations

import os
from bisect import bisect_left

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0),
    float("inf"),
)
_ITL_BUCKETS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0),
    float("inf"),
)
_COMPILE_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0),
    float("inf"),
)
_DURATION_BUCKETS = (
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0),
    float("inf"),
)


class BatchedHistogram(Histogram):
    """A histogram that takes many observations at once.

    One observation costs several writes to a shared file: too much for every token of every stream.
    """

    def bucket_of(self, value: float) -> int:
        return bisect_left(self._upper_bounds, value)

    @property
    def bucket_count(self) -> int:
        return len(self._upper_bounds)

    def add(self, counts: list[int], total: float) -> None:
        """`counts[i]` observations in bucket i, `total` the sum of all."""
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)


class FrontendMetrics:
    """Written by this process. One per process, since names register once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "radixgrove_requests",
            "Requests by endpoint and outcome.",
            ["endpoint", "outcome"],
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "radixgrove_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token_latency = BatchedHistogram(
            "radixgrove_inter_token_latency_seconds",
            "Between two tokens of a sequence.",
            buckets=_ITL_BUCKETS,
            registry=registry,
        )
        self.duration = Histogram(
            "radixgrove_request_duration_seconds",
            "From a request's arrival to the end of its response.",
            ["endpoint"],
            buckets=_DURATION_BUCKETS,
            registry=registry,
        )
        self.request_prompt_tokens = Counter(
            "radixgrove_request_prompt_tokens",
            "Prompt tokens of requests that ended well.",
            registry=registry,
        )
        self.request_cached_tokens = Counter(
            "radixgrove_request_cached_tokens",
            "Those of them that came from the prefix cache.",
            registry=registry,
        )
        self.request_completion_tokens = Counter(
            "radixgrove_request_completion_tokens", "Tokens sent to clients.", registry=registry
        )
        self.http_in_flight = Gauge(
            "radixgrove_http_requests_in_flight",
            "Completion requests inside the frontends.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.grammar_compile = Histogram(
            "radixgrove_grammar_compile_seconds",
            "To compile what an answer must be, and its first mask.",
            buckets=_COMPILE_BUCKETS,
            registry=registry,
        )
        self.grammar_failures = Counter(
            "radixgrove_grammar_failures",
            "Requests that were refused, or ended, for what their answers must be.",
            ["reason"],
            registry=registry,
        )
        self.tool_calls = Counter(
            "radixgrove_tool_calls",
            "Tool calls in answers, by what came of them.",
            ["outcome"],
            registry=registry,
        )
        self.reasoning_tokens = Counter(
            "radixgrove_reasoning_tokens", "Tokens of reasoning.", registry=registry
        )
        self._itl_counts = [0] * self.inter_token_latency.bucket_count
        self._itl_sum = 0.0

    def observe_gap(self, seconds: float, tokens: int) -> None:
        """`tokens` tokens came `seconds` after the one before them; written at `flush`."""
        gap = seconds / tokens
        self._itl_counts[self.inter_token_latency.bucket_of(gap)] += tokens
        self._itl_sum += seconds

    def flush(self) -> None:
        if any(self._itl_counts):
            self.inter_token_latency.add(self._itl_counts, self._itl_sum)
            self._itl_counts = [0] * len(self._itl_counts)
            self._itl_sum = 0.0


class Exposition:
    """Renders `/metrics` for the whole worker, the engine's files included."""

    def __init__(self) -> None:
        self._own = CollectorRegistry()
        self.metrics = FrontendMetrics(self._own)

    def render(self) -> bytes:
        self.metrics.flush()
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self._own)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

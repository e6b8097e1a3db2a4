"""Metrics of a worker. Names are API: `docs/metrics.md` describes each.

Frontends write prometheus_client's multiprocess files, so that whichever of them is asked answers
for all. What the engine counts comes with its `Stats`, which every frontend receives.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from radixgrove.worker.messages import EngineState, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0),
    float("inf"),
)
_ITL_BUCKETS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0),
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


class EngineCollector(Collector):
    """The engine's last `Stats` as metrics."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        ready = stats is not None and stats.state is EngineState.READY
        yield GaugeMetricFamily(
            "radixgrove_engine_ready", "1 once the engine takes requests.", value=float(ready)
        )
        if stats is None:
            return
        gauges = {
            "running_requests": ("Sequences in the batch.", stats.running),
            "waiting_requests": ("Sequences in the engine's queue.", stats.waiting),
            "waiting_tokens": ("Uncached prompt tokens in the queue.", stats.waiting_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"radixgrove_{name}", text, value=value)
        pages = GaugeMetricFamily(
            "radixgrove_kv_pages", "Pages of the KV pool by state.", labels=["state"]
        )
        used = stats.pages_total - stats.pages_free - stats.pages_evictable
        for state, value in (
            ("free", stats.pages_free),
            ("cached", stats.pages_evictable),
            ("used", used),
        ):
            pages.add_metric([state], value)
        yield pages
        yield GaugeMetricFamily(
            "radixgrove_kv_usage_ratio",
            "Share of the KV pool that running requests hold.",
            value=used / stats.pages_total if stats.pages_total else 0.0,
        )
        counters = {
            "engine_steps": ("Steps executed.", stats.steps),
            "prompt_tokens": ("Prompt tokens of admitted requests.", stats.prompt_tokens),
            "cached_tokens": ("Those that came from the prefix cache.", stats.cached_tokens),
            "generated_tokens": ("Tokens generated.", stats.generated_tokens),
            "preemptions": ("Sequences put back into the queue.", stats.preemptions),
            "evicted_pages": ("Cached pages given up for others.", stats.evicted_pages),
            "finished_sequences": ("Sequences that ended by themselves.", stats.finished),
            "aborted_sequences": ("Sequences ended by their client.", stats.aborted),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"radixgrove_{name}", text, value=value)


class Exposition:
    """Renders `/metrics` for the whole worker."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._own = CollectorRegistry()
        self.metrics = FrontendMetrics(self._own)
        self._engine = EngineCollector(stats)

    def render(self) -> bytes:
        self.metrics.flush()
        registry = CollectorRegistry()
        registry.register(self._engine)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return generate_latest(registry)
        return generate_latest(self._own) + generate_latest(registry)

"""The engine's Prometheus metrics. Names are API.

prometheus_client writes them where PROMETHEUS_MULTIPROC_DIR points, for the frontends to serve.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from radixgrove.worker.messages import Stats

_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_MASK_BUCKETS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25)
_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)


# Of a turn of the engine's loop, in their order.
PHASES = ("receive", "schedule", "launch", "mask", "collect", "complete", "deliver", "pulse")


class PhaseClock:
    """CPU time of one thread by phase: a phase that ends takes all the time since the last end."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._last = time.thread_time()

    def end(self, phase: str) -> None:
        now = time.thread_time()
        self.seconds[phase] += now - self._last
        self._last = now


class EngineMetrics:
    """One per process. Gauges and counters follow `Stats`, histograms each step."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        # A registry of our own: in multiprocess mode the files are what is served, not this.
        registry = registry or CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(
                f"radixgrove_engine_{name}", text, registry=registry, multiprocess_mode="livesum"
            )

        def counter(name: str, text: str) -> Counter:
            return Counter(f"radixgrove_engine_{name}", text, registry=registry)

        self._gauges = {
            "running": gauge("running_requests", "Requests that hold a row."),
            "waiting": gauge("waiting_requests", "Requests that wait for a row."),
            "waiting_tokens": gauge(
                "waiting_tokens", "Prompt tokens of waiting requests that are not cached."
            ),
            "pages_total": gauge("kv_pages", "Pages of the KV pool."),
            "pages_free": gauge("kv_free_pages", "Pages that hold nothing."),
            "pages_evictable": gauge("kv_evictable_pages", "Cached pages that no request uses."),
            "host_pages_total": gauge("host_pages", "Pages of the host tier."),
            "host_pages_used": gauge("host_used_pages", "Pages of the host tier that hold KV."),
            "matchers": gauge("matchers", "Live sequences with rules for their tokens."),
            "awaiting_grammar": gauge(
                "grammar_waiting_requests", "Waiting requests whose grammar is being built."
            ),
        }
        self._counters = {
            "steps": counter("steps", "Steps computed."),
            "prompt_tokens": counter("prompt_tokens", "Prompt tokens of admitted requests."),
            "cached_tokens": counter("cached_tokens", "Prompt tokens taken from the prefix cache."),
            "window_lost_tokens": counter(
                "window_lost_tokens",
                "Cached prompt tokens, computed anew because the window before them had gone.",
            ),
            "generated_tokens": counter("generated_tokens", "Tokens generated."),
            "preemptions": counter("preemptions", "Requests preempted for lack of pages."),
            "evicted_pages": counter("evicted_pages", "Pages evicted from the prefix cache."),
            "host_cached_tokens": counter(
                "host_cached_tokens", "Cached prompt tokens that were brought back from the host."
            ),
            "saved_pages": counter("saved_pages", "Pages copied to the host."),
            "loaded_pages": counter("loaded_pages", "Pages copied back from the host."),
            "finished": counter("finished_requests", "Requests that ended by themselves."),
            "aborted": counter("aborted_requests", "Requests that were aborted."),
        }
        self._mask_seconds = Histogram(
            "radixgrove_grammar_mask_seconds",
            "To compute which tokens may come next, of all rows of a step that have rules.",
            registry=registry,
            buckets=_MASK_BUCKETS,
        )
        self._counted = dict.fromkeys(self._counters, 0)
        phases = Counter(
            "radixgrove_engine_phase_cpu_seconds",
            "CPU time of the engine's main thread.",
            ["phase"],
            registry=registry,
        )
        self._phases = {name: phases.labels(name) for name in PHASES}
        self._phases_counted = dict.fromkeys(PHASES, 0.0)
        self._step_seconds = Histogram(
            "radixgrove_engine_step_seconds",
            "From the launch of a step, or the end of the one before, to its results.",
            registry=registry,
            buckets=_STEP_BUCKETS,
        )
        self._step_tokens = Histogram(
            "radixgrove_engine_step_tokens",
            "Tokens computed by a step.",
            registry=registry,
            buckets=_TOKEN_BUCKETS,
        )

        self._expert_tokens = Counter(
            "radixgrove_engine_expert_tokens",
            "Tokens that each expert was given, over all layers.",
            ["expert"],
            registry=registry,
        )
        self._experts_counted: NDArray[np.int64] | None = None
        self._expert_imbalance = Gauge(
            "radixgrove_engine_expert_imbalance",
            "Tokens of the busiest expert over the mean, averaged over layers, since the start.",
            registry=registry,
            multiprocess_mode="livesum",
        )

    def observe_step(self, seconds: float, tokens: int) -> None:
        self._step_seconds.observe(seconds)
        self._step_tokens.observe(tokens)

    def observe_masks(self, seconds: float) -> None:
        self._mask_seconds.observe(seconds)

    def follow_experts(self, tokens: NDArray[np.int64] | None) -> None:
        """Take over [layers, experts] tokens since the start; None: the model has no experts."""
        if tokens is None or not tokens.any():
            return
        total = tokens.sum(axis=0)
        before = self._experts_counted
        for expert, count in enumerate((total if before is None else total - before).tolist()):
            if count or before is None:
                self._expert_tokens.labels(str(expert)).inc(count)
        self._experts_counted = total
        busiest = tokens.max(axis=1) / np.maximum(tokens.mean(axis=1), 1e-9)
        self._expert_imbalance.set(float(busiest.mean()))

    def follow(self, stats: Stats, clock: PhaseClock) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(getattr(stats, name))
        for name, counter in self._counters.items():
            value = getattr(stats, name)
            counter.inc(value - self._counted[name])
            self._counted[name] = value
        for name, seconds in clock.seconds.items():
            self._phases[name].inc(seconds - self._phases_counted[name])
            self._phases_counted[name] = seconds

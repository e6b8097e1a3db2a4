"""The engine's metrics follow its pulse: gauges take its values, counters what it added."""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry

from radixgrove.worker.engine.metrics import EngineMetrics, PhaseClock
from radixgrove.worker.messages import EngineState, Stats


def test_metrics_follow_the_pulse() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)

    def scraped(name: str) -> float | None:
        return registry.get_sample_value(f"radixgrove_engine_{name}")

    def follow(turn: int) -> None:
        metrics.follow(
            Stats(
                state=EngineState.READY,
                ticks=turn,
                steps=turn,
                step_remaining=None,
                cached_tokens=50 * turn,
                host_pages_total=640,
                host_pages_used=100 - turn,
                host_cached_tokens=32 * turn,
                saved_pages=7 * turn,
                loaded_pages=2 * turn,
            ),
            PhaseClock(),
        )

    for turn in (1, 3):
        follow(turn)
        assert scraped("host_pages") == 640
        assert scraped("host_used_pages") == 100 - turn
        assert scraped("cached_tokens_total") == 50 * turn
        assert scraped("host_cached_tokens_total") == 32 * turn
        assert scraped("saved_pages_total") == 7 * turn
        assert scraped("loaded_pages_total") == 2 * turn


def test_tokens_of_experts_are_counted_over_all_layers() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)

    def scraped(expert: int) -> float | None:
        labels = {"expert": str(expert)}
        return registry.get_sample_value("radixgrove_engine_expert_tokens_total", labels)

    metrics.follow_experts(None)
    metrics.follow_experts(np.zeros((2, 3), dtype=np.int64))
    assert scraped(0) is None, "a model without experts has no such series"
    metrics.follow_experts(np.array([[4, 0, 2], [2, 2, 2]]))
    metrics.follow_experts(np.array([[4, 0, 8], [4, 4, 4]]))
    assert [scraped(expert) for expert in range(3)] == [8, 4, 12]
    assert registry.get_sample_value("radixgrove_engine_expert_imbalance") == (2.0 + 1.0) / 2

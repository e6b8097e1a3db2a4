"""How fast prompts are computed is measured where steps say it."""

from __future__ import annotations

import pytest

from radixgrove.worker.engine.prefill_rate import PrefillRate


def test_full_steps_count_and_the_latest_most() -> None:
    rate = PrefillRate(512)
    assert rate.tokens_per_second == 0
    rate.observe(0.5, 512)
    assert rate.tokens_per_second == pytest.approx(1024)
    for _ in range(60):
        rate.observe(0.1, 512)
    assert rate.tokens_per_second == pytest.approx(5120, rel=0.01)


def test_steps_that_hardly_prefill_say_nothing() -> None:
    rate = PrefillRate(512)
    rate.observe(0.1, 512)
    for _ in range(100):
        rate.observe(0.1, 20)
    assert rate.tokens_per_second == pytest.approx(5120)

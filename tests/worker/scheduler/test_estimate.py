"""How long outputs are expected to get, and how fast the queue is expected to move."""

from __future__ import annotations

import numpy as np
import pytest

from radixgrove.worker.scheduler.estimate import OutputEstimator, QueuePace


def test_half_of_what_may_come_is_expected_before_anything_is_known() -> None:
    assert OutputEstimator().remaining(0, 100) == 50
    assert OutputEstimator().remaining(20, 100) == 30


def test_one_more_token_is_expected_at_least() -> None:
    estimator = OutputEstimator()
    estimator.share = 0.0
    assert estimator.remaining(0, 100) == 1
    assert estimator.remaining(99, 100) == 1
    estimator.share = 1.0
    assert estimator.remaining(100, 100) == 1
    assert estimator.remaining(98, 100) == 2


def test_many_requests_are_estimated_as_each_of_them() -> None:
    estimator = OutputEstimator()
    generated = np.array([0, 20, 49, 50, 99, 2047, 2048, 8000])
    limits = np.array([100, 100, 100, 100, 100, 1 << 20, 4096, 8192])
    each = [estimator.remaining(*pair) for pair in zip(generated, limits, strict=True)]
    assert estimator.remaining_of_all(generated, limits).tolist() == each
    assert each[2:5] == [1, 1, 1], "one more is expected at least"


def test_a_request_for_one_token_that_got_it_used_all_it_asked_for() -> None:
    estimator = OutputEstimator()
    estimator.observe(1, 1)
    assert estimator.share == pytest.approx(0.525)


def test_long_limits_are_not_believed() -> None:
    estimator = OutputEstimator()
    assert estimator.remaining(0, 1 << 20) == estimator.remaining(0, 4096) == 2048
    estimator.observe(4096, 1 << 20)
    assert estimator.share == pytest.approx(0.525)


def test_it_learns_from_what_finished_and_at_once_from_a_preemption() -> None:
    estimator = OutputEstimator()
    estimator.observe(0, 100)
    assert estimator.share == pytest.approx(0.475)
    estimator.observe(300, 100)  # bounded: no more than all
    assert estimator.share == pytest.approx(0.475 + 0.05 * 0.525)
    estimator.share = 0.5
    estimator.preempted()
    assert estimator.share == pytest.approx(0.625)
    for _ in range(5):
        estimator.preempted()
    assert estimator.share == 1.0


def test_half_the_queue_at_the_pace_of_admissions() -> None:
    pace = QueuePace()
    assert pace.retry_after(1000) == 1.0, "nothing is known yet"
    for second in range(0, 200, 2):
        pace.admitted(1, float(second))
    assert pace.retry_after(20) == pytest.approx(20, abs=1)
    assert pace.retry_after(0) == 1.0
    assert pace.retry_after(1000) == 60.0
    pace.idle()
    pace.admitted(1, 10_000.0)
    assert pace.retry_after(20) == pytest.approx(20, abs=1), "an idle while is no slow queue"

"""The constants of a step's time are found from steps, and follow them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.worker.engine.step_time import StepTimeFit
from radixgrove.worker.scheduler.step_time import StepTime, StepWork, pairs

H200 = StepTime(fixed=0.006, token=12e-6, pair=2e-9, kv_token=3e-8)


def some_work(random: Random) -> StepWork:
    rows, chunk = random.randint(0, 256), random.choice([0, 0, 64, 512, 2048, 8192])
    context = random.randint(0, 30_000)
    return StepWork(rows + chunk + 1, pairs(context, chunk), rows * random.randint(100, 2000))


def fitted(truth: StepTime, seed: int, steps: int = 400, noise: float = 0.02) -> StepTimeFit:
    random, fit = Random(seed), StepTimeFit()
    for _ in range(steps):
        work = some_work(random)
        fit.observe(work, truth.of(work) * random.uniform(1 - noise, 1 + noise))
    return fit


@given(st.integers(0, 1 << 16))
def test_the_time_of_a_step_is_predicted_from_steps_before_it(seed: int) -> None:
    fit, random = fitted(H200, seed), Random(seed + 1)
    for _ in range(50):
        work = some_work(random)
        assert fit.time.of(work) == pytest.approx(H200.of(work), rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 1 << 28)), max_size=100))
def test_no_constant_is_negative(steps: list[tuple[int, int]]) -> None:
    fit = StepTimeFit(5000.0)
    for tokens, work in steps:
        fit.observe(StepWork(tokens, work, work // 7), 0.01)
        time = fit.time
        assert min(time.fixed, time.token, time.pair, time.kv_token) >= 0


def test_it_follows_a_machine_that_becomes_slower() -> None:
    fit, random = fitted(H200, 1), Random(2)
    slower = StepTime(0.012, 24e-6, 4e-9, 6e-8)
    for _ in range(2000):
        work = some_work(random)
        fit.observe(work, slower.of(work))
    work = StepWork(700, pairs(3000, 512), 100_000)
    assert fit.time.of(work) == pytest.approx(slower.of(work), rel=0.05)


def test_a_step_that_was_held_up_changes_little() -> None:
    fit = fitted(H200, 3)
    work = StepWork(700, pairs(3000, 512), 100_000)
    before = fit.time.of(work)
    fit.observe(work, 30.0)
    for _ in range(8):
        fit.observe(work, H200.of(work))
    assert fit.time.of(work) == pytest.approx(before, rel=0.25)


def test_the_first_guess_is_the_rate_that_warm_up_measured() -> None:
    assert StepTimeFit(5000.0).time == StepTime(token=1 / 5000)
    assert StepTimeFit().time == StepTime()

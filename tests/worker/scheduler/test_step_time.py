"""Prefill dealt out by time: rows that decode do not wait for long chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.worker.plan import StepPlan
from radixgrove.worker.scheduler.step_time import StepTime, StepWork, pairs
from tests.worker.scheduler.harness import Harness, request

WIDE = {"num_pages": 2000, "max_rows": 16, "max_running": 16, "max_model_len": 2000}
A_TOKEN_A_MS = StepTime(fixed=0.002, token=0.001)

times = st.builds(
    StepTime,
    fixed=st.floats(0, 0.1),
    token=st.floats(1e-7, 1e-2),
    pair=st.one_of(st.just(0.0), st.floats(1e-10, 1e-4)),
)


def prompt(which: int, length: int) -> list[int]:
    return [(which * 7 + index * (which + 1)) % 50 for index in range(length)]


@given(st.integers(0, 5000), st.integers(0, 300))
def test_pairs_count_each_token_with_all_up_to_itself(start: int, length: int) -> None:
    assert pairs(start, length) == sum(range(start + 1, start + length + 1))


@given(times, st.integers(0, 100_000), st.floats(0, 10))
def test_the_longest_chunk_is_the_longest_that_fits(
    time: StepTime, start: int, seconds: float
) -> None:
    length = time.longest_chunk(start, seconds)
    slack = 1e-9 + 1e-9 * seconds
    assert time.of_chunk(start, length) <= seconds + slack
    assert time.of_chunk(start, length + 1) >= seconds - slack


def decoding(harness: Harness, rows: int) -> None:
    for index in range(rows):
        harness.submit(request(f"d{index}", prompt(index, 4), 400))
    while len(harness.tokens) < rows:
        harness.step()


def chunks(plan: StepPlan) -> int:
    return sum(chunk.length for chunk in plan.prefills)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_that_decode_wait_no_longer_than_the_bound(depth: int) -> None:
    harness = Harness(depth, max_step_tokens=256, max_step_seconds=0.034, **WIDE)
    harness.scheduler.step_time = A_TOKEN_A_MS
    decoding(harness, 2)
    harness.submit(request("long", prompt(9, 900), 1))
    before = len(harness.plans)
    while "long" not in harness.ended:
        harness.step()
    plans = list(harness.plans)[before:]
    # 34 ms less 2 for the step and 2 for its decodes.
    assert {chunks(plan) for plan in plans if len(plan.decodes) == 2} <= {0, 30, 900 % 30}
    assert sum(map(chunks, plans)) == 900
    harness.run()
    assert harness.tokens["long"] == harness.expected("long")


def test_alone_prompts_are_computed_as_fast_as_they_can_be() -> None:
    harness = Harness(max_step_tokens=256, max_step_seconds=0.034, **WIDE)
    harness.scheduler.step_time = A_TOKEN_A_MS
    harness.submit(request("long", prompt(9, 900), 1))
    harness.run()
    assert [chunks(plan) for plan in harness.plans] == [256, 256, 256, 132]


def test_before_steps_were_timed_tokens_alone_bound_them() -> None:
    harness = Harness(max_step_tokens=256, max_step_seconds=0.034, **WIDE)
    decoding(harness, 2)
    harness.submit(request("long", prompt(9, 900), 1))
    harness.step()
    assert chunks(harness.plans[-1]) == 254


@pytest.mark.parametrize("short_prompts", [0, 300])
def test_where_decodes_take_all_the_time_prefill_goes_on_by_a_page_a_step(
    short_prompts: int,
) -> None:
    """Also for a long prompt beside which short ones come all the time."""
    harness = Harness(max_step_tokens=256, max_step_seconds=0.003, **WIDE)
    harness.scheduler.step_time = A_TOKEN_A_MS
    decoding(harness, 2)
    harness.submit(request("long", prompt(9, 400), 1))
    harness.step()
    for index in range(short_prompts):
        harness.submit(request(f"short{index}", prompt(10 + index, 8), 1))
    steps = 0
    while "long" not in harness.ended:
        harness.step()
        steps += 1
        assert chunks(harness.plans[-1]) <= 2 * harness.config.page_size
    assert steps <= 400 // harness.config.page_size + 2


def test_short_prompts_get_a_quarter_of_the_time() -> None:
    harness = Harness(max_step_tokens=256, max_step_seconds=0.084, **WIDE)
    harness.scheduler.step_time = A_TOKEN_A_MS
    decoding(harness, 2)
    harness.submit(request("long", prompt(9, 1000), 1))
    harness.step()
    for index in range(20):
        harness.submit(request(f"short{index}", prompt(10 + index, 10), 1))
    harness.step()
    plan = harness.plans[-1]
    assert chunks(plan) == 80
    (own,) = [chunk.length for chunk in plan.prefills if chunk.start >= 80]
    assert own == pytest.approx(60, abs=1)


def test_the_work_of_a_step_is_known_beside_its_plan() -> None:
    harness = Harness(max_step_tokens=256, max_step_seconds=1.0, **WIDE)
    harness.submit(request("long", prompt(9, 300), 1))
    harness.launch()
    assert harness.scheduler.work == StepWork(256, pairs(0, 256), 0)
    harness.collect()
    harness.launch()
    assert harness.scheduler.work == StepWork(44, pairs(256, 44), 0)
    harness.run()
    harness.submit(request("row", prompt(1, 20), 5))
    harness.launch()
    harness.collect()
    harness.launch()
    assert harness.scheduler.work == StepWork(1, 0, 21)

"""Steps that yield a row between no token and k: bounds, pages for them, ends within a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest

from radixgrove.worker.messages import Finish, Tokens
from radixgrove.worker.plan import StepResult
from tests.worker.scheduler.harness import Harness, request
from tests.worker.scheduler.test_batching import prompt


def counts(values: Iterable[int]) -> Callable[[int], int]:
    """These in turn, each within its bound; then all that a step may yield."""
    turns = iter(values)
    return lambda bound: min(next(turns, bound), bound)


def sizes(harness: Harness, request_id: str) -> list[int]:
    """Tokens a message."""
    return [len(m.token_ids) for m in harness.messages[request_id] if isinstance(m, Tokens)]


def end(harness: Harness, request_id: str) -> Tokens:
    output = harness.ended[request_id]
    assert isinstance(output, Tokens)
    return output


def test_a_step_may_yield_none_some_and_all_of_its_bound() -> None:
    harness = Harness(count=counts([1, 0, 2, 4, 0, 3]), max_row_tokens=4)
    harness.submit(request("r", prompt(0, 5), 12))
    harness.run()
    assert sizes(harness, "r") == [1, 2, 4, 3, 2]
    assert harness.tokens["r"] == harness.expected("r")
    assert [plan.bounds for plan in harness.plans] == [[4], [4], [4], [4], [4], [4], [2]]
    assert harness.stats().generated_tokens == 12


def test_a_bound_ends_with_what_the_request_may_generate() -> None:
    """The third step is launched before the first two have said how little they yield."""
    harness = Harness(depth=3, count=counts([1, 1, 1]), max_row_tokens=4, max_step_tokens=64)
    harness.submit(request("r", prompt(0, 4), 10))
    harness.step()
    assert [plan.bounds for plan in harness.plans] == [[1], [4], [4]]
    assert harness.launch()
    assert harness.plans[-1].bounds == [1]
    harness.run()
    assert harness.tokens["r"] == harness.expected("r")
    assert end(harness, "r").finish is Finish.LENGTH


def test_the_longest_length_holds_within_a_step() -> None:
    harness = Harness(max_model_len=16, max_row_tokens=4, depth=2)
    harness.submit(request("r", prompt(0, 10), 100))
    harness.run()
    assert len(harness.tokens["r"]) == 6
    assert end(harness, "r").finish is Finish.LENGTH


def test_tokens_behind_a_stop_are_neither_sent_nor_counted_nor_cached() -> None:
    probe = Harness(max_row_tokens=4)
    probe.submit(request("r", prompt(0, 4), 20))
    probe.run()
    text = probe.tokens["r"]
    stop = next(token for token in text[5:9] if token not in text[:5])
    length = text.index(stop) + 1
    harness = Harness(max_row_tokens=4, depth=2)
    harness.submit(request("r", prompt(0, 4), 20, stop=(stop,), logprobs=0))
    harness.run()
    assert harness.tokens["r"] == text[:length]
    assert (end(harness, "r").finish, end(harness, "r").stop_token) == (Finish.STOP, stop)
    assert len(end(harness, "r").logprobs or []) == len(end(harness, "r").token_ids)
    assert harness.stats().generated_tokens == length
    # The KV of the last token was never needed: whole pages of what is before it are cached.
    known = prompt(0, 4) + text
    harness.submit(request("again", [*known, 1, 2, 3], 1))
    harness.run()
    assert harness.cached_tokens("again") == (4 + length - 1) // 4 * 4


def test_a_stop_before_min_tokens_does_not_end_a_step_short() -> None:
    probe = Harness()
    probe.submit(request("r", prompt(0, 4), 12))
    probe.run()
    text = probe.tokens["r"]
    harness = Harness(max_row_tokens=4)
    harness.submit(request("r", prompt(0, 4), 12, stop=(text[1],), min_tokens=8))
    harness.run()
    assert harness.tokens["r"] == harness.expected("r")
    assert len(harness.tokens["r"]) > 8


def test_pages_for_a_bound_come_back_when_the_step_yields_less() -> None:
    harness = Harness(
        count=counts([1, 4, 1]),
        page_size=1,
        max_model_len=64,
        max_row_tokens=4,
        prefix_cache=False,
    )
    harness.submit(request("r", prompt(0, 5), 30))
    harness.step()
    harness.step()
    pool = harness.scheduler.memory.pool
    assert harness.plans[-1].bounds == [4]
    assert pool.num_pages - pool.free == 9  # KV of all tokens but the last
    harness.launch()
    assert pool.num_pages - pool.free == 13
    harness.collect()
    assert pool.num_pages - pool.free == 10
    harness.launch()
    (shrunk,) = harness.plans[-1].shrunk_rows
    assert (shrunk.length, shrunk.pages) == (11, 10)
    harness.run()
    assert harness.tokens["r"] == harness.expected("r")


def test_a_row_gets_less_before_another_is_preempted_for_its_sake() -> None:
    harness = Harness(
        num_pages=16, max_model_len=32, watermark=0.0, max_row_tokens=4, max_step_tokens=64
    )
    harness.scheduler._admission.estimator.share = 0.0
    harness.submit(request("one", prompt(0, 28), 4))  # seven pages, then one
    harness.submit(request("two", prompt(1, 26), 6))  # seven, then one
    harness.run()
    assert harness.stats().preemptions == 0
    assert harness.tokens["one"] == harness.expected("one")
    assert harness.tokens["two"] == harness.expected("two")


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_in_lockstep_decodes_only_with_all_its_tokens_known(depth: int) -> None:
    harness = Harness(depth=depth, max_step_tokens=64)
    harness.submit(request("waits", prompt(0, 4), 6, lockstep=True))
    harness.submit(request("goes on", prompt(1, 4), 40))
    harness.run()  # the harness sees that no step in flight samples a row that waits
    row = harness.plans[0].new_rows[0].row
    steps = [index for index, plan in enumerate(harness.plans) if row in plan.decodes]
    assert len(steps) == 5
    assert all(later - sooner == depth for sooner, later in pairwise(steps))
    assert [m.token_ids for m in harness.messages["waits"] if isinstance(m, Tokens)] == [
        [token] for token in harness.expected("waits")
    ]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_micro_batches_are_level_and_take_turns(micro_batches: int, run_ahead: bool) -> None:
    harness = Harness(
        depth=micro_batches + 1,
        micro_batches=micro_batches,
        run_ahead=run_ahead,
        max_step_tokens=64,
    )
    for index in range(7):
        harness.submit(request(f"r{index}", prompt(index, 4), 8 if index < 3 else 30))
    for _ in range(8 * micro_batches):
        harness.step()
    assert [f"r{index}" in harness.ended for index in range(7)] == [True] * 3 + [False] * 4
    for _ in range(2 * micro_batches):  # what is left is dealt anew
        harness.step()
    last = [plan.decodes for plan in list(harness.plans)[-micro_batches:]]
    assert sorted(row for decodes in last for row in decodes) == sorted(
        active.row for active in harness.scheduler._batch.active.values()
    )
    assert max(map(len, last)) - min(map(len, last)) <= 1
    harness.run()
    assert all(harness.tokens[f"r{index}"] == harness.expected(f"r{index}") for index in range(7))


def test_a_lone_row_that_runs_ahead_is_in_every_step_in_flight() -> None:
    harness = Harness(depth=3, micro_batches=2, run_ahead=True)
    harness.submit(request("alone", prompt(0, 4), 20))
    while harness.launch():
        pass
    assert [plan.sampled_rows() for plan in harness.plans] == [[0]] * 3
    harness.run()
    assert harness.tokens["alone"] == harness.expected("alone")


def test_rows_that_run_ahead_leave_a_step_between_their_samples_to_others() -> None:
    harness = Harness(
        depth=3, micro_batches=2, run_ahead=True, max_step_tokens=16, prefix_cache=False
    )
    for index in range(6):
        harness.submit(request(f"r{index}", prompt(index, 12), 20))
    harness.run()
    sampled = [set(plan.sampled_rows()) for plan in harness.plans]
    # While there are rows for two parts: no stage waits for tokens of the step right before.
    both = [(first, second) for first, second in pairwise(sampled[:-8]) if first and second]
    assert len(both) > 20
    assert all(first.isdisjoint(second) for first, second in both)
    assert all(harness.tokens[f"r{index}"] == harness.expected(f"r{index}") for index in range(6))


@pytest.mark.parametrize(
    "result",
    [
        StepResult(step_id=2, tokens=[1], counts=[1]),
        StepResult(step_id=1, tokens=[1, 2, 3], counts=[3]),
        StepResult(step_id=1, tokens=[1], counts=[2]),
        StepResult(step_id=1, tokens=[1, 1], counts=[1, 1]),
        StepResult(step_id=1, tokens=[], counts=[-1]),
    ],
    ids=str,
)
def test_results_beyond_the_plan_are_an_error(result: StepResult) -> None:
    harness = Harness(max_row_tokens=2)
    harness.submit(request("r", prompt(0, 3), 8))
    assert harness.launch()
    with pytest.raises(RuntimeError, match="step 1"):
        harness.scheduler.complete(result)

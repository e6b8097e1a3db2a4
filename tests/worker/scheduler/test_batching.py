"""What goes into a step: order, budgets, sharing, preemption."""

from __future__ import annotations

import numpy as np
import pytest

from radixgrove.protocol.settings import SchedulePolicy
from radixgrove.worker.plan import StepPlan
from tests.worker.scheduler.harness import Harness, request, unpack

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 50, length)]


def computed_tokens(plans: list[StepPlan]) -> int:
    return sum(chunk.length for plan in plans for chunk in plan.prefills)


def order_of_admission(harness: Harness) -> list[list[int]]:
    return [unpack(new.token_ids) for plan in harness.plans for new in plan.new_rows]


# ---- steps ---------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_that_fill_the_budget() -> None:
    harness = Harness(max_step_tokens=16)
    harness.submit(request("r", prompt(0, 50), 2))
    harness.run()
    lengths = [chunk.length for plan in harness.plans for chunk in plan.prefills]
    assert lengths == [16, 16, 16, 2]
    assert [c.sample for p in harness.plans for c in p.prefills] == [False, False, False, True]


def test_decodes_go_on_while_a_prompt_is_computed() -> None:
    harness = Harness(max_step_tokens=8)
    harness.submit(request("decodes", prompt(0, 4), 20))
    harness.step()
    harness.submit(request("long", prompt(1, 40), 2))
    harness.step()
    mixed = [plan for plan in harness.plans if plan.prefills and plan.decodes]
    assert mixed
    while any(chunk.length for chunk in harness.plans[-1].prefills):
        assert harness.plans[-1].num_tokens <= 8
        assert len(harness.plans[-1].decodes) == 1
        harness.step()
    harness.run()
    assert harness.tokens["long"] == harness.expected("long")


def test_the_order_of_decodes_is_stable_while_rows_come_and_go() -> None:
    harness = Harness(max_step_tokens=64)
    for index in range(6):
        harness.submit(request(f"r{index}", prompt(index, 4), 4 + 3 * (index % 3)))
    harness.run()
    for before, after in zip(list(harness.plans), list(harness.plans)[1:], strict=False):
        kept = [row for row in before.decodes if row in after.decodes]
        assert [row for row in after.decodes if row in kept] == kept


def test_plans_carry_only_what_changed() -> None:
    harness = Harness(depth=2, max_step_tokens=64)
    harness.submit(request("r", prompt(0, 4), 12))
    harness.run()
    decodes = [plan for plan in harness.plans if plan.decodes]
    assert sum(len(plan.new_rows) for plan in harness.plans) == 1
    assert all(not plan.new_rows for plan in decodes)
    # 4 + 12 - 1 tokens need KV: one page with the prompt, then one every four steps.
    assert [len(plan.appended_pages) for plan in decodes] == [1, 0, 0, 0] * 2 + [1, 0, 0]


@DEPTHS
def test_as_many_steps_are_planned_ahead_as_the_depth_allows(depth: int) -> None:
    harness = Harness(depth)
    harness.submit(request("r", prompt(0, 4), 20))
    while harness.launch():
        pass
    assert harness.scheduler.in_flight == depth


def test_more_decoding_rows_than_the_step_holds_take_turns_to_the_end() -> None:
    harness = Harness(max_step_tokens=3, max_model_len=32)
    for index in range(8):
        harness.submit(request(f"r{index}", prompt(index, 3), 10))
    harness.run()
    for index in range(8):
        assert harness.tokens[f"r{index}"] == harness.expected(f"r{index}")


@pytest.mark.parametrize(("depth", "budget"), [(1, 8), (2, 8), (3, 4)])
def test_rows_that_sit_a_step_out_are_in_the_next(depth: int, budget: int) -> None:
    """Steps yield less than they may, so that rows come back which seemed to have ended."""
    options = {"max_step_tokens": budget, "max_row_tokens": 4, "max_model_len": 64}
    harness = Harness(depth, lambda bound: 1, num_pages=600, **options)
    for index in range(8):
        harness.submit(request(f"r{index}", prompt(index, 3), 24))
    progress: dict[str, tuple[int, int]] = {}  # tokens, and the step in which they came
    most_decoding = step = 0
    while harness.step():
        step += 1
        most_decoding = max(most_decoding, len(harness.plans[-1].decodes))
        for name, tokens in harness.tokens.items():
            if len(tokens) != progress.get(name, (0, 0))[0] or name in harness.ended:
                progress[name] = len(tokens), step
            assert step - progress[name][1] <= 8, f"{name} starves"
    assert len(harness.ended) == 8
    assert most_decoding == budget // 4


# ---- short prompts beside long ones --------------------------------------------------------------

WIDE = {"num_pages": 600, "max_rows": 32, "max_running": 32, "max_model_len": 512}


def steps_until_it_ran(harness: Harness, names: set[str]) -> int:
    """Steps until all of them have a token."""
    steps = 0
    while not names <= harness.tokens.keys():
        harness.step()
        steps += 1
    return steps


@DEPTHS
def test_short_prompts_behind_long_ones_begin_in_the_first_two_steps_after_they_came(
    depth: int,
) -> None:
    harness = Harness(depth, max_step_tokens=64, **WIDE)
    for index in range(4):
        harness.submit(request(f"long{index}", prompt(index, 400), 1))
    harness.step()
    planned = len(harness.plans)
    for index in range(8):
        harness.submit(request(f"short{index}", prompt(10 + index, 4), 1))
    harness.run()
    admitted = [
        unpack(new.token_ids)
        for plan in list(harness.plans)[planned : planned + 2]
        for new in plan.new_rows
    ]
    assert [p for p in admitted if len(p) == 4] == [prompt(10 + index, 4) for index in range(8)]
    # As many steps as it takes to compute all tokens, and one that is not full.
    assert len(harness.plans) <= (4 * 400 + 8 * 4) // 64 + 1


def test_long_prompts_keep_three_quarters_of_each_step() -> None:
    harness = Harness(max_step_tokens=64, **WIDE)
    harness.submit(request("long", prompt(0, 500), 1))
    harness.step()
    for index in range(300):
        harness.submit(request(f"short{index}", prompt(1 + index, 8), 1))
    while "long" not in harness.tokens:
        harness.step()
        plan = harness.plans[-1]
        assert plan.num_tokens == 64
        (own,) = [chunk for chunk in plan.prefills if chunk.row == 0]
        assert own.length >= 48 or own.sample


def test_a_short_request_is_one_with_little_left_to_compute() -> None:
    """Whatever its prompt's length, what is cached need not be computed."""
    harness = Harness(max_step_tokens=64, **WIDE)
    common = prompt(5, 100)
    harness.submit(request("first", common, 1))
    harness.run()
    for index in range(3):
        harness.submit(request(f"long{index}", prompt(index, 400), 1))
    harness.step()
    harness.submit(request("other", prompt(7, 104), 1))
    harness.submit(request("follows", [*common, 1, 2, 3, 4], 1))
    assert steps_until_it_ran(harness, {"follows"}) <= 2
    assert "other" not in harness.tokens


def test_short_requests_pass_nothing_that_waits_for_memory() -> None:
    harness = Harness(max_step_tokens=64, **{**WIDE, "num_pages": 200})
    harness.submit(request("runs", prompt(0, 500), 1))
    harness.step()
    harness.submit(request("waits", prompt(1, 400), 1))  # 225 pages for both
    harness.submit(request("short", prompt(2, 4), 1))
    harness.run()
    admitted = order_of_admission(harness)
    assert [len(tokens) for tokens in admitted] == [500, 400, 4]


def test_short_requests_leave_a_row_to_each_that_they_pass() -> None:
    harness = Harness(max_step_tokens=64, **{**WIDE, "max_running": 3})
    for index in range(2):
        harness.submit(request(f"long{index}", prompt(index, 400), 100))
    harness.step()
    harness.submit(request("short0", prompt(10, 4), 8))
    harness.submit(request("short1", prompt(11, 4), 8))
    harness.run()
    assert [len(tokens) for tokens in order_of_admission(harness)] == [400, 4, 400, 4]


@pytest.mark.parametrize("policy", [SchedulePolicy.PRIORITY, SchedulePolicy.LONGEST_OUTPUT])
def test_where_the_order_is_the_users_nothing_is_passed(policy: SchedulePolicy) -> None:
    harness = Harness(max_step_tokens=64, schedule_policy=policy, **WIDE)
    for index in range(2):
        harness.submit(request(f"long{index}", prompt(index, 400), 9, priority=1))
    harness.step()
    harness.submit(request("short", prompt(10, 4), 1))
    harness.run()
    assert [len(tokens) for tokens in order_of_admission(harness)] == [400, 400, 4]


# ---- sharing a prefix in flight ------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("count", [2, 8])
def test_equal_prompts_at_once_are_computed_once(depth: int, count: int) -> None:
    harness = Harness(depth, max_step_tokens=100)
    for index in range(count):
        harness.submit(request(f"r{index}", prompt(0, 70), 3))
    harness.run()
    # 17 whole pages of the first, then the last tokens of each of the others.
    assert computed_tokens(list(harness.plans)) == 70 + (count - 1) * 2
    for index in range(count):
        assert harness.tokens[f"r{index}"] == harness.expected(f"r{index}")


@DEPTHS
def test_a_long_common_prefix_is_computed_once_over_many_chunks(depth: int) -> None:
    harness = Harness(depth, max_step_tokens=8)
    for index in range(8):
        harness.submit(request(f"r{index}", prompt(0, 90), 2))
    harness.run()
    # The last 32 shared tokens may be cheaper to compute than to wait for.
    assert computed_tokens(list(harness.plans)) <= 90 + 7 * (32 + 4)
    for index in range(8):
        assert harness.tokens[f"r{index}"] == harness.expected(f"r{index}")


def test_whoever_shares_nothing_does_not_wait_for_the_leader() -> None:
    harness = Harness(max_step_tokens=100)
    common = prompt(0, 60)
    for name, tokens in (("leads", common), ("follows", common), ("other", prompt(9, 30))):
        harness.submit(request(name, tokens))
    harness.step()
    assert order_of_admission(harness) == [common, prompt(9, 30)]


def test_a_short_common_beginning_is_not_waited_for() -> None:
    harness = Harness(max_step_tokens=100)
    for index in range(3):
        harness.submit(request(f"r{index}", [1] * 8 + prompt(index, 20)))
    harness.step()
    assert len(order_of_admission(harness)) == 3


def test_when_the_leader_goes_a_follower_takes_over() -> None:
    harness = Harness(max_step_tokens=8)
    for index in range(3):
        harness.submit(request(f"r{index}", prompt(0, 64), 2))
    harness.step()
    harness.step()
    harness.abort("r0")
    harness.run()
    assert harness.cached_tokens("r1") == 16  # what the leader had done
    assert harness.cached_tokens("r2") == 60
    assert harness.tokens["r2"] == harness.expected("r2")


def test_followers_start_from_chunks_that_are_done_not_launched() -> None:
    harness = Harness(depth=2, max_step_tokens=64)
    shared = prompt(0, 40)
    harness.submit(request("leads", shared))
    harness.submit(request("follows", [*shared, 1]))
    harness.launch()
    assert not harness.plans[0].new_rows[1:]
    harness.launch()  # in flight, so nothing can be read yet
    assert len(order_of_admission(harness)) == 1
    harness.run()
    assert harness.cached_tokens("follows") == 40


# ---- memory --------------------------------------------------------------------------------------


@DEPTHS
def test_running_out_of_pages_preempts_and_everyone_still_finishes(depth: int) -> None:
    harness = Harness(depth, num_pages=16, max_model_len=64, watermark=0.0)
    harness.scheduler._admission.estimator.share = 0.0  # believe in short answers
    for index in range(4):
        harness.submit(request(f"r{index}", prompt(index, 8), 40))
    harness.run()
    stats = harness.stats()
    assert stats.preemptions >= 1
    assert stats.evicted_pages >= 1
    for index in range(4):
        assert harness.tokens[f"r{index}"] == harness.expected(f"r{index}")
        assert harness.cached_tokens(f"r{index}") == 0


@DEPTHS
def test_the_oldest_request_is_never_preempted(depth: int) -> None:
    harness = Harness(depth, num_pages=16, max_model_len=64, watermark=0.0)
    harness.scheduler._admission.estimator.share = 0.0
    oldest = prompt(0, 8)
    harness.submit(request("oldest", oldest, 50))
    harness.step()
    for index in range(1, 4):
        # Longer prompts than the oldest: it is the cheapest to recompute.
        harness.submit(request(f"r{index}", prompt(index, 12), 30))
    harness.run()
    assert harness.stats().preemptions >= 1
    begins = [tokens for tokens in order_of_admission(harness) if tokens[:8] == oldest]
    assert begins == [oldest]


def test_the_victim_is_who_is_cheapest_to_recompute() -> None:
    harness = Harness(num_pages=16, max_model_len=64, watermark=0.0, max_step_tokens=64)
    harness.scheduler._admission.estimator.share = 0.0
    harness.submit(request("oldest", prompt(0, 8), 50))
    harness.submit(request("cheap", prompt(1, 4), 50))
    harness.submit(request("dear", prompt(2, 24), 50))
    while not harness.stats().preemptions:
        harness.step()
    states = {name: r.state for name, r in harness.scheduler._lifecycle.requests.items()}
    assert states == {"oldest": "decode", "cheap": "preempted", "dear": "decode"}
    harness.run()
    assert harness.tokens["cheap"] == harness.expected("cheap")


def test_what_a_preempted_request_computed_is_read_back_if_it_is_still_there() -> None:
    harness = Harness(num_pages=64)
    harness.submit(request("r", prompt(0, 30), 10))
    for _ in range(6):
        harness.step()
    active = next(iter(harness.scheduler._batch.active.values()))
    computed = active.computed
    harness.scheduler._admission.preempt(active)
    harness.scheduler.check()
    before = computed_tokens(list(harness.plans))
    harness.run()
    again = computed_tokens(list(harness.plans)) - before
    assert again <= harness.config.page_size + computed % harness.config.page_size
    assert harness.tokens["r"] == harness.expected("r")
    assert harness.cached_tokens("r") == 0  # of its prompt, when it first began


def test_prompt_logprobs_cut_short_by_a_preemption_are_computed_once_more() -> None:
    harness = Harness(max_step_tokens=8)
    harness.submit(request("r", prompt(0, 30), 3, prompt_logprobs=0))
    harness.step()
    harness.step()
    harness.scheduler._admission.preempt(next(iter(harness.scheduler._batch.active.values())))
    harness.run()
    logprobs = harness.messages["r"][0].prompt_logprobs  # type: ignore[union-attr]
    assert logprobs is not None
    assert [entry and -entry.logprob for entry in logprobs] == [None, *prompt(0, 30)[1:]]


def test_a_request_is_admitted_only_when_its_whole_prompt_fits() -> None:
    harness = Harness(num_pages=16, max_step_tokens=8, max_model_len=64)
    harness.submit(request("first", prompt(0, 30), 2))
    harness.submit(request("second", prompt(1, 40), 2))  # 10 of 16 pages, 8 are taken
    harness.step()
    harness.step()
    assert len(order_of_admission(harness)) == 1
    harness.run()
    assert harness.stats().preemptions == 0
    assert harness.tokens["second"] == harness.expected("second")


def test_expected_output_counts_when_admitting() -> None:
    harness = Harness(num_pages=20, max_model_len=80, max_step_tokens=64, watermark=0.0)
    harness.scheduler._admission.estimator.share = 1.0
    for index in range(4):
        harness.submit(request(f"r{index}", prompt(index, 8), 24))  # 2 pages now, 8 in the end
    harness.step()
    assert len(order_of_admission(harness)) == 2
    harness.run()
    assert harness.stats().preemptions == 0


def test_the_watermark_keeps_pages_for_those_that_grow() -> None:
    harness = Harness(num_pages=20, max_model_len=80, watermark=0.5, max_step_tokens=64)
    harness.scheduler._admission.estimator.share = 0.0
    for index in range(4):
        harness.submit(request(f"r{index}", prompt(index, 15), 1))
    harness.step()
    assert len(order_of_admission(harness)) == 2


def test_one_request_may_use_the_whole_pool() -> None:
    harness = Harness(num_pages=16, watermark=0.5, max_model_len=64)
    harness.submit(request("other", prompt(1, 8), 4))
    harness.run()
    harness.submit(request("r", prompt(0, 40), 24))
    harness.run()
    assert harness.tokens["r"] == harness.expected("r")


# ---- policies ------------------------------------------------------------------------------------


def served_alone(policy: SchedulePolicy) -> Harness:
    """One row, so that admission order is what the policy says."""
    return Harness(max_running=1, schedule_policy=policy, max_step_tokens=64)


def test_fcfs_serves_in_order_of_arrival() -> None:
    harness = served_alone(SchedulePolicy.FCFS)
    prompts = [prompt(index, 6) for index in range(5)]
    for index, tokens in enumerate(prompts):
        harness.submit(request(f"r{index}", tokens))
    harness.run()
    assert order_of_admission(harness) == prompts


def test_lpm_serves_the_longest_cached_prefix_first() -> None:
    harness = served_alone(SchedulePolicy.LPM)
    base = prompt(0, 24)
    harness.submit(request("warm", base))
    harness.run()
    some, most, none = [*base[:8], 1, 2], [*base, 3], prompt(5, 10)
    for name, tokens in (("none", none), ("some", some), ("most", most)):
        harness.submit(request(name, tokens))
    harness.run()
    assert order_of_admission(harness)[1:] == [most, some, none]


def test_lpm_sees_what_came_into_the_cache_while_requests_waited() -> None:
    harness = served_alone(SchedulePolicy.LPM)
    base = prompt(0, 24)
    harness.submit(request("running", base))
    harness.submit(request("none", prompt(5, 10)))
    harness.submit(request("most", [*base, 3]))
    harness.run()
    assert order_of_admission(harness) == [base, [*base, 3], prompt(5, 10)]


def test_lpm_passes_no_request_over_for_long() -> None:
    harness = served_alone(SchedulePolicy.LPM)
    base = prompt(0, 24)
    harness.submit(request("warm", base))
    harness.run()
    harness.submit(request("unlucky", prompt(5, 10)))
    harness.now += 11
    harness.submit(request("lucky", [*base, 3]))
    harness.run()
    assert order_of_admission(harness)[1:] == [prompt(5, 10), [*base, 3]]


def test_lpm_with_a_long_queue_is_fcfs() -> None:
    harness = served_alone(SchedulePolicy.LPM)
    base = prompt(0, 24)
    harness.submit(request("warm", base, 1))
    harness.run()
    for index in range(129):
        harness.submit(request(f"r{index}", prompt(100 + index, 6), 1))
    harness.submit(request("lucky", [*base, 3], 1))
    harness.step()
    assert order_of_admission(harness)[1] == prompt(100, 6)


def test_dfs_weight_starts_with_the_subtree_that_most_wait_for() -> None:
    harness = Harness(schedule_policy=SchedulePolicy.DFS_WEIGHT, max_step_tokens=64)
    light, heavy = [1] * 8, [2] * 8
    for index, base in enumerate((light, heavy)):
        harness.submit(request(f"warm{index}", base + prompt(index, 4)))
        harness.run()
    for index, base in enumerate((light, heavy, light, heavy, heavy)):
        harness.submit(request(f"r{index}", [*base, index, index]))
    harness.step()
    assert [tokens[0] for tokens in order_of_admission(harness)[2:]] == [2, 2, 2, 1, 1]
    harness.run()


def test_priority_serves_the_important_first_and_lets_waiting_count() -> None:
    harness = served_alone(SchedulePolicy.PRIORITY)
    harness.submit(request("old", prompt(0, 6), priority=0))
    harness.now += 15  # worth more than one level of priority, less than two
    harness.submit(request("one", prompt(1, 6), priority=1))
    harness.submit(request("two", prompt(2, 6), priority=2))
    harness.run()
    assert order_of_admission(harness) == [prompt(2, 6), prompt(0, 6), prompt(1, 6)]


def test_priority_is_ignored_by_other_policies() -> None:
    harness = served_alone(SchedulePolicy.FCFS)
    harness.submit(request("first", prompt(0, 6), priority=0))
    harness.submit(request("second", prompt(1, 6), priority=9))
    harness.run()
    assert order_of_admission(harness) == [prompt(0, 6), prompt(1, 6)]


def test_longest_output_serves_those_with_most_to_say_first() -> None:
    harness = served_alone(SchedulePolicy.LONGEST_OUTPUT)
    for index, most in enumerate((3, 9, 1, 9)):
        harness.submit(request(f"r{index}", prompt(index, 6), most))
    harness.run()
    assert order_of_admission(harness) == [prompt(index, 6) for index in (1, 3, 0, 2)]


def test_longest_output_takes_fewer_steps_when_prefill_is_spread_over_decodes() -> None:
    steps = {}
    for policy in (SchedulePolicy.FCFS, SchedulePolicy.LONGEST_OUTPUT):
        harness = Harness(
            num_pages=256, max_rows=16, max_running=16, schedule_policy=policy, max_step_tokens=20
        )
        for index in range(16):
            harness.submit(request(f"r{index}", prompt(index, 16), 4 + 2 * index))
        harness.run()
        steps[policy] = len(harness.plans)
    assert steps[SchedulePolicy.LONGEST_OUTPUT] <= 34 + 2 < steps[SchedulePolicy.FCFS]


def test_under_priority_the_least_important_is_preempted() -> None:
    harness = Harness(
        num_pages=16,
        max_model_len=64,
        watermark=0.0,
        max_step_tokens=64,
        schedule_policy=SchedulePolicy.PRIORITY,
    )
    harness.scheduler._admission.estimator.share = 0.0
    harness.submit(request("oldest", prompt(0, 8), 50, priority=1))
    harness.submit(request("important", prompt(1, 4), 50, priority=2))
    harness.submit(request("minor", prompt(2, 24), 50, priority=0))
    while not harness.stats().preemptions:
        harness.step()
    assert harness.scheduler._lifecycle.requests["minor"].state == "preempted"
    harness.run()


# ---- what the agent learns -----------------------------------------------------------------------


def test_a_request_is_reported_as_admitted_once() -> None:
    harness = Harness(max_running=1)
    harness.submit(request("a", prompt(0, 30)))
    harness.submit(request("b", prompt(1, 30)))
    harness.step()
    assert harness.scheduler.take_admitted() == ["a"]
    harness.scheduler._admission.preempt(next(iter(harness.scheduler._batch.active.values())))
    harness.run()
    assert harness.scheduler.take_admitted() == ["b"]


def test_a_snapshot_says_what_the_events_said() -> None:
    harness = Harness()
    for index in range(5):
        harness.submit(request(f"r{index}", prompt(0, 8 * index + 1) + prompt(index, 16)))
    harness.run()
    stored = b"".join(event.hashes for event in harness.scheduler.take_cache_events())
    chunks = list(harness.scheduler.cache_snapshot())
    snapshot = b"".join(event.hashes for events in chunks for event in events)
    assert len(stored) > 16 * 5
    assert sorted(stored[i : i + 16] for i in range(0, len(stored), 16)) == sorted(
        snapshot[i : i + 16] for i in range(0, len(snapshot), 16)
    )

"""How single requests begin, run and end."""

from __future__ import annotations

import pytest

from radixgrove.worker.messages import CacheMode, Finish, RefusalReason, Refused, Tokens
from radixgrove.worker.scheduler.request import IllegalTransition, RequestState
from tests.worker.scheduler.harness import Harness, request

PROMPT = list(range(20, 40))  # five pages of four
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def refusal(harness: Harness, request_id: str) -> Refused:
    end = harness.ended[request_id]
    assert isinstance(end, Refused)
    return end


def finish(harness: Harness, request_id: str) -> Finish | None:
    end = harness.ended[request_id]
    assert isinstance(end, Tokens)
    return end.finish


# ---- ends ----------------------------------------------------------------------------------------


@DEPTHS
def test_a_request_ends_at_max_tokens_and_samples_no_more(depth: int) -> None:
    harness = Harness(depth)
    harness.submit(request("r", PROMPT, 6))
    harness.run()
    assert harness.tokens["r"] == harness.expected("r")
    assert finish(harness, "r") is Finish.LENGTH
    assert sum(len(plan.sampled_rows()) for plan in harness.plans) == 6


@DEPTHS
def test_a_stop_token_ends_a_request_and_is_its_last_token(depth: int) -> None:
    harness = Harness(depth)
    harness.submit(request("probe", PROMPT, 8))
    harness.run()
    stop = harness.tokens["probe"][3]
    before = harness.tokens["probe"].index(stop)
    harness.submit(request("r", PROMPT, 8, stop=(stop,)))
    harness.run()
    assert harness.tokens["r"] == harness.tokens["probe"][: before + 1]
    end = harness.ended["r"]
    assert isinstance(end, Tokens)
    assert (end.finish, end.stop_token) == (Finish.STOP, stop)


def test_a_stop_token_within_min_tokens_does_not_end_a_request() -> None:
    harness = Harness()
    harness.submit(request("probe", PROMPT, 8))
    harness.run()
    first = harness.tokens["probe"][0]
    harness.submit(request("r", PROMPT, 8, stop=(first,), min_tokens=1))
    harness.run()
    assert harness.tokens["r"][0] == first
    assert len(harness.tokens["r"]) > 1


def test_the_models_length_ends_a_request() -> None:
    harness = Harness(max_model_len=24)
    harness.submit(request("r", PROMPT, 100))
    harness.run()
    assert len(harness.tokens["r"]) == 4
    assert finish(harness, "r") is Finish.LENGTH


def test_no_tokens_are_generated_when_none_are_asked_for() -> None:
    harness = Harness()
    harness.submit(request("r", PROMPT, 0, prompt_logprobs=0))
    harness.run()
    end = harness.ended["r"]
    assert isinstance(end, Tokens)
    assert (end.token_ids, end.finish) == ([], Finish.LENGTH)
    assert end.prompt_logprobs is not None
    assert len(end.prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize("length", [128, 300])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(length: int) -> None:
    harness = Harness(max_model_len=128)
    harness.submit(request("long", [1] * length))
    assert refusal(harness, "long").reason is RefusalReason.TOO_LONG
    assert "128 tokens" in refusal(harness, "long").detail
    harness.submit(request("fits", [1] * 127))
    harness.run()
    assert len(harness.tokens["fits"]) == 1


@pytest.mark.parametrize(
    ("tokens", "detail"), [([1, 50], "unknown token id"), ([-1], "unknown token id"), ([], "list")]
)
def test_a_prompt_that_is_no_prompt_fails_alone(tokens: list[int], detail: str) -> None:
    harness = Harness()
    harness.submit(request("good", PROMPT))
    harness.submit(request("bad", tokens))
    assert refusal(harness, "bad").reason is RefusalReason.INTERNAL
    assert detail in refusal(harness, "bad").detail
    harness.run()
    assert harness.tokens["good"] == harness.expected("good")


def test_states_follow_each_other_as_drawn_and_not_otherwise() -> None:
    harness = Harness()
    harness.submit(request("r", PROMPT))
    one = harness.scheduler._lifecycle.requests["r"]
    with pytest.raises(IllegalTransition, match="waiting -> decode"):
        one.become(RequestState.DECODE)
    one.become(RequestState.AWAITING_KV)
    one.become(RequestState.WAITING)
    seen = [one.state]
    while harness.step():
        if seen[-1] is not one.state:
            seen.append(one.state)
    assert seen == [
        RequestState.WAITING,
        RequestState.PREFILL,
        RequestState.DECODE,
        RequestState.FINISHED,
    ]
    with pytest.raises(IllegalTransition, match="finished -> aborted"):
        one.become(RequestState.ABORTED)


# ---- the queue -----------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    harness = Harness(max_running=1, max_queued=2)
    for index in range(4):
        harness.submit(request(f"r{index}", PROMPT))
    assert list(harness.ended) == ["r3"]  # one row stands empty, two may wait
    assert refusal(harness, "r3").reason is RefusalReason.QUEUE_FULL
    assert (refusal(harness, "r3").retry_after or 0) >= 1
    harness.run()
    assert harness.tokens["r2"] == harness.expected("r2")


def test_the_queue_is_bounded_in_prompt_tokens_but_lets_a_single_large_one_in() -> None:
    harness = Harness(max_running=1, max_queued_tokens=30)
    harness.submit(request("large", [1] * 40))
    harness.submit(request("second", PROMPT))
    assert refusal(harness, "second").reason is RefusalReason.QUEUE_FULL
    harness.step()
    harness.submit(request("third", PROMPT))
    harness.run()
    assert set(harness.tokens) == {"large", "third"}


def test_the_estimated_time_to_come_back_grows_with_the_queue() -> None:
    harness = Harness(max_running=1, max_queued=6)
    for index in range(7):
        harness.submit(request(f"r{index}", PROMPT))
    while "r2" not in harness.ended:
        harness.now += 1.0
        harness.step()
    for index in range(3):
        harness.submit(request(f"more{index}", PROMPT))
    harness.submit(request("refused", PROMPT))
    assert (refusal(harness, "refused").retry_after or 0) > 5


def test_a_request_that_waits_past_its_deadline_is_refused() -> None:
    harness = Harness(max_running=1, queue_timeout=30.0)
    harness.submit(request("runs", PROMPT, 100))
    harness.step()
    harness.submit(request("hurried", PROMPT, queue_timeout=5))
    harness.submit(request("patient", PROMPT))
    harness.now += 6
    harness.step()
    assert refusal(harness, "hurried").reason is RefusalReason.QUEUE_TIMEOUT
    assert "patient" not in harness.ended
    harness.now += 25  # the setting bounds everyone's patience
    harness.step()
    assert refusal(harness, "patient").reason is RefusalReason.QUEUE_TIMEOUT
    harness.run()
    assert harness.tokens["runs"] == harness.expected("runs")  # the running one had its chance


def test_the_queue_forgets_requests_that_left_before_their_deadline() -> None:
    harness = Harness(queue_timeout=3600.0)
    for index in range(300):
        harness.submit(request(f"r{index}", PROMPT, 1))
        harness.run()
    assert len(harness.scheduler._queue._deadlines) < 100


def test_stats_count_what_waits_less_what_is_cached() -> None:
    harness = Harness(max_running=1)
    harness.submit(request("first", PROMPT))
    harness.run()
    harness.submit(request("runs", [1] * 8, 50))
    harness.step()
    harness.submit(request("waits", PROMPT))
    stats = harness.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    assert stats.waiting_tokens == len(PROMPT) - 16  # four pages; the last token is computed
    assert stats.finished == 1
    harness.abort("waits")
    assert harness.stats().waiting_tokens == 0
    assert harness.stats().aborted == 1


# ---- aborts --------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("steps", range(8))
def test_an_abort_in_any_state_frees_everything_and_says_so_once(depth: int, steps: int) -> None:
    harness = Harness(depth, max_running=2)
    harness.submit(request("other", [2] * 9, 30))
    harness.submit(request("victim", PROMPT * 2, 30))
    for _ in range(steps):
        harness.launch()
        if steps % 2:
            harness.collect()
    harness.abort("victim")
    harness.abort("victim")  # twice does no harm
    assert finish(harness, "victim") is Finish.ABORT
    harness.run()
    assert harness.tokens["other"] == harness.expected("other")
    memory = harness.scheduler.memory
    assert memory.pool.free + memory.tree.residency.evictable == memory.pool.num_pages
    assert memory.rows.free == harness.config.max_rows


def test_an_abort_of_a_waiting_request_leaves_the_queue() -> None:
    harness = Harness(max_running=1)
    harness.submit(request("runs", PROMPT, 20))
    harness.step()
    harness.submit(request("waits", PROMPT))
    harness.abort("waits")
    assert finish(harness, "waits") is Finish.ABORT
    harness.run()
    assert "waits" not in harness.tokens or harness.tokens["waits"] == []


def test_an_abort_with_a_step_in_flight_keeps_its_pages_until_the_step_ends() -> None:
    harness = Harness(depth=2, prefix_cache=False)
    harness.submit(request("r", PROMPT[:16], 8))
    harness.launch()
    harness.abort("r")
    memory = harness.scheduler.memory
    assert memory.pool.retired == 4
    assert memory.rows.free == harness.config.max_rows - 1
    harness.collect()
    assert (memory.pool.retired, memory.pool.free) == (0, 64)
    assert memory.rows.free == harness.config.max_rows


# ---- the cache, as a request sees it -------------------------------------------------------------


@DEPTHS
def test_a_repeated_prompt_reads_all_but_its_last_page(depth: int) -> None:
    harness = Harness(depth)
    harness.submit(request("first", PROMPT))
    harness.run()
    harness.submit(request("again", PROMPT))
    harness.run()
    assert harness.cached_tokens("first") == 0
    assert harness.cached_tokens("again") == 16  # (20 - 1) // 4 pages
    assert harness.tokens["again"] == harness.tokens["first"]


def test_the_answer_is_cached_for_the_next_turn() -> None:
    harness = Harness()
    harness.submit(request("turn 1", PROMPT, 9))
    harness.run()
    harness.submit(request("turn 2", PROMPT + harness.tokens["turn 1"] + [5, 6]))
    harness.run()
    # 20 + 9 tokens, of which the last was never computed: 28 of them in whole pages.
    assert harness.cached_tokens("turn 2") == 28


def test_domains_do_not_see_each_other() -> None:
    harness = Harness()
    harness.submit(request("alice", PROMPT, domain="alice"))
    harness.run()
    harness.submit(request("bob", PROMPT, domain="bob"))
    harness.submit(request("alice again", PROMPT, domain="alice"))
    harness.run()
    assert harness.cached_tokens("bob") == 0
    assert harness.cached_tokens("alice again") == 16


def test_a_bypassing_request_neither_reads_nor_leaves_anything() -> None:
    harness = Harness()
    harness.submit(request("private", PROMPT, cache=CacheMode.BYPASS))
    harness.run()
    assert harness.scheduler.memory.tree.residency.num_pages == 0
    harness.submit(request("first", PROMPT))
    harness.run()
    cached = harness.scheduler.memory.tree.residency.num_pages
    harness.submit(request("private again", [*PROMPT, 1, 2, 3, 4], cache=CacheMode.BYPASS))
    harness.run()
    assert harness.cached_tokens("private again") == 0
    assert harness.scheduler.memory.tree.residency.num_pages == cached


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    harness = Harness(prefix_cache=False)
    for name in ("first", "again"):
        harness.submit(request(name, PROMPT))
        harness.run()
    assert harness.cached_tokens("again") == 0
    assert harness.scheduler.memory.pool.free == harness.config.num_pages


def test_prompt_logprobs_are_computed_anew_but_their_pages_serve_others() -> None:
    harness = Harness()
    harness.submit(request("first", PROMPT))
    harness.run()
    harness.submit(request("scored", [*PROMPT, 1, 2, 3, 4, 5], prompt_logprobs=0))
    harness.run()
    assert harness.cached_tokens("scored") == 0
    message = harness.messages["scored"][0]
    assert isinstance(message, Tokens)
    assert message.prompt_logprobs is not None
    assert len(message.prompt_logprobs) == 25
    harness.submit(request("reader", [*PROMPT, 1, 2, 3, 4, 5, 6]))
    harness.run()
    assert harness.cached_tokens("reader") == 24


def test_flushing_drops_what_nobody_holds() -> None:
    harness = Harness()
    harness.submit(request("first", PROMPT))
    harness.run()
    harness.submit(request("runs", [*PROMPT, 7], 30))
    harness.step()
    harness.submit(request("other", [9] * 8))
    harness.scheduler.flush_cache()
    held = harness.scheduler.memory.tree.residency
    assert held.evictable == 0
    assert held.num_pages > 0
    harness.run()
    assert harness.tokens["runs"] == harness.expected("runs")

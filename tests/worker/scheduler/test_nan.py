"""A request of values that are not numbers ends alone, and leaves nothing in the cache."""

from __future__ import annotations

import pytest

from radixgrove.worker.messages import CacheMode, RefusalReason, Refused, Tokens
from tests.worker.scheduler.harness import VOCAB, Harness, request

POISON = VOCAB - 1
CLEAN = list(range(1, 13))  # three pages of four
BAD = [*CLEAN, POISON, *range(13, 24)]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])
WINDOWS = pytest.mark.parametrize("window", [0, 6], ids=["no window", "window"])


def poisoned(depth: int = 1, window: int = 0, **changes: object) -> Harness:
    num_window_pages = 64 if window else 0
    harness = Harness(depth, window=window, num_window_pages=num_window_pages, **changes)
    harness.executor.poison = POISON
    return harness


def assert_failed(harness: Harness, request_id: str) -> None:
    end = harness.ended[request_id]
    assert isinstance(end, Refused)
    assert end.reason is RefusalReason.INTERNAL
    assert "NaN" in end.detail


def fill(harness: Harness, name: str, prompt: list[int]) -> None:
    harness.submit(request(name, prompt, 2))
    harness.run()


@DEPTHS
@WINDOWS
@pytest.mark.parametrize("step_tokens", [64, 8], ids=["one chunk", "chunks"])
def test_it_ends_with_an_error_and_caches_nothing(
    depth: int, window: int, step_tokens: int
) -> None:
    harness = poisoned(depth, window, max_step_tokens=step_tokens)
    fill(harness, "bad", BAD)
    assert_failed(harness, "bad")
    assert harness.scheduler.memory.tree.residency.num_pages == 0
    assert harness.stats().pages_free == harness.config.num_pages


@DEPTHS
def test_what_others_computed_before_stays(depth: int) -> None:
    harness = poisoned(depth)
    fill(harness, "clean", CLEAN)
    fill(harness, "bad", BAD)
    assert_failed(harness, "bad")
    fill(harness, "again", [*CLEAN, 40])
    assert harness.cached_tokens("again") == len(CLEAN)
    assert harness.tokens["again"] == harness.expected("again")


@DEPTHS
@WINDOWS
def test_others_go_on(depth: int, window: int) -> None:
    harness = poisoned(depth, window, max_step_tokens=64)
    for number in range(3):
        harness.submit(request(f"good-{number}", [30 + number, *CLEAN], 6))
        harness.submit(request(f"bad-{number}", [30 + number, *BAD], 6))
    harness.run()
    for number in range(3):
        assert harness.tokens[f"good-{number}"] == harness.expected(f"good-{number}")
        assert_failed(harness, f"bad-{number}")


@DEPTHS
def test_pages_that_another_request_still_reads_go_with_the_last_of_them(depth: int) -> None:
    harness = poisoned(depth, max_step_tokens=8)
    harness.submit(request("first", BAD, 2))
    for _ in range(3):
        harness.step()
    harness.submit(request("second", [*BAD, 25, 26, 27, 28, 29], 2))
    harness.run()
    assert_failed(harness, "first")
    assert_failed(harness, "second")
    assert harness.scheduler.memory.tree.residency.num_pages == 0


def test_a_token_generated_later_spoils_only_what_follows_it() -> None:
    harness = poisoned()
    fill(harness, "probe", CLEAN)
    harness.executor.poison = harness.tokens["probe"][0]
    fill(harness, "bad", CLEAN)
    assert_failed(harness, "bad")
    first, *_ = harness.messages["bad"]
    assert isinstance(first, Tokens)


def test_spoiled_pages_leave_the_host_as_well() -> None:
    harness = poisoned(num_host_pages=64, max_step_tokens=8)
    fill(harness, "bad", BAD)
    assert_failed(harness, "bad")
    assert harness.scheduler.memory.tree.residency.num_pages == 0
    assert harness.stats().host_pages_used == 0


def test_logprobs_of_a_prompt_that_are_not_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = poisoned()
    submit = request("r", CLEAN, 0, prompt_logprobs=0, cache=CacheMode.USE)
    collect = harness.executor.collect

    def broken():  # type: ignore[no-untyped-def]
        result = collect()
        for entries in result.prompt_logprobs.values():
            for entry in entries:
                entry.logprob = float("nan")
        return result

    monkeypatch.setattr(harness.executor, "collect", broken)
    harness.submit(submit)
    harness.run()
    assert_failed(harness, "r")

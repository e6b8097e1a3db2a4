"""Pages behind windows: running rows find all that they attend to, and cached prefixes are used as
far as the last window before their end is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol.settings import EvictionPolicy, SchedulePolicy, WorkerSettings
from radixgrove.worker.cache.pool import PoolError
from radixgrove.worker.messages import CacheMode
from radixgrove.worker.scheduler.config import SchedulerConfig
from tests.conftest import examples
from tests.worker.scheduler.harness import DEFAULTS, Harness, request
from tests.worker.scheduler.test_host_tier import random_use
from tests.worker.scheduler.test_peek import peek
from tests.worker.scheduler.test_properties import apply, check_answer, check_empty, some_of

WINDOW = 8  # two pages; a row that decodes holds three
LONG = [(7 * i) % 50 for i in range(60)]  # fifteen pages
OTHERS = [[(i * i + start) % 50 for i in range(60)] for start in (1, 2, 3)]


def least(config: dict[str, int]) -> int:
    """So many window pages are enough, whatever is cached."""
    page = config["page_size"]
    rows = config["max_rows"]
    in_window = rows * (-(-config["window"] // page) + 2)
    a_step = -(-config["max_step_tokens"] // page) + rows
    return in_window + (config["depth"] + 2) * a_step


def windowed(num_window_pages: int, **changes: object) -> Harness:
    """One row at a time, a page a step, so that window pages are as scarce as a test wants."""
    setup: dict[str, object] = {"max_step_tokens": 4, "max_rows": 1, "max_running": 1}
    setup |= {"num_window_pages": num_window_pages, "window": WINDOW}
    return Harness(**{**setup, **changes})  # type: ignore[arg-type]


def ask(harness: Harness, request_id: str, prompt: list[int], max_tokens: int = 2) -> int:
    """The request's answer is right; how many tokens of its prompt were cached."""
    harness.submit(request(request_id, prompt, max_tokens))
    harness.run()
    assert harness.tokens[request_id] == harness.expected(request_id)
    return harness.cached_tokens(request_id)


# ---- what is used of a prefix --------------------------------------------------------------------


def test_a_prefix_is_used_up_to_where_its_last_window_is_there() -> None:
    harness = windowed(64)
    assert ask(harness, "first", LONG) == 0
    assert ask(harness, "whole", [*LONG, 1]) == 60
    assert ask(harness, "middle", [*LONG[:40], 1]) == 40
    assert harness.stats().window_lost_tokens == 0
    windows, tree = harness.scheduler.memory.windows, harness.scheduler.memory.tree
    assert windows is not None
    (node,) = [node for node in tree.nodes() if node.start == 0 and node.size]
    windows.drop(node.pages[8:9])  # tokens 32 to 35
    harness.scheduler.check()
    for length, found in [(60, 60), (44, 44), (40, 32), (36, 32), (32, 32)]:
        assert peek(harness, [*LONG[:length], 1]).matched_tokens == found
    assert ask(harness, "again", [*LONG[:40], 1]) == 32
    assert harness.stats().window_lost_tokens == 8
    assert peek(harness, [*LONG[:40], 1]).matched_tokens == 40, "what it computed is the tree's"


def test_behind_the_windows_of_a_long_prompt_pages_are_given_up_first() -> None:
    harness = windowed(12)
    ask(harness, "first", LONG)
    ask(harness, "other", OTHERS[0])
    assert ask(harness, "again", [*LONG, 1]) == 60, "the end of each is kept"
    assert peek(harness, [*LONG[:40], 1]).matched_tokens == 0


def test_the_end_of_a_prompt_outlives_what_was_generated_behind_it() -> None:
    """The next turn of a conversation may begin there: what was thought is left out of it."""
    harness = windowed(16)
    ask(harness, "first", LONG, max_tokens=40)
    assert ask(harness, "again", [*LONG[:59], 1]) == 56
    ask(harness, "other", OTHERS[0])
    assert ask(harness, "next", [*LONG, 1]) == 60


def test_the_end_of_a_request_outlives_what_other_rows_pass_by() -> None:
    harness = windowed(12)
    ask(harness, "first", LONG, max_tokens=40)
    ask(harness, "other", OTHERS[0])
    assert ask(harness, "next", [*LONG, *harness.tokens["first"], 1]) == 96


def test_what_is_computed_anew_beside_a_row_that_uses_it_gives_the_tree_its_window_pages() -> None:
    harness = windowed(64, max_rows=4, max_running=4, max_step_tokens=16)
    harness.submit(request("long", LONG, 60))
    while len(harness.tokens.get("long", [])) < 10:
        harness.step()
    memory = harness.scheduler.memory
    assert memory.windows is not None
    (node,) = [node for node in memory.tree.nodes() if node.size]
    memory.windows.drop(node.pages[:12])
    harness.submit(request("short", [*LONG[:40], 1], 2))
    while "short" not in harness.ended:
        harness.step()
    assert "long" not in harness.ended
    assert harness.cached_tokens("short") == 0
    assert peek(harness, [*LONG[:40], 2]).matched_tokens == 40
    harness.run()
    assert harness.tokens["long"] == harness.expected("long")


def test_a_prefix_that_was_missed_once_is_kept_when_it_is_computed_anew() -> None:
    harness = windowed(12)
    ask(harness, "first", LONG)
    ask(harness, "other", OTHERS[2])
    assert ask(harness, "second", [*LONG[:32], *OTHERS[0][:28]]) == 0
    assert harness.stats().window_lost_tokens == 32
    assert ask(harness, "third", [*LONG[:32], *OTHERS[1][:28]]) == 32


def test_a_burst_behind_windows_that_have_gone_computes_them_once() -> None:
    """As with a prefix that is not cached at all: one request computes it, the others wait."""
    rows = {"max_rows": 4, "max_running": 4, "max_step_tokens": 16, "num_pages": 128}
    harness = windowed(40, **rows)
    ask(harness, "first", LONG)
    for index, prompt in enumerate(OTHERS):
        ask(harness, f"other {index}", prompt)
    for index in range(4):
        harness.submit(request(f"r{index}", [*LONG[:40], index, *LONG], 4))
    harness.run()
    for index in range(4):
        assert harness.tokens[f"r{index}"] == harness.expected(f"r{index}")
    assert [harness.cached_tokens(f"r{index}") for index in range(4)] == [0, 40, 40, 40]
    assert harness.stats().window_lost_tokens == 40


def test_windows_of_the_longest_unused_prefixes_go_before_those_of_others() -> None:
    harness = windowed(9, num_pages=128)
    ask(harness, "one", LONG)
    ask(harness, "two", OTHERS[0])
    assert ask(harness, "one again", [*LONG, 1]) == 60
    ask(harness, "three", OTHERS[1])
    ask(harness, "four", OTHERS[2])
    assert ask(harness, "one once more", [*LONG, 2]) == 60
    assert ask(harness, "two again", [*OTHERS[0], 1]) < 60


def test_a_request_that_bypasses_the_cache_leaves_nothing_behind_its_window() -> None:
    harness = windowed(64)
    harness.submit(request("r", LONG, 2, cache=CacheMode.BYPASS))
    windows = harness.scheduler.memory.windows
    assert windows is not None
    while harness.step():
        assert windows.cached == 0
    assert windows.free == 64


def test_followers_of_a_prefix_in_flight_begin_where_its_window_is_kept() -> None:
    harness = windowed(40, max_rows=4, max_running=4, max_step_tokens=16)
    for index in range(4):
        harness.submit(request(f"r{index}", [*LONG, index], 4))
    harness.run()
    for index in range(4):
        assert harness.tokens[f"r{index}"] == harness.expected(f"r{index}")
    assert [harness.cached_tokens(f"r{index}") for index in range(4)] == [0, 60, 60, 60]


# ---- what is refused -----------------------------------------------------------------------------


def test_window_pages_need_a_window_and_no_host() -> None:
    with pytest.raises(ValueError, match="for layers with a window"):
        replace(DEFAULTS, num_window_pages=8)
    with pytest.raises(ValueError, match="not copied to the host"):
        replace(DEFAULTS, num_window_pages=8, window=4, num_host_pages=8)


def test_the_device_says_how_many_there_are() -> None:
    info = windowed(24, page_size=4).executor.info
    config = SchedulerConfig.resolve(WorkerSettings(model="m"), info, on_cpu=True)
    assert (config.num_window_pages, config.window) == (24, WINDOW)


def test_fewer_than_running_rows_need_is_a_defect_that_is_named() -> None:
    harness = windowed(2)
    harness.submit(request("r", LONG, 2))
    with pytest.raises(PoolError, match="1 window pages wanted, 0 are free"):
        harness.run()


# ---- under random use ----------------------------------------------------------------------------


def setup_of(random: Random) -> dict[str, object]:
    page = random.choice([1, 2, 4, 4])
    sizes = {
        "depth": random.randint(1, 3),
        "page_size": page,
        "window": random.choice([1, max(1, page - 1), page, page + 1, 3 * page, 4 * page + 1]),
        "max_rows": random.randint(2, 4),
        "max_step_tokens": random.choice([4, 8, 24]),
    }
    num_pages = 72 // page + random.choice([0, 4, 20, 120])
    return {
        **sizes,
        "num_pages": num_pages,
        "num_window_pages": min(num_pages, least(sizes) + random.choice([0, 0, 1, 8])),
        "max_running": sizes["max_rows"],
        "max_model_len": 72,
        "max_row_tokens": random.choice([1, 4]),
        "micro_batches": random.choice([1, 1, 2]),
        "run_ahead": random.random() < 0.5,
        "watermark": 0.0,
        "schedule_policy": random.choice(list(SchedulePolicy)),
        "eviction_policy": random.choice(list(EvictionPolicy)),
        "prefix_cache": random.random() < 0.9,
        "count": some_of(Random(random.random())) if random.random() < 0.7 else None,
    }


def run_all(seed: int) -> Harness:
    random = Random(seed)
    harness = Harness(**setup_of(random))  # type: ignore[arg-type]
    count = 0
    for operation in random_use(random, count=80):
        count = apply(harness, operation, count)
    harness.run()
    assert len(harness.ended) == count
    for index in range(count):
        check_answer(harness, f"r{index}")
    return harness


@examples(24)
@given(seed=st.integers(0, 1 << 32))
def test_rows_find_their_windows_whatever_else_is_cached(seed: int) -> None:
    """The fake executor compares what is there with the row's tokens at every read."""
    check_empty(run_all(seed))


_CASES: dict[str, Callable[[Harness], bool]] = {
    "a prefix of which the window has gone": lambda h: h.stats().window_lost_tokens > 0,
    "a prefix that is used": lambda h: h.stats().cached_tokens > 0,
    "a row that shrinks": lambda h: any(plan.shrunk_rows for plan in h.plans),
    "a preemption": lambda h: h.stats().preemptions > 0,
    "pages that are evicted": lambda h: h.stats().evicted_pages > 0,
}


def test_random_use_comes_to_all_that_may_go_wrong() -> None:
    met: Counter[str] = Counter()
    for seed in range(120):
        harness = run_all(seed)
        met.update(case for case, happened in _CASES.items() if happened(harness))
        if all(met[case] for case in _CASES):
            return
    pytest.fail(f"of 120 histories, so many come to each: {met}")

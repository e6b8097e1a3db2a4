"""Cached pages that leave the device for the host, and come back when that is worth it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol.settings import EvictionPolicy, HostWritePolicy
from radixgrove.worker.messages import CacheMode, Finish, Tier
from radixgrove.worker.scheduler.counters import Counters
from radixgrove.worker.scheduler.loads import HostLoads
from radixgrove.worker.scheduler.request import RequestState
from tests.conftest import examples
from tests.worker.scheduler.harness import DEFAULTS, VOCAB, Harness, request
from tests.worker.scheduler.test_properties import (
    Aborted,
    Called,
    Submitted,
    apply,
    check_answer,
    check_empty,
    some_of,
)

ALL_POLICIES = pytest.mark.parametrize("policy", HostWritePolicy)
LONG = list(range(40))  # ten pages
OTHERS = [[(start + i) % VOCAB for i in range(0, 160, 4)] for start in (1, 2, 3)]


def tier(policy: HostWritePolicy = HostWritePolicy.WRITE_THROUGH, **changes: object) -> Harness:
    """Twelve device pages: one long prompt displaces another."""
    setup = {"num_pages": 12, "max_model_len": 48, "max_step_tokens": 64, "num_host_pages": 64}
    return Harness(host_write_policy=policy, watermark=0.0, **{**setup, **changes})


def ask(harness: Harness, request_id: str, prompt: list[int]) -> None:
    harness.submit(request(request_id, prompt))
    harness.run()
    assert harness.tokens[request_id] == harness.expected(request_id)


# ---- when pages are copied -----------------------------------------------------------------------


@ALL_POLICIES
def test_a_prompt_that_was_displaced_comes_back_from_the_host(policy: HostWritePolicy) -> None:
    harness = tier(policy)
    ask(harness, "first", LONG)
    ask(harness, "again", LONG)  # a selective tier saves what was used twice
    ask(harness, "other", OTHERS[0])
    loaded = harness.stats().loaded_pages
    ask(harness, "back", LONG)
    assert harness.cached_tokens("back") == 36
    assert harness.stats().loaded_pages - loaded >= 8
    assert harness.stats().host_cached_tokens == 4 * harness.stats().loaded_pages


def test_without_a_tier_it_is_computed_anew() -> None:
    harness = tier(num_host_pages=0)
    ask(harness, "first", LONG)
    ask(harness, "other", OTHERS[0])
    ask(harness, "back", LONG)
    assert harness.cached_tokens("back") < 16


def test_write_through_saves_what_is_cached_and_write_back_only_what_leaves() -> None:
    through, back = tier(), tier(HostWritePolicy.WRITE_BACK)
    for harness in (through, back):
        ask(harness, "first", LONG)
    assert through.stats().saved_pages == 10
    assert back.stats().saved_pages == 0
    for harness in (through, back):
        ask(harness, "other", OTHERS[0])
    assert back.stats().saved_pages == 10


def test_a_selective_tier_saves_nothing_that_is_used_once() -> None:
    harness = tier(HostWritePolicy.WRITE_THROUGH_SELECTIVE)
    for number, prompt in enumerate([LONG, *OTHERS]):
        ask(harness, str(number), prompt)
    assert harness.stats().saved_pages == 0
    ask(harness, "again", OTHERS[-1])
    assert harness.stats().saved_pages >= 9


def test_a_request_that_still_grows_is_saved_once_it_has_ended() -> None:
    harness = tier(max_step_tokens=8)
    harness.submit(request("r", LONG))
    while not harness.tokens.get("r"):
        harness.step()
    assert harness.stats().saved_pages == 0
    harness.run()
    assert [len(plan.saves[0].pages) for plan in harness.plans if plan.saves] == [10]


def test_a_full_host_forgets_what_was_used_longest_ago() -> None:
    harness = tier(num_host_pages=24)
    for number, prompt in enumerate([LONG, *OTHERS]):
        ask(harness, str(number), prompt)
    assert harness.stats().host_pages_used <= 24
    ask(harness, "newest but one", OTHERS[1])
    assert harness.cached_tokens("newest but one") == 36
    ask(harness, "oldest", LONG)
    assert harness.cached_tokens("oldest") < 16


def test_flushing_empties_both_tiers() -> None:
    harness = tier()
    ask(harness, "first", LONG)
    ask(harness, "other", OTHERS[0])
    check_empty(harness)
    ask(harness, "back", LONG)
    assert harness.cached_tokens("back") == 0


def test_what_a_request_computes_anew_needs_no_second_copy() -> None:
    # Loading is not worth it here, so the prompt is computed and meets its copy on the host.
    harness = tier(prefill_rate=1e9, host_rate=1.0)
    ask(harness, "first", LONG)
    ask(harness, "other", OTHERS[0])
    saved = harness.stats().saved_pages
    ask(harness, "back", LONG)
    assert harness.stats().loaded_pages == 0
    assert harness.cached_tokens("back") < 36
    assert harness.stats().saved_pages - saved <= 1
    ask(harness, "on the device", LONG)
    assert harness.cached_tokens("on the device") == 36


# ---- who waits -----------------------------------------------------------------------------------


def displaced(**changes: object) -> Harness:
    """LONG is on the host, and a second request decodes."""
    harness = tier(num_pages=26, max_model_len=64, max_step_tokens=128, **changes)
    ask(harness, "first", LONG)
    for number, prompt in enumerate(OTHERS[:2]):
        ask(harness, str(number), prompt)
    harness.submit(request("busy", [9, 8, 7], max_tokens=24))
    harness.step()
    return harness


def waiting_state(harness: Harness, request_id: str) -> RequestState:
    return harness.scheduler._lifecycle.requests[request_id].state


def test_others_go_on_while_a_prefix_is_loaded() -> None:
    harness = displaced()
    harness.submit(request("back", LONG))
    for _ in range(5):
        harness.step()
    assert waiting_state(harness, "back") is RequestState.AWAITING_KV
    assert len(harness.tokens["busy"]) >= 5
    harness.executor.end_load()
    harness.step()
    harness.step()
    assert harness.cached_tokens("back") == 36
    assert all(plan.awaited == 0 for plan in harness.plans)
    harness.run()


def test_alone_a_request_follows_its_load_layer_by_layer() -> None:
    harness = tier()
    ask(harness, "first", LONG)
    ask(harness, "other", OTHERS[0])
    harness.submit(request("back", LONG))
    assert harness.launch()
    plan = harness.plans[-1]
    assert plan.loads
    assert plan.awaited == plan.loads[-1].copy_id
    assert plan.prefills[0].start == 36
    harness.run()
    assert harness.tokens["back"] == harness.expected("back")


def test_two_requests_share_one_load() -> None:
    harness = displaced()
    harness.submit(request("back", [*LONG, 1]))
    harness.submit(request("too", [*LONG, 2]))
    before = harness.stats().loaded_pages
    harness.step()
    harness.step()
    harness.run()
    assert harness.stats().loaded_pages - before <= 10
    assert harness.cached_tokens("too") == 40


def test_an_aborted_wait_lets_go_at_once_and_the_load_still_ends_well() -> None:
    harness = displaced()
    harness.submit(request("back", LONG))
    harness.step()
    assert waiting_state(harness, "back") is RequestState.AWAITING_KV
    harness.abort("back")
    end = harness.ended["back"]
    assert not isinstance(end, str)
    assert getattr(end, "finish", None) is Finish.ABORT
    harness.run()
    check_empty(harness)


def test_a_wait_for_a_load_ends_at_the_queues_deadline() -> None:
    harness = displaced()
    harness.submit(request("back", LONG, queue_timeout=1))
    harness.step()
    harness.now += 2
    harness.step()
    assert "back" in harness.ended
    harness.run()
    check_empty(harness)


def test_a_load_that_would_take_longer_than_computing_is_not_begun() -> None:
    slow = displaced(prefill_rate=1000.0, host_rate=900.0)
    slow.submit(request("back", LONG))
    slow.run()
    assert slow.stats().loaded_pages == 0
    fast = displaced(prefill_rate=1000.0, host_rate=2000.0)
    fast.submit(request("back", LONG))
    fast.run()
    assert fast.stats().loaded_pages >= 5


def test_a_load_behind_others_is_worth_it_while_a_prefill_would_wait_as_well() -> None:
    loads = HostLoads(
        replace(DEFAULTS, prefill_rate=1000.0, host_rate=8000.0),
        tier().scheduler.memory,
        Counters(),
    )
    assert loads.worth(10, backlog=0)  # 40 tokens: 6 ms against 40
    loads.began(1, 90)
    assert not loads.worth(10, backlog=0)  # 51 ms against 40
    assert loads.worth(10, backlog=20)  # against 60


def test_prefixes_that_do_not_fit_together_are_not_loaded_in_turns_without_end() -> None:
    harness = tier(num_pages=26, max_model_len=64, max_step_tokens=128, max_rows=2, max_running=1)
    prompts = [[(start + 3 * i) % VOCAB for i in range(56)] for start in (0, 7, 14)]
    for number, prompt in enumerate(prompts):
        ask(harness, f"first {number}", prompt)
    harness.submit(request("busy", [9, 8, 7], max_tokens=40))
    harness.step()
    for number, prompt in enumerate(prompts):
        harness.submit(request(f"back {number}", prompt))
    while "busy" not in harness.ended:
        harness.step()
        harness.end_copies()
    assert 13 <= harness.stats().loaded_pages <= 3 * 13
    harness.run()
    assert [harness.cached_tokens(f"back {number}") for number in range(3)] == [52] * 3
    assert harness.stats().loaded_pages <= 6 * 13


def test_a_burst_that_comes_back_loads_all_of_it() -> None:
    # Each would be the slower the more load before it, but their prefill would queue as well.
    harness = tier(
        num_pages=200,
        max_model_len=128,
        max_step_tokens=4096,
        num_host_pages=1000,
        max_rows=16,
        max_running=16,
        prefill_rate=1e5,
        host_rate=8e5,
    )
    prompts = [[(17 * i + 7 * j + 1) % VOCAB for j in range(60 + i)] for i in range(14)]
    for number, prompt in enumerate(prompts):
        ask(harness, f"first {number}", prompt)
    harness.submit(request("busy", [1, 2, 3], max_tokens=90))
    harness.step()
    for number, prompt in enumerate(prompts):
        harness.submit(request(f"again {number}", [*prompt, *([9] * 24)]))
    harness.run()
    for number, prompt in enumerate(prompts):
        assert harness.cached_tokens(f"again {number}") >= len(prompt) // 4 * 4


# ---- what routers hear ---------------------------------------------------------------------------


def test_the_index_says_in_which_tier_a_block_is() -> None:
    harness = tier()
    ask(harness, "first", LONG)
    blocks = harness.hasher.chain(request("x", LONG).token_ids)
    tiers = Follower(harness)
    assert tiers.of(blocks) == [Tier.GPU] * 5
    ask(harness, "other", OTHERS[0])
    moved = tiers.of(blocks)
    assert moved[-1] is Tier.HOST
    assert moved == sorted(moved)  # the device keeps beginnings: "gpu" before "host"
    ask(harness, "back", LONG)
    assert tiers.of(blocks) == [Tier.GPU] * 5
    harness.scheduler.flush_cache()
    assert tiers.of(blocks) == [None] * 5


class Follower:
    """The index as events alone build it; `check` compares it with a snapshot."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._sets: dict[Tier, set[bytes]] = {Tier.GPU: set(), Tier.HOST: set()}

    def of(self, chain: bytes) -> list[Tier | None]:
        self.follow()
        blocks = [chain[i : i + 16] for i in range(0, len(chain), 16)]
        return [next((t for t in Tier if block in self._sets[t]), None) for block in blocks]

    def follow(self) -> None:
        for event in self._harness.scheduler.take_cache_events():
            hashes = [event.hashes[i : i + 16] for i in range(0, len(event.hashes), 16)]
            for block in hashes:
                if event.stored:
                    assert block not in self._sets[event.tier]
                    self._sets[event.tier].add(block)
                else:
                    self._sets[event.tier].remove(block)
        snapshot: dict[Tier, set[bytes]] = {Tier.GPU: set(), Tier.HOST: set()}
        for events in self._harness.scheduler.cache_snapshot():
            for event in events:
                parts = {event.hashes[i : i + 16] for i in range(0, len(event.hashes), 16)}
                snapshot[event.tier] |= parts
        assert snapshot == self._sets


# ---- under random use ----------------------------------------------------------------------------

_BEGINNINGS = [[1] * 60, [*([1] * 12), *([2] * 48)], [3, 4] * 30]
_CALLS = ["step", "step", "step", "launch", "collect", "end save", "end load"]
_setups = st.fixed_dictionaries(
    {
        "depth": st.integers(1, 3),
        "num_pages": st.integers(18, 40),
        "page_size": st.sampled_from([4, 4, 8]),
        "max_rows": st.integers(2, 6),
        "max_step_tokens": st.sampled_from([8, 24, 80]),
        "eviction_policy": st.sampled_from(EvictionPolicy),
        "num_host_pages": st.sampled_from([8, 24, 48, 256]),
        "host_write_policy": st.sampled_from(HostWritePolicy),
        "max_row_tokens": st.sampled_from([1, 4]),
    }
)
Operations = list[Submitted | Aborted | Called]


def random_use(random: Random, count: int = 150) -> Operations:
    """A few long prompts again and again, so that they displace each other; all else now and then.

    Drawn by a plain generator: a list of hypothesis' own is mostly too short to come this far.
    """
    operations: Operations = []
    for _ in range(count):
        die = random.random()
        if die < 0.25:
            beginning = random.choice(_BEGINNINGS)[: random.choice([20, 40, 57])]
            operations.append(
                Submitted(
                    prompt=(*beginning, random.randrange(4)),
                    max_tokens=random.choice([1, 2, 6, 14]),
                    domain="public",
                    cache=CacheMode.BYPASS if random.random() < 0.1 else CacheMode.USE,
                    priority=0,
                    stop=(),
                    patience=1.0 if random.random() < 0.1 else None,
                    logprobs=False,
                    prompt_logprobs=random.random() < 0.1,
                    lockstep=random.random() < 0.2,
                )
            )
        elif die < 0.3:
            submitted = sum(isinstance(operation, Submitted) for operation in operations)
            operations.append(Aborted(max(0, submitted - random.randrange(4))))
        elif die < 0.32:
            operations.append(Called(random.choice(["later", "flush"])))
        else:
            operations.append(Called(random.choice(_CALLS)))
    return operations


def run_all(setup: dict[str, object], operations: Operations) -> Harness:
    harness = Harness(
        count=some_of(Random(len(operations))),
        max_model_len=72,
        max_running=setup["max_rows"],
        watermark=0.0,
        **setup,
    )
    follower = Follower(harness)
    count = 0
    for operation in operations:
        count = apply(harness, operation, count)
        follower.follow()
    harness.run()
    follower.follow()
    assert len(harness.ended) == count
    for index in range(count):
        check_answer(harness, f"r{index}")
    return harness


@examples(150)
@given(setup=_setups, seed=st.integers(0, 1 << 32))
def test_every_request_gets_its_own_text_whatever_moves_meanwhile(
    setup: dict[str, object], seed: int
) -> None:
    check_empty(run_all(setup, random_use(Random(seed))))


_CASES: dict[str, Callable[[Harness], bool]] = {
    "a load that a step follows": lambda h: any(plan.awaited for plan in h.plans),
    "a load beside steps": lambda h: any(plan.loads and not plan.awaited for plan in h.plans),
    "a load of what is being saved": lambda h: any(
        load.after > plan.saved for plan in h.plans for load in plan.loads
    ),
    "a preemption": lambda h: h.stats().preemptions > 0 and h.stats().loaded_pages > 0,
}


def test_random_use_comes_to_all_that_may_go_wrong() -> None:
    met: Counter[str] = Counter()
    for seed in range(120):
        random = Random(seed)
        setup = {
            "depth": random.choice([1, 2, 3]),
            "num_pages": random.randint(18, 40),
            "max_rows": random.randint(2, 6),
            "max_step_tokens": random.choice([8, 24, 80]),
            "num_host_pages": random.choice([24, 48, 256]),
            "host_write_policy": random.choice(list(HostWritePolicy)),
            "max_row_tokens": random.choice([1, 4]),
        }
        harness = run_all(setup, random_use(random))
        met.update(case for case, happened in _CASES.items() if happened(harness))
        if all(met[case] >= 3 for case in _CASES):
            return
    pytest.fail(f"of 120 histories, so many come to each: {met}")

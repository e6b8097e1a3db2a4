"""The scheduler under random submits, aborts, evictions and preemptions, at several depths.

A step yields each row between 0 and 4 tokens, of some rows few tokens may come at all. The harness
checks the books after every call; the fake executor proves that every KV slot that is read holds
the right token. Here: every request ends once, with the text it has without a cache and token by
token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from hypothesis import example, given
from hypothesis import strategies as st

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import EvictionPolicy, HostWritePolicy, SchedulePolicy
from radixgrove.worker.messages import (
    CacheMode,
    Finish,
    RefusalReason,
    Refused,
    TokenRules,
    Tokens,
)
from radixgrove.worker.scheduler.step_time import StepTime
from tests.conftest import examples
from tests.worker.scheduler.fake_executor import expected_output
from tests.worker.scheduler.harness import VOCAB, Harness, request

# Prompts are made of a few shared beginnings and short tails, so that prefixes meet and part.
_BEGINNINGS = [[1] * 48, [*([1] * 9), *([2] * 40)], [3, 4] * 24, []]


@dataclass(frozen=True)
class Submitted:
    prompt: tuple[int, ...]
    max_tokens: int
    domain: str
    cache: CacheMode
    priority: int
    stop: tuple[int, ...]
    patience: float | None
    logprobs: bool
    prompt_logprobs: bool
    lockstep: bool
    allowed: tuple[int, ...] | None = None  # the only tokens of its answer


@dataclass(frozen=True)
class Aborted:
    which: int


@dataclass(frozen=True)
class Called:
    what: str


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    beginning = draw(st.sampled_from(_BEGINNINGS))
    tail = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    return (*beginning[: draw(st.integers(0, 48))], *tail)


submits = st.builds(
    Submitted,
    prompt=prompts(),
    max_tokens=st.integers(0, 24),
    domain=st.sampled_from(["public", "public", "alice"]),
    cache=st.sampled_from([CacheMode.USE, CacheMode.USE, CacheMode.USE, CacheMode.BYPASS]),
    priority=st.integers(-1, 2),
    stop=st.sampled_from([(), (), (0, 1, 2, 3, 4)]),
    patience=st.sampled_from([None, None, None, 2.0]),
    logprobs=st.booleans(),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
    lockstep=st.sampled_from([False, False, True]),
    allowed=st.sampled_from([None, None, (3, 7, 31, 32, 49)]),
)
calls = st.sampled_from(
    ["launch", "launch", "collect", "step", "step", "flush", "later", "end save", "end load"]
)
operations = st.lists(
    st.one_of(submits, submits, st.builds(Aborted, st.integers(0, 30)), st.builds(Called, calls)),
    max_size=60,
)
setups = st.fixed_dictionaries(
    {
        "depth": st.integers(1, 4),
        "max_row_tokens": st.sampled_from([1, 2, 4, 4]),
        "micro_batches": st.sampled_from([1, 1, 2, 3, 4]),
        "run_ahead": st.booleans(),
        "counts": st.one_of(st.none(), st.integers(0, 1 << 16)),  # a seed; None: all it may be
        "num_pages": st.integers(16, 40),
        "page_size": st.sampled_from([1, 2, 4]),
        "max_rows": st.integers(2, 8),
        "max_step_tokens": st.integers(1, 24),
        "max_step_seconds": st.sampled_from([None, None, 0.004, 0.01]),
        "watermark": st.sampled_from([0.0, 0.02, 0.2]),
        "schedule_policy": st.sampled_from(SchedulePolicy),
        "eviction_policy": st.sampled_from(EvictionPolicy),
        "prefix_cache": st.sampled_from([True, True, True, False]),
        "num_host_pages": st.sampled_from([0, 4, 16, 64, 256]),
        "host_write_policy": st.sampled_from(HostWritePolicy),
    }
)


def harness_of(setup: dict[str, object]) -> Harness:
    if not setup["prefix_cache"]:
        setup = {**setup, "num_host_pages": 0}
    setup = dict(setup)
    seed = setup.pop("counts")
    count = None if seed is None else some_of(Random(seed))  # type: ignore[arg-type]
    capacity = int(setup["num_pages"]) * int(setup["page_size"])  # type: ignore[call-overload]
    harness = Harness(
        count=count,
        max_model_len=min(72, capacity),
        max_running=setup["max_rows"],
        **setup,  # type: ignore[arg-type]
    )
    harness.scheduler.step_time = StepTime(fixed=0.002, token=0.001, pair=1e-5, kv_token=1e-5)
    return harness


def some_of(random: Random) -> Callable[[int], int]:
    """How many tokens a row gets, of its bound."""
    return lambda bound: random.randint(0, bound)


def apply(harness: Harness, operation: Submitted | Aborted | Called, count: int) -> int:
    match operation:
        case Submitted():
            harness.submit(
                request(
                    f"r{count}",
                    list(operation.prompt),
                    operation.max_tokens,
                    domain=operation.domain,
                    cache=operation.cache,
                    priority=operation.priority,
                    stop=operation.stop,
                    queue_timeout=operation.patience,
                    frontend=count % 3,
                    logprobs=0 if operation.logprobs else None,
                    prompt_logprobs=0 if operation.prompt_logprobs else None,
                    lockstep=operation.lockstep,
                    rules=None
                    if operation.allowed is None
                    else TokenRules(allowed=operation.allowed),
                )
            )
            return count + 1
        case Aborted():
            harness.abort(f"r{operation.which}")
        case Called("launch"):
            harness.launch()
        case Called("collect"):
            harness.collect()
        case Called("step"):
            harness.step()
        case Called("flush"):
            harness.scheduler.flush_cache()
        case Called("end save"):
            harness.executor.end_save()
        case Called("end load"):
            harness.executor.end_load()
        case Called("later"):
            harness.now += 1.0
    return count


def check_answer(harness: Harness, request_id: str) -> None:
    """The request ended once, as its text demands, and said nothing wrong on the way."""
    submit = harness.submitted[request_id]
    end = harness.ended[request_id]
    config = harness.config
    prompt = [
        int.from_bytes(submit.token_ids[i : i + 4], "little")
        for i in range(0, len(submit.token_ids), 4)
    ]
    if isinstance(end, Refused):
        if end.reason is RefusalReason.TOO_LONG:
            assert len(prompt) + min(1, submit.sampling.max_tokens) > config.max_model_len
        else:
            assert end.reason is RefusalReason.QUEUE_TIMEOUT
            assert submit.queue_timeout is not None
        assert request_id not in harness.tokens
        return
    limit = min(submit.sampling.max_tokens, config.max_model_len - len(prompt))
    sampling = SamplingParams(
        max_tokens=limit, seed=7, stop_token_ids=submit.sampling.stop_token_ids
    )
    allowed = None if submit.rules is None else submit.rules.allowed
    expected = expected_output(prompt, sampling, VOCAB, allowed)
    said = harness.tokens[request_id]
    if end.finish is Finish.ABORT:
        assert said == expected[: len(said)]
        return
    assert said == expected
    stopped = bool(expected) and expected[-1] in sampling.stop_token_ids
    assert end.finish is (Finish.STOP if stopped else Finish.LENGTH)
    assert end.stop_token == (expected[-1] if stopped else None)
    messages = [m for m in harness.messages[request_id] if isinstance(m, Tokens)]
    if submit.sampling.logprobs is not None:
        assert [entry.logprob for m in messages for entry in m.logprobs or []] == [-t for t in said]
    if submit.sampling.prompt_logprobs is not None:
        first, *rest = messages[0].prompt_logprobs or []
        assert first is None
        assert [entry.logprob for entry in rest if entry] == [-token for token in prompt[1:]]
    if submit.cache is CacheMode.BYPASS or submit.sampling.prompt_logprobs is not None:
        assert messages[0].cached_tokens == 0


@examples(250)
@given(setup=setups, operations=operations)
def test_every_request_ends_once_with_its_own_text(
    setup: dict[str, object], operations: list[Submitted | Aborted | Called]
) -> None:
    harness = harness_of(setup)
    count = 0
    for operation in operations:
        count = apply(harness, operation, count)
        check_promises(harness)
    harness.run()
    assert len(harness.ended) == count
    for index in range(count):
        check_answer(harness, f"r{index}")
    check_empty(harness)


def check_promises(harness: Harness) -> None:
    """What running requests are expected to add is the same by arrays and one by one."""
    admission = harness.scheduler._admission
    rows = harness.scheduler._batch.active
    each = [admission._growth(request, len(active.pages)) for request, active in rows.items()]
    assert admission._growth_of_running() == sum(each)


def check_empty(harness: Harness) -> None:
    """Nothing is held any more but the cache, and that can be dropped as a whole."""
    memory = harness.scheduler.memory
    assert memory.pool.retired == 0
    assert memory.pool.free + memory.tree.residency.evictable == memory.pool.num_pages
    assert memory.timeline.copies_in_flight == 0
    windows = memory.windows
    num_windows = harness.config.num_window_pages
    assert windows is None or windows.free + windows.cached == num_windows
    assert memory.rows.free == harness.config.max_rows
    harness.scheduler.flush_cache()
    assert memory.pool.free == memory.pool.num_pages
    assert list(memory.tree.nodes()) == []
    assert windows is None or windows.free == num_windows
    assert memory.host is None or memory.host.pool.free == memory.host.pool.num_pages
    assert harness.scheduler._admission.in_flight_prefixes._leaders == {}
    assert harness.stats().matchers == 0


def submitted(prompt: tuple[int, ...], allowed: tuple[int, ...] | None = None) -> Submitted:
    return Submitted(
        prompt=prompt,
        max_tokens=0,
        domain="public",
        cache=CacheMode.USE,
        priority=0,
        stop=(),
        patience=None,
        logprobs=False,
        prompt_logprobs=False,
        lockstep=False,
        allowed=allowed,
    )


# A row whose turn it is gives its pages to others, which are not in the step.
ONE_ROW_A_STEP: dict[str, object] = {
    "depth": 1,
    "max_row_tokens": 4,
    "micro_batches": 1,
    "run_ahead": False,
    "counts": None,
    "max_step_tokens": 6,
    "max_step_seconds": None,
    "schedule_policy": SchedulePolicy.FCFS,
    "eviction_policy": EvictionPolicy.LRU,
    "prefix_cache": True,
    "num_host_pages": 0,
    "host_write_policy": HostWritePolicy.WRITE_THROUGH,
}
LONGEST_LAST = [
    *[submitted((0,))] * 3,
    submitted((1,) * 8 + (0,), allowed=(3, 7, 31, 32, 49)),
    submitted((1,) * 18 + (0,)),
    submitted((0,)),
]


@examples(60)
@example(setup=ONE_ROW_A_STEP, wave=LONGEST_LAST)
@given(setup=setups, wave=st.lists(submits, min_size=6, max_size=14))
def test_more_load_than_memory_is_preempted_evicted_and_still_answered(
    setup: dict[str, object], wave: list[Submitted]
) -> None:
    setup = {**setup, "num_pages": 18, "page_size": 4, "max_rows": 8, "watermark": 0.0}
    harness = harness_of(setup)
    for index, submit in enumerate(wave):
        apply(harness, replace(submit, max_tokens=24, patience=None, stop=()), index)
    harness.run()
    for index in range(len(wave)):
        check_answer(harness, f"r{index}")
    check_empty(harness)

"""Whatever the scheduler does to a request, its greedy text is transformers' text.

In float32; each mode proves by counters that it really happened. The demo model shows it of real
weights, with 25 prompts of 32 tokens; the modes that need many steps have fifty prompts of 64 on a
small model, with random weights that make every token depend on all before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import HostWritePolicy, WorkerSettings
from radixgrove.worker.plan import Executor
from tests.e2e.inprocess import InProcessEngine, build, settings
from tests.worker.execution import reference, tiny

TOKENS = 64
DEMO_TOKENS = 32
GREEDY = SamplingParams(max_tokens=TOKENS, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def executor(demo_model_dir: Path) -> Iterator[Executor]:
    built = build(settings(), demo_model_dir)
    yield built
    built.close()


def test_cold_then_warm_cache(
    executor: Executor, demo_model_dir: Path, demo_prompts: list[list[int]]
) -> None:
    model = reference.load(demo_model_dir)
    sampling = SamplingParams(max_tokens=DEMO_TOKENS, seed=0, temperature=0.0)
    chosen = demo_prompts[::2]
    engine = InProcessEngine(executor, settings())
    cold = engine.generate(chosen, sampling)
    assert engine.scheduler.counters.cached_tokens == 0
    for prompt, answer in zip(chosen, cold, strict=True):
        assert len(answer.tokens) == DEMO_TOKENS
        assert reference.says(model, prompt, answer.tokens)
    warm = engine.generate(chosen, sampling)
    assert [answer.tokens for answer in warm] == [answer.tokens for answer in cold]
    for prompt, answer in zip(chosen, warm, strict=True):
        assert answer.cached_tokens == (len(prompt) - 1) // 16 * 16
    assert engine.scheduler.counters.cached_tokens > 0


@pytest.fixture(scope="module")
def small(
    tmp_path_factory: pytest.TempPathFactory, demo_prompts: list[list[int]]
) -> tiny.SmallModel:
    return tiny.small_model(tmp_path_factory.mktemp("small"), demo_prompts, TOKENS)


def small_settings(**changes: Any) -> WorkerSettings:
    return settings(**{"max_model_len": 256} | changes)


@pytest.fixture(scope="module")
def small_executor(small: tiny.SmallModel) -> Iterator[Executor]:
    built = build(small_settings(), small.directory)
    yield built
    built.close()


def test_chunks_of_seven(small_executor: Executor, small: tiny.SmallModel) -> None:
    worker = small_settings(max_step_tokens=7, max_running=7, prefix_cache=False)
    engine = InProcessEngine(small_executor, worker)
    # Alone in its steps each prompt is cut into sevens; together they share each step's seven.
    for prompt, tokens in list(zip(small.prompts, small.answers, strict=True))[:10]:
        assert engine.generate([prompt], GREEDY)[0].tokens == tokens
    assert engine.most_chunks == max(-(-len(prompt) // 7) for prompt in small.prompts[:10])
    assert engine.most_chunks > 1
    answers = engine.generate(small.prompts[10:30], GREEDY)
    assert [answer.tokens for answer in answers] == small.answers[10:30]


def test_shuffled_batches_of_sixteen(small_executor: Executor, small: tiny.SmallModel) -> None:
    order = list(range(32))
    random.Random(7).shuffle(order)
    engine = InProcessEngine(small_executor, small_settings(max_running=16))
    answers = engine.generate([small.prompts[i] for i in order], GREEDY)
    assert [answer.tokens for answer in answers] == [small.answers[i] for i in order]
    assert engine.most_decodes == 16


@pytest.fixture(scope="module")
def tight_executor(small: tiny.SmallModel) -> Iterator[Executor]:
    """A pool that holds a few requests only."""
    built = build(small_settings(kv_tokens=640, max_running=16), small.directory)
    yield built
    built.close()


def test_after_eviction(tight_executor: Executor, small: tiny.SmallModel) -> None:
    engine = InProcessEngine(tight_executor, small_settings(kv_tokens=640, max_running=4))
    answers = engine.generate(small.prompts, GREEDY)
    assert [answer.tokens for answer in answers] == small.answers
    assert engine.scheduler.memory.tree.residency.evicted >= 1


def test_after_preemption(tight_executor: Executor, small: tiny.SmallModel) -> None:
    engine = InProcessEngine(
        tight_executor, small_settings(kv_tokens=640, max_running=16, watermark=0.0)
    )
    # Requests that end early teach the scheduler to expect little output, hence to over-admit.
    engine.generate(small.prompts[:24], SamplingParams(max_tokens=1, seed=0, temperature=0.0))
    answers = engine.generate(small.prompts, GREEDY)
    assert [answer.tokens for answer in answers] == small.answers
    assert engine.scheduler.counters.preemptions >= 1


@pytest.mark.parametrize("policy", [HostWritePolicy.WRITE_THROUGH, HostWritePolicy.WRITE_BACK])
def test_through_the_host_and_back(small: tiny.SmallModel, policy: HostWritePolicy) -> None:
    assert_through_the_host_and_back(small, policy)


def test_layers_with_and_without_a_window_go_through_the_host_together(tmp_path: Path) -> None:
    model, prompts = tiny.save("gemma3", tmp_path), tiny.prompts()
    windowed = tiny.SmallModel(tmp_path, prompts, reference.greedy(model, prompts, TOKENS))
    assert_through_the_host_and_back(windowed, HostWritePolicy.WRITE_THROUGH)


def assert_through_the_host_and_back(small: tiny.SmallModel, policy: HostWritePolicy) -> None:
    worker = small_settings(
        kv_tokens=512, max_running=4, host_cache_gib=0.25, host_write_policy=policy, page_size=8
    )
    executor = build(worker, small.directory)
    try:
        engine = InProcessEngine(executor, worker)
        for _ in range(2):
            answers = engine.generate(small.prompts[:10], GREEDY)
            assert [answer.tokens for answer in answers] == small.answers[:10]
        for prompt, answer in zip(small.prompts, answers, strict=False):
            assert answer.cached_tokens == (len(prompt) - 1) // 8 * 8
        host = engine.scheduler.memory.host
        assert host is not None
        assert host.loaded > 10
    finally:
        executor.close()


def test_logprobs_match_across_cold_and_warm(
    executor: Executor, demo_model_dir: Path, demo_prompts: list[list[int]]
) -> None:
    model = reference.load(demo_model_dir)
    engine = InProcessEngine(executor, settings())
    sampling = SamplingParams(max_tokens=8, seed=0, temperature=0.0, logprobs=3)
    for warm in (False, True):
        for prompt, answer in zip(
            demo_prompts[:8], engine.generate(demo_prompts[:8], sampling), strict=True
        ):
            assert answer.cached_tokens == ((len(prompt) - 1) // 16 * 16 if warm else 0)
            rows = reference.logprobs(model, prompt + answer.tokens)
            for i, (token, entry) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
                wanted = rows[len(prompt) - 1 + i, token].item()
                assert entry.logprob == pytest.approx(wanted, abs=1e-3)

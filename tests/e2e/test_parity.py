"""Whatever the scheduler does to a request, its greedy text is transformers' text.

Fifty prompts, 64 tokens each, float32. Each mode proves by counters that it really happened.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import HostWritePolicy
from radixgrove.worker.plan import Executor
from tests.e2e.greedy_texts import greedy_texts
from tests.e2e.inprocess import InProcessEngine, build, settings
from tests.worker.execution import prompts, reference

TOKENS = 64
GREEDY = SamplingParams(max_tokens=TOKENS, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def texts(demo_model_dir: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in prompts.TEXTS]


@pytest.fixture(scope="module")
def expected(demo_model_dir: Path, texts: list[list[int]]) -> list[list[int]]:
    return greedy_texts(demo_model_dir, texts, TOKENS)


@pytest.fixture(scope="module")
def executor(demo_model_dir: Path) -> Iterator[Executor]:
    built = build(settings(), demo_model_dir)
    yield built
    built.close()


def test_cold_then_warm_cache(
    executor: Executor, texts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = InProcessEngine(executor, settings())
    cold = engine.generate(texts, GREEDY)
    assert [answer.tokens for answer in cold] == expected
    assert engine.scheduler.counters.cached_tokens == 0
    warm = engine.generate(texts, GREEDY)
    assert [answer.tokens for answer in warm] == expected
    for prompt, answer in zip(texts, warm, strict=True):
        assert answer.cached_tokens == (len(prompt) - 1) // 16 * 16
    assert engine.scheduler.counters.cached_tokens > 0


def test_chunks_of_seven(
    executor: Executor, texts: list[list[int]], expected: list[list[int]]
) -> None:
    worker = settings(max_step_tokens=7, max_running=7, prefix_cache=False)
    engine = InProcessEngine(executor, worker)
    # Alone in its steps each prompt is cut into sevens; together they share each step's seven.
    for prompt, tokens in list(zip(texts, expected, strict=True))[:10]:
        assert engine.generate([prompt], GREEDY)[0].tokens == tokens
    assert engine.most_chunks == max(-(-len(prompt) // 7) for prompt in texts[:10])
    assert engine.most_chunks > 1
    answers = engine.generate(texts[10:], GREEDY)
    assert [answer.tokens for answer in answers] == expected[10:]


def test_shuffled_batches_of_sixteen(
    executor: Executor, texts: list[list[int]], expected: list[list[int]]
) -> None:
    order = list(range(len(texts)))
    random.Random(7).shuffle(order)
    engine = InProcessEngine(executor, settings(max_running=16))
    answers = engine.generate([texts[i] for i in order], GREEDY)
    assert [answer.tokens for answer in answers] == [expected[i] for i in order]
    assert engine.most_decodes == 16


@pytest.fixture(scope="module")
def small_executor(demo_model_dir: Path) -> Iterator[Executor]:
    """A pool that holds a few requests only."""
    built = build(settings(kv_tokens=640, max_running=16), demo_model_dir)
    yield built
    built.close()


def test_after_eviction(
    small_executor: Executor, texts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = InProcessEngine(small_executor, settings(kv_tokens=640, max_running=4))
    answers = engine.generate(texts, GREEDY)
    assert [answer.tokens for answer in answers] == expected
    assert engine.scheduler.memory.tree.residency.evicted >= 1


def test_after_preemption(
    small_executor: Executor, texts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = InProcessEngine(small_executor, settings(kv_tokens=640, max_running=16, watermark=0.0))
    # Requests that end early teach the scheduler to expect little output, hence to over-admit.
    engine.generate(texts[:24], SamplingParams(max_tokens=1, seed=0, temperature=0.0))
    answers = engine.generate(texts, GREEDY)
    assert [answer.tokens for answer in answers] == expected
    assert engine.scheduler.counters.preemptions >= 1


@pytest.mark.parametrize("policy", [HostWritePolicy.WRITE_THROUGH, HostWritePolicy.WRITE_BACK])
def test_through_the_host_and_back(
    demo_model_dir: Path,
    texts: list[list[int]],
    expected: list[list[int]],
    policy: HostWritePolicy,
) -> None:
    worker = settings(
        kv_tokens=512, max_running=4, host_cache_gib=0.25, host_write_policy=policy, page_size=8
    )
    executor = build(worker, demo_model_dir)
    try:
        engine = InProcessEngine(executor, worker)
        for _ in range(2):
            answers = engine.generate(texts[:10], GREEDY)
            assert [answer.tokens for answer in answers] == expected[:10]
        for prompt, answer in zip(texts, answers, strict=False):
            assert answer.cached_tokens == (len(prompt) - 1) // 8 * 8
        host = engine.scheduler.memory.host
        assert host is not None
        assert host.loaded > 10
    finally:
        executor.close()


def test_logprobs_match_across_cold_and_warm(
    executor: Executor, demo_model_dir: Path, texts: list[list[int]]
) -> None:
    model = reference.load(demo_model_dir)
    engine = InProcessEngine(executor, settings())
    sampling = SamplingParams(max_tokens=8, seed=0, temperature=0.0, logprobs=3)
    for warm in (False, True):
        for prompt, answer in zip(texts[:8], engine.generate(texts[:8], sampling), strict=True):
            assert answer.cached_tokens == ((len(prompt) - 1) // 16 * 16 if warm else 0)
            rows = reference.logprobs(model, prompt + answer.tokens)
            for i, (token, entry) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
                wanted = rows[len(prompt) - 1 + i, token].item()
                assert entry.logprob == pytest.approx(wanted, abs=1e-3)

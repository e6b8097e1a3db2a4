"""Texts are token for token what transformers says, however the steps are cut.

The demo model shows it of real weights; how steps are cut is shown on a small model, where random
weights make every token depend on all before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.plan import Executor
from tests.worker.execution import reference, tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy

TOKENS = 32


@pytest.fixture(scope="module")
def hf(demo_model_dir: Path) -> Any:
    return reference.load(demo_model_dir)


@pytest.fixture(scope="module")
def small(
    tmp_path_factory: pytest.TempPathFactory, demo_prompts: list[list[int]]
) -> tiny.SmallModel:
    return tiny.small_model(tmp_path_factory.mktemp("small"), demo_prompts[::2], TOKENS)


@pytest.fixture(scope="module")
def runner(small: tiny.SmallModel) -> Iterator[Runner]:
    runner = cpu_runner(small.directory, max_running=64, kv_tokens=64 * 256)
    yield runner
    runner.close()


def test_one_batch(runner: Runner, small: tiny.SmallModel) -> None:
    results = Driver(runner).generate(small.prompts, greedy(TOKENS))
    assert [result.tokens for result in results] == small.answers
    assert all(result.chunks == 1 for result in results)


def test_chunks_of_seven(runner: Runner, small: tiny.SmallModel) -> None:
    results = Driver(runner).generate(small.prompts, greedy(TOKENS), chunk=7)
    assert [result.tokens for result in results] == small.answers
    for result, prompt in zip(results, small.prompts, strict=True):
        assert result.chunks == -(-len(prompt) // 7)


def test_shuffled_batches_of_sixteen(runner: Runner, small: tiny.SmallModel) -> None:
    order = list(range(len(small.prompts)))
    random.Random(0).shuffle(order)
    driver = Driver(runner)
    for begin in range(0, len(order), 16):
        members = order[begin : begin + 16]
        results = driver.generate([small.prompts[i] for i in members], greedy(TOKENS))
        assert [result.tokens for result in results] == [small.answers[i] for i in members]


def test_cached_prefixes(runner: Runner, small: tiny.SmallModel) -> None:
    driver = Driver(runner)
    driver.generate(small.prompts, greedy(1), reuse=True)
    results = driver.generate(small.prompts, greedy(TOKENS), reuse=True)
    assert [result.tokens for result in results] == small.answers
    for result, prompt in zip(results, small.prompts, strict=True):
        assert result.cached == (len(prompt) - 1) // 16 * 16
    assert sum(result.cached for result in results) > 0


def test_logprobs(demo_executor: Executor, hf: Any, demo_prompts: list[list[int]]) -> None:
    chosen = demo_prompts[::10]
    results = Driver(demo_executor).generate(
        chosen, greedy(8, logprobs=5, prompt_logprobs=2), chunk=11
    )
    for prompt, result in zip(chosen, results, strict=True):
        rows = reference.logprobs(hf, prompt + result.tokens)
        assert len(result.prompt_logprobs) == len(prompt) - 1
        entries = [*result.prompt_logprobs, *result.logprobs]
        assert len(entries) == len(prompt) - 1 + 8
        for position, entry in enumerate(entries):
            token = (prompt + result.tokens)[position + 1]
            assert entry.logprob == pytest.approx(rows[position, token].item(), abs=1e-3)
            width = 2 if position < len(prompt) - 1 else 5
            best = rows[position].topk(width)
            assert [value for _, value in entry.top] == pytest.approx(
                best.values.tolist(), abs=1e-3
            )
            for token_id, value in entry.top:
                assert value == pytest.approx(rows[position, token_id].item(), abs=1e-3)


def test_a_seed_gives_the_same_text_in_any_batch(runner: Runner, small: tiny.SmallModel) -> None:
    prompts = small.prompts[:12]

    def sampling(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=16, seed=i, temperature=0.8, top_p=0.95 if i % 2 else 1.0)

    together = Driver(runner).generate(prompts, sampling)
    for i in range(4):
        alone = Driver(runner).generate([prompts[i]], lambda _, i=i: sampling(i))  # type: ignore[misc]
        assert alone[0].tokens == together[i].tokens
    other = Driver(runner).generate(prompts[:4], lambda i: sampling(i + 100))
    assert [result.tokens for result in other] != [result.tokens for result in together[:4]]

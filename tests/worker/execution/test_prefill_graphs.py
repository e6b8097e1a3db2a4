"""Steps with chunks, padded to the token ladder, give what steps of exact size give.

On a CPU a graph's replay is a call of what would be captured, over the same static buffers. That
our kernels attend from these alone is shown in `tests/kernels/test_attention.py`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from radixgrove.kernels.linear_candidates import BUCKETS
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.execution.prefill_graphs import token_ladder
from radixgrove.worker.execution.runner import Runner
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy

CHUNK = 6


def padded_runner(directory: Path, sizes: list[int]) -> Runner:
    runner = cpu_runner(directory)
    runner.capture([4, 8], lambda text, done: None)
    runner.capture_mixed(sizes, lambda text, done: None)
    return runner


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_padded_steps_equal_exact_ones(kind: str, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path)
    prompts = tiny.prompts()

    def params(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=4 + 2 * i, seed=i, temperature=0.9 * (i % 2))

    exact = Driver(cpu_runner(tmp_path)).generate(prompts, params, chunk=CHUNK)
    runner = padded_runner(tmp_path, [16, 40, 64])
    padded = Driver(runner).generate(prompts, params, chunk=CHUNK)
    assert [one.tokens for one in padded] == [one.tokens for one in exact]
    chunks = -(-max(map(len, prompts)) // CHUNK)
    assert runner._mixed is not None
    assert runner._mixed.replays == chunks


def test_a_warm_prefix_is_read_from_its_pages(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    driver = Driver(padded_runner(tmp_path, [64, 160]))
    prompt = tiny.prompts()[-1]
    cold = driver.generate([prompt], greedy(8))
    warm = driver.generate([prompt], greedy(8), reuse=True)
    assert warm[0].tokens == cold[0].tokens
    assert driver.executor._mixed.replays == 2  # type: ignore[attr-defined]


def test_steps_beyond_the_ladder_run_eagerly(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    runner = padded_runner(tmp_path, [4])
    Driver(runner).generate([[1, 2, 3], [4, 5]], greedy(3))
    assert runner._mixed is not None
    assert runner._mixed.replays == 0


def test_prompt_logprobs_run_eagerly(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    runner = padded_runner(tmp_path, [64])
    params = SamplingParams(max_tokens=2, seed=0, temperature=0.0, prompt_logprobs=1)
    Driver(runner).generate([[1, 2, 3]], params)
    assert runner._mixed is not None
    assert runner._mixed.replays == 0


def test_token_ladder_ends_at_the_largest_step() -> None:
    sizes = token_ladder(8192)
    assert sizes[0] == 64
    assert sizes[-1] == 1024
    assert set(sizes) <= set(BUCKETS)
    assert all(size <= 1.5 * previous for previous, size in pairwise(sizes))
    assert token_ladder(300) == [64, 96, 128, 192, 256, 300]
    assert token_ladder(10) == [10]

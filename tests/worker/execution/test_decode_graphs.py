"""Padded decode steps of the graph ladder give what steps of exact size give.

On a CPU a graph's replay is a call of what would be captured, over the same static buffers.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.execution.graphs import ladder
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, Generated, cpu_runner, greedy

SIZES = [1, 4, 8]


def params(i: int) -> SamplingParams:
    """A mixture: greedy, random, filtered, penalised, with logprobs; of different lengths."""
    base = {"max_tokens": 5 + 3 * i, "seed": i}
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.9, "top_p": 0.8, "top_k": 40},
        {"temperature": 0.7, "repetition_penalty": 1.3},
        {"temperature": 0.0, "logprobs": 3},
    ]
    return SamplingParams(**base, **kinds[i % len(kinds)])  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_padded_steps_equal_exact_ones(rows: int, tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path)
    prompts = tiny.prompts()[-rows:]
    exact = Driver(cpu_runner(tmp_path)).generate(prompts, params)
    runner = cpu_runner(tmp_path)
    graphs = runner.capture(SIZES, lambda text, done: None)
    padded = Driver(runner).generate(prompts, params)
    assert graphs.replays == max(params(i).max_tokens for i in range(rows)) - 1
    assert _tokens(padded) == _tokens(exact)
    for one, other in zip(padded, exact, strict=True):
        assert [entry.top for entry in one.logprobs] == [
            [(token, pytest.approx(value, abs=1e-4)) for token, value in entry.top]
            for entry in other.logprobs
        ]


def test_batches_beyond_the_ladder_run_eagerly(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    runner = cpu_runner(tmp_path)
    graphs = runner.capture([1, 2], lambda text, done: None)
    Driver(runner).generate([[1, 2], [3, 4], [5, 6]], greedy(6))
    assert graphs.replays == 0


def test_ladder_is_fine_for_small_batches_and_ends_at_the_largest() -> None:
    sizes = ladder(256)
    assert sizes[:5] == [1, 2, 4, 8, 16]
    assert sizes[-1] == 256
    assert sizes == sorted(set(sizes))
    assert all(size - previous <= max(8, previous) for previous, size in pairwise(sizes))
    assert ladder(1) == [1]
    assert ladder(3) == [1, 2, 3]


def _tokens(results: list[Generated]) -> list[list[int]]:
    return [result.tokens for result in results]

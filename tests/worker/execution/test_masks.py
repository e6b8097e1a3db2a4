"""Masks between a step's two parts: rows that have one sample under it, the others as ever."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.execution.sampling.masks import TokenMasks
from tests.worker.execution import tiny
from tests.worker.execution.driver import Driver, cpu_runner
from tests.worker.execution.test_decode_graphs import SIZES, params


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny.save("llama", directory)
    return directory


def generate(
    model: Path, masked: frozenset[int], *, graphs: bool = False, sampling: object = params
) -> list[list[int]]:
    runner = cpu_runner(model)
    if graphs:
        runner.capture(SIZES, lambda text, done: None)
    driver = Driver(runner, apart=True, masked=masked)
    results = driver.generate(tiny.prompts(), sampling, chunk=20)  # type: ignore[arg-type]
    return [result.tokens for result in results]


@pytest.mark.parametrize("graphs", [False, True])
def test_masked_rows_get_allowed_tokens_and_the_others_what_they_would(
    model: Path, graphs: bool
) -> None:
    """Among them rows that are greedy, random, filtered, penalized and scored."""
    free = generate(model, frozenset(), graphs=graphs)
    masked = generate(model, frozenset({0, 3, 4, 7}), graphs=graphs)
    for row, (before, after) in enumerate(zip(free, masked, strict=True)):
        if row in (0, 3, 4, 7):
            assert all(token % 2 == 0 for token in after)
            assert len(after) == len(before)
        else:
            assert after == before
    assert any(token % 2 for row in (0, 3, 4, 7) for token in free[row])


def test_graphs_say_what_single_kernels_say(model: Path) -> None:
    rows = frozenset(range(0, 8, 3))
    assert generate(model, rows, graphs=True) == generate(model, rows)


def test_logprobs_are_the_models_own(model: Path) -> None:
    """Not those that are left of it under the mask."""

    def scored(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=1, seed=i, temperature=0.0, logprobs=3)

    def first(masked: frozenset[int]) -> list[object]:
        driver = Driver(cpu_runner(model), apart=True, masked=masked)
        return [result.logprobs[0] for result in driver.generate(tiny.prompts(), scored)]

    free, masked = first(frozenset()), first(frozenset(range(8)))
    assert [entry.top for entry in masked] == [entry.top for entry in free]  # type: ignore[attr-defined]
    chosen = [entry.logprob for entry in masked]  # type: ignore[attr-defined]
    best = [entry.top[0][1] for entry in free]  # type: ignore[attr-defined]
    assert all(np.array(chosen) <= np.array(best))
    assert chosen != best


def test_edits_come_first_and_cannot_bring_back_what_the_mask_forbids(model: Path) -> None:
    def biased(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=6, seed=i, temperature=0.0, logit_bias={7: 100.0, 8: 50.0})

    def said(masked: frozenset[int]) -> set[int]:
        return set(chain.from_iterable(generate(model, masked, sampling=biased)))

    assert said(frozenset()) == {7}
    assert said(frozenset(range(8))) == {8}


def test_a_row_gets_tokens_at_its_masked_positions_only() -> None:
    """Of rows with several positions: what is not masked is not for it, if anything is."""
    masks = TokenMasks(torch.zeros((3, 1), dtype=torch.int32), [0, 1, 5])
    assert masks.limits([3, 2, 4]).tolist() == [2, 2, 1]

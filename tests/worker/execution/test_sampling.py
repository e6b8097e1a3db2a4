"""The sampler against a plain reference: distributions, edits, seeds, logprobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from radixgrove.kernels import sample, top_k_top_p
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.execution.sampling.draw import draw
from radixgrove.worker.execution.sampling.logits_processors import counting_bytes, edit_logits
from radixgrove.worker.execution.sampling.logprobs import token_logprobs
from radixgrove.worker.execution.sampling.sampler import Sampled, Sampler
from radixgrove.worker.execution.sampling.state import SamplingFeatures, SamplingState
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.plan import INVALID_TOKEN, NewRow, StepPlan
from tests.conftest import examples

CPU = torch.device("cpu")


class Bench:
    """A table and sampling state without a model: rows hold given tokens, logits are given."""

    def __init__(self, rows: int, length: int = 64) -> None:
        self.table = RequestTable(
            max_rows=rows, max_model_len=length, page_size=16, scratch_page=0, device=CPU
        )
        self.state = SamplingState(rows, CPU, tokens=1 << 20)
        self.sampler = Sampler(self.state, self.table)

    def enter(
        self, row: int, sampling: SamplingParams, tokens: Sequence[int] = (0,), prompt_len: int = 1
    ) -> None:
        new = NewRow(
            row=row,
            token_ids=np.array(tokens, dtype="<i4").tobytes(),
            prompt_len=prompt_len,
            pages=[],
            sampling=sampling,
        )
        self.table.apply(StepPlan(step_id=0, new_rows=[new]))
        self.state.enter([new])

    def sample(self, logits: Tensor, rows: list[int]) -> Sampled:
        sampled = self.sampler.sample(logits, torch.tensor(rows), rows)
        self.table.advance(rows, [])
        return sampled


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "seed": 0, **changes})


def reference_distribution(logits: np.ndarray[Any, Any], sampling: SamplingParams) -> Any:
    """Temperature, then top-k, then top-p of what is left, then min-p; by sorting, in float64."""
    scaled = logits.astype(np.float64) / sampling.temperature
    probs = np.exp(scaled - scaled.max())
    order = np.argsort(-probs, kind="stable")
    keep = np.ones(len(probs), dtype=bool)
    if sampling.top_k:
        keep[order[sampling.top_k :]] = False
    probs = np.where(keep, probs, 0) / probs[keep].sum()
    before = np.cumsum(probs[order]) - probs[order]
    keep[order[(before >= sampling.top_p) & (before > 0)]] = False
    keep &= probs >= sampling.min_p * probs.max()
    probs = np.where(keep, probs, 0)
    return probs / probs.sum()


DISTRIBUTIONS = [
    params(temperature=1.0),
    params(temperature=0.5),
    params(temperature=1.7),
    params(top_k=3),
    params(top_k=1),
    params(top_p=0.7),
    params(top_p=0.05),
    params(min_p=0.2),
    params(temperature=1.3, top_k=8, top_p=0.8),
    params(temperature=1.5, top_k=12, top_p=0.95, min_p=0.1),
]


@pytest.mark.parametrize("sampling", DISTRIBUTIONS, ids=lambda p: repr(p)[15:-1])
@pytest.mark.parametrize("vocab", [20, 3000])
def test_frequencies_follow_the_parameters(sampling: SamplingParams, vocab: int) -> None:
    draws = 3000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    bench = Bench(draws)
    for row in range(draws):
        changed = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p")}
        bench.enter(row, params(**changed, min_p=sampling.min_p, seed=1000 + row))
    rows = list(range(draws))
    counts = np.zeros(vocab)
    for part in (rows[i : i + 500] for i in range(0, draws, 500)):
        tokens = bench.sample(logits.expand(len(part), vocab).contiguous(), part).tokens
        np.add.at(counts, tokens.numpy(), 1)
    expected = reference_distribution(logits.numpy(), sampling) * draws
    assert counts[expected == 0].sum() == 0
    _assert_fits(counts, expected)


def _assert_fits(counts: Any, expected: Any) -> None:
    """Chi-square over cells of at least five expected draws, the rest pooled."""
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    # Wilson and Hilferty's approximation of the 99.99 % quantile.
    bound = (
        freedom * (1 - 2 / (9 * max(freedom, 1)) + 3.72 * math.sqrt(2 / (9 * max(freedom, 1)))) ** 3
    )
    assert statistic <= max(bound, 1e-9)


def test_a_row_draws_the_same_in_any_batch() -> None:
    vocab = 400
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(0))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.0},
        {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.4},
        {"temperature": 1.0, "min_p": 0.05, "seed": 2**63 + 11},
        {"temperature": 0.9, "logprobs": 2, "seed": -7},
    ]

    def texts(batches: list[list[int]]) -> dict[int, list[int]]:
        bench = Bench(6)
        for row, kind in enumerate(kinds):
            bench.enter(row, params(**{"seed": row, **kind}), tokens=[row, 7], prompt_len=2)
        drawn: dict[int, list[int]] = {row: [] for row in range(6)}
        for _ in range(10):
            for batch in batches:
                tokens = bench.sample(logits[batch], batch).tokens.tolist()
                for row, token in zip(batch, tokens, strict=True):
                    drawn[row].append(token)
        return drawn

    alone = texts([[row] for row in range(6)])
    assert texts([[0, 1, 2, 3, 4, 5]]) == alone
    assert texts([[5, 3, 1], [2, 0, 4]]) == alone
    assert len(set(alone[0])) > 3  # positions differ, so do draws


def test_different_seeds_draw_differently() -> None:
    logits = torch.zeros(64, 1000)
    bench = Bench(64)
    for row in range(64):
        bench.enter(row, params(seed=row))
    assert len(set(bench.sample(logits, list(range(64))).tokens.tolist())) > 50


@examples(150)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 511, 512, 513, 900, 1500, 2000]),
    top_p=st.sampled_from([0.01, 0.5, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.3, 1.0]),
    spread=st.sampled_from([0.01, 1.0, 6.0]),
    seed=st.integers(0, 2**32),
)
def test_the_few_candidates_shortcut_draws_what_the_whole_vocabulary_does(
    temperature: float, top_k: int, top_p: float, min_p: float, spread: float, seed: int
) -> None:
    vocab = 1500
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(seed)) * spread
    bench = Bench(2)
    for row in range(2):
        bench.enter(
            row,
            params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed + row),
        )
    rows, positions = torch.tensor([0, 1]), torch.tensor([3, 4])
    got = draw(
        logits, rows, positions, bench.state, SamplingFeatures.RANDOM | SamplingFeatures.FILTER
    )
    floats, integers = bench.state.floats(rows), bench.state.integers(rows)
    least = top_k_top_p.sampling_thresholds_reference(
        logits, floats["temperature"], integers["top_k"].int(), floats["top_p"], floats["min_p"]
    )
    expected = sample.sample_reference(
        logits, floats["temperature"], integers["seed"], positions, least
    )
    assert got.tolist() == expected.tolist()


def test_greedy_rows_take_the_best_token_beside_random_ones() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(3))
    bench = Bench(4)
    for row in range(4):
        bench.enter(row, params(temperature=float(row % 2), top_k=40, seed=row))
    tokens = bench.sample(logits, [0, 1, 2, 3]).tokens
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()


def test_penalties_equal_their_definition() -> None:
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(4))
    tokens = [[1, 2, 2, 5, 5, 5, 3], [4], [0, 0, 9, 9]]
    prompt_lens = [3, 1, 4]
    kinds = [
        params(repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2),
        params(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0),
        params(repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=-0.5),
    ]
    bench = Bench(3)
    for row in range(3):
        bench.enter(row, kinds[row], tokens[row], prompt_lens[row])
        bench.table.tokens[row, len(tokens[row]) :] = 7  # left by an earlier request
    expected = logits.clone()
    for row, sampling in enumerate(kinds):
        output = tokens[row][prompt_lens[row] :]
        for token in range(12):
            value = expected[row, token]
            if token in tokens[row]:
                penalty = sampling.repetition_penalty
                value = value / penalty if value > 0 else value * penalty
            value = value - sampling.frequency_penalty * output.count(token)
            value = value - sampling.presence_penalty * (token in output)
            expected[row, token] = value
    needs = [int(SamplingFeatures.of(sampling)) for sampling in kinds]
    edit_logits(logits, torch.arange(3), needs, bench.state, bench.table, longest=7)
    torch.testing.assert_close(logits, expected)


def test_logit_bias_forces_and_bans() -> None:
    logits = torch.zeros(3, 50)
    logits[:, 7] = 5.0
    bench = Bench(3)
    bench.enter(0, params(temperature=0.0, logit_bias={7: -100.0, 9: 3.0, 10: 2.0}))
    bench.enter(1, params(temperature=1.0, logit_bias={49: 100.0}))
    bench.enter(2, params(temperature=0.0))
    assert bench.sample(logits, [0, 1, 2]).tokens.tolist() == [9, 49, 7]
    # A row's next request must not inherit the bias.
    bench.enter(0, params(temperature=0.0, logit_bias={3: 50.0}))
    bench.enter(1, params(temperature=0.0))
    assert bench.sample(logits, [0, 1, 2]).tokens.tolist() == [3, 7, 7]


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(2, 20)
    logits[:, 4], logits[:, 5], logits[:, 6] = 3.0, 2.0, 1.0
    bench = Bench(2)
    stops = {"stop_token_ids": (4, 5), "temperature": 0.0}
    bench.enter(0, params(min_tokens=3, **stops), tokens=[1, 2], prompt_len=2)
    bench.enter(1, params(min_tokens=0, **stops))
    drawn = [bench.sample(logits, [0, 1]).tokens.tolist() for _ in range(5)]
    assert [row for row, _ in drawn] == [6, 6, 6, 4, 4]
    assert [row for _, row in drawn] == [4] * 5


def test_a_preempted_row_counts_its_earlier_output() -> None:
    logits = torch.zeros(1, 20)
    logits[:, 4], logits[:, 6] = 3.0, 1.0
    bench = Bench(1)
    sampling = params(min_tokens=3, stop_token_ids=(4,), temperature=0.0)
    bench.enter(0, sampling, tokens=[1, 2, 6, 6], prompt_len=2)
    drawn = [bench.sample(logits, [0]).tokens.item() for _ in range(2)]
    assert drawn == [6, 4]


@pytest.mark.parametrize(
    "sampling",
    [params(temperature=0.0), params(), params(top_p=0.9), params(top_k=5), params(min_p=0.1)],
    ids=str,
)
def test_a_row_of_nan_is_told_and_leaves_the_others_alone(sampling: SamplingParams) -> None:
    logits = torch.randn(3, 700)
    rows = [0, 1, 2]
    drawn = []
    for broken in (False, True):
        bench = Bench(3)
        for row in rows:
            bench.enter(row, sampling)
        if broken:
            logits[1] = float("nan")
        drawn.append(bench.sample(logits, rows).tokens.tolist())
        known = bench.table.tokens[:3, 1].tolist()
        assert all(0 <= token < 700 for token in known), "the next step embeds it"
    assert drawn[1] == [drawn[0][0], INVALID_TOKEN, drawn[0][2]]


def test_entries_for_tokens_without_a_logit_have_no_effect() -> None:
    bench = Bench(1)
    bench.state = SamplingState(1, CPU, tokens=10)
    bench.sampler = Sampler(bench.state, bench.table)
    bias = {3: 5.0, 10: 100.0, 4000: 100.0}
    sampling = params(
        temperature=0.0,
        logit_bias=bias,
        stop_token_ids=[9, 11],
        min_tokens=4,
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        logprobs=2,
    )
    bench.enter(0, sampling, tokens=[1, 12, 5000], prompt_len=3)  # a prompt may have such ids
    sampled = bench.sample(torch.zeros(1, 10), [0])
    assert sampled.tokens.tolist() == [3]


def test_the_logprob_of_a_token_without_a_logit() -> None:
    found = token_logprobs(torch.zeros(2, 10), torch.tensor([4, 12]), 1)
    assert found.chosen.tolist() == pytest.approx([-math.log(10), float("-inf")])


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(6))
    bench = Bench(3)
    bench.enter(0, params(temperature=0.0))
    bench.enter(1, params(temperature=0.3, logit_bias={11: 50.0}, logprobs=4, top_k=5))
    bench.enter(2, params(temperature=1.5, repetition_penalty=2.0, logprobs=0))
    sampled = bench.sample(logits.clone(), [0, 1, 2])
    assert sampled.logprob_rows == [1, 2]
    assert sampled.logprobs is not None
    entries = sampled.logprobs.entries([4, 0])
    expected = logits.log_softmax(-1)
    assert sampled.tokens[1].item() == 11
    assert entries[0].logprob == pytest.approx(expected[1, 11].item(), abs=1e-5)
    assert entries[1].logprob == pytest.approx(expected[2, sampled.tokens[2]].item(), abs=1e-5)
    assert [token for token, _ in entries[0].top] == expected[1].topk(4).indices.tolist()
    assert all(a[1] >= b[1] for a, b in pairwise(entries[0].top))
    assert entries[1].top == []


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}])
def test_the_least_temperatures_are_greedy(changes: dict[str, Any]) -> None:
    """Also beside rows that draw; divided by 1e-39, most logits are infinite."""
    bench = Bench(2)
    bench.enter(0, params(temperature=1e-39, **changes))
    bench.enter(1, params(temperature=1.0, seed=3, **changes))
    logits = torch.arange(50.0).repeat(2, 1)
    for _ in range(20):
        assert bench.sample(logits, [0, 1]).tokens[0] == 49


def test_penalties_take_bounded_scratch_and_count_all_rows_alike() -> None:
    """However many long rows ask for them; each row's own length decides what is counted."""
    rows, length, vocab = 24, 1 << 17, 40
    bench = Bench(rows, length)
    for row in range(rows):
        tokens = [row] * (length - row - 1)
        bench.enter(row, params(temperature=0.0, presence_penalty=1.0), tokens, prompt_len=1)
    sizes: list[int] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), options: Any = None
        ) -> Any:
            result = function(*arguments, **(options or {}))
            if isinstance(result, Tensor) and result._base is None:
                sizes.append(result.numel() * result.element_size())
            return result

    logits = torch.zeros(rows, vocab)
    logits[:, -1] = -0.5
    logits[torch.arange(rows), torch.arange(rows)] = 0.25  # 0.75 below zero once penalized
    with Noting():
        sampled = bench.sample(logits, list(range(rows)))
    assert sampled.tokens.tolist() == [1, *([0] * (rows - 1))]
    assert max(sizes) <= counting_bytes(rows, length) / 2 < rows * length * 8

"""The sampler's kernels against their references, and its statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from radixgrove.kernels import penalties, random, sample, top_k_top_p
from radixgrove.kernels.sample import History
from tests.kernels.helpers import assert_close


def make_logits(batch: int, vocab: int, device: torch.device) -> Tensor:
    return torch.randn(batch, vocab, device=device) * 4


def int64(*values: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("vocab", [1, 7, 1024, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sample_draws_what_the_reference_draws(
    vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = make_logits(6, vocab, device).to(dtype)
    temperature = torch.tensor([0.0, 0.3, 0.6, 1.0, 1.5, 2.0], device=device)
    seed = int64(0, 1, -1, 1 << 62, 12345, -(1 << 63), device=device)
    position = int64(0, 1, 2, 1000, 131071, 5, device=device)
    tokens = sample.sample(logits, temperature, seed, position)
    assert tokens.tolist() == (
        sample.sample_reference(logits, temperature, seed, position).tolist()
    )


def test_greedy_takes_the_first_of_equal_logits(device: torch.device) -> None:
    logits = torch.zeros(2, 3000, device=device)
    logits[0, [2500, 17, 1400]] = 1.0
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    tokens = sample.sample(logits, torch.zeros(2, device=device), zeros, zeros)
    assert tokens.tolist() == [17, 0]
    assert sample.argmax(logits).tolist() == [17, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_of_nan_is_told_and_leaves_the_others_alone(
    temperature: float, device: torch.device
) -> None:
    logits = make_logits(4, 3000, device)
    logits[2] = float("nan")
    temperatures = torch.full((4,), temperature, device=device)
    seeds, positions = int64(1, 2, 3, 4, device=device), int64(5, 6, 7, 8, device=device)
    tokens = sample.sample(logits, temperatures, seeds, positions)
    expected = sample.sample_reference(logits, temperatures, seeds, positions)
    assert tokens[2] == sample.argmax(logits)[2] == -1
    others = torch.tensor([0, 1, 3])
    assert tokens[others].tolist() == expected[others].tolist()


def test_sample_says_so_where_there_is_nothing_to_draw(device: torch.device) -> None:
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    temperature = torch.tensor([0.0, 1.0], device=device)
    for value in (float("-inf"), float("nan")):
        logits = torch.full((2, 2000), value, device=device)
        tokens = sample.sample(logits, temperature, zeros, zeros)
        assert tokens.tolist() == [-1, -1]


def test_a_rows_token_does_not_depend_on_its_batch(device: torch.device) -> None:
    logits = make_logits(9, 4000, device)
    temperature = torch.full((9,), 1.0, device=device)
    seed = torch.arange(9, device=device) * 7919
    position = torch.arange(9, device=device)
    together = sample.sample(logits, temperature, seed, position)
    alone = [
        sample.sample(logits[i : i + 1], temperature[:1], seed[i : i + 1], position[i : i + 1])
        for i in range(9)
    ]
    assert together.tolist() == torch.cat(alone).tolist()


def test_sample_reads_strided_rows(device: torch.device) -> None:
    wide = make_logits(3, 600, device)
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    tokens = sample.sample(wide[:, :500], torch.zeros(3, device=device), zeros, zeros)
    assert tokens.tolist() == wide[:, :500].argmax(-1).tolist()


def test_draws_follow_the_distribution(device: torch.device) -> None:
    """A chi-square test of 4,096 positions of one sequence over five tokens."""
    count = 4096 if device.type == "cuda" else 256
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.08, 0.02], device=device)
    logits = (2.0 * probabilities.log()).expand(count, 5).contiguous()
    seed = torch.full((count,), 42, dtype=torch.int64, device=device)
    position = torch.arange(count, device=device)
    temperature = torch.full((count,), 2.0, device=device)
    tokens = sample.sample(logits, temperature, seed, position)
    observed = torch.bincount(tokens, minlength=5)
    expected = probabilities * count
    chi_square = ((observed - expected) ** 2 / expected).sum().item()
    assert chi_square < 23.5, observed.tolist()  # 4 degrees of freedom, p = 1e-4


class TestRows:
    """Parameters that stand in tables of all rows, in columns, and samples that go there."""

    DUMMY = 6

    @pytest.fixture
    def floats(self, device: torch.device) -> Tensor:
        """Temperature, top-p and min-p of seven rows; the dummy row is greedy."""
        floats = torch.tensor([0.0, 0.5, 1.0, 1.5, 0.7, 2.0, 0.0], device=device)
        return torch.stack([floats, 0.5 + floats / 5, floats / 50], dim=1)

    @pytest.fixture
    def integers(self, device: torch.device) -> Tensor:
        """Seeds and top-k."""
        seeds = int64(5, -1, 1 << 62, -(1 << 63), 77, 0, 9, device=device)
        return torch.stack([seeds, int64(0, 3, 40, 0, 1, 900, 0, device=device)], dim=1)

    @pytest.fixture
    def history(self, device: torch.device) -> History:
        lens = torch.tensor([1, 9, 3, 2, 7, 5, 1], dtype=torch.int32, device=device)
        tokens = torch.full((7, 12), -1, dtype=torch.int32, device=device)
        return History(lens, tokens, self.DUMMY)

    @pytest.mark.parametrize("chosen", [[4], [3, 0, 5, 1], [2, 6, 6, 6]])
    @pytest.mark.parametrize("how", ["greedy", "random", "filtered"])
    def test_are_read_and_written_in_place(
        self,
        how: str,
        chosen: list[int],
        floats: Tensor,
        integers: Tensor,
        history: History,
        device: torch.device,
    ) -> None:
        rows = int64(*chosen, device=device)
        logits = make_logits(len(chosen), 2500, device)
        out = torch.full((len(chosen) + 1,), -7, dtype=torch.int64, device=device)
        before = history.lens.clone()
        temperature, top_p, min_p = floats.unbind(1)
        seed, top_k = integers.unbind(1)
        least = expected_least = None
        if how == "filtered":
            filters = (temperature, top_k, top_p, min_p)
            least = top_k_top_p.sampling_thresholds(logits, *filters, rows=rows)
            own = (column[rows].contiguous() for column in filters)
            expected_least = top_k_top_p.sampling_thresholds_reference(logits, *own)
        options: dict[str, Any] = {"rows": rows, "history": history, "out": out[:-1]}
        if how == "greedy":
            tokens = sample.argmax(logits, **options)
            expected = logits.argmax(-1)
        else:
            tokens = sample.sample(logits, temperature, seed, history.lens, least, **options)
            expected = sample.sample_reference(
                logits, temperature[rows], seed[rows], before[rows].long(), expected_least
            )
        assert tokens.tolist() == expected.tolist() == out[:-1].tolist()
        assert out[-1] == -7
        for row in range(self.DUMMY + 1):
            known = int(before[row])
            appended = row in chosen and row != self.DUMMY
            assert history.lens[row] == known + appended
            written = [int(expected[chosen.index(row)])] if appended else [-1]
            assert history.tokens[row, known : known + 1].tolist() == written
            others = torch.cat([history.tokens[row, :known], history.tokens[row, known + 1 :]])
            assert (others == -1).all()

    def test_without_rows_nothing_is_written(self, device: torch.device) -> None:
        empty = torch.zeros(0, 50, device=device)
        none = torch.zeros(0, device=device)
        assert sample.sample(empty, none, none.long(), none.long()).shape == (0,)
        assert sample.argmax(empty).shape == (0,)


FILTERS = {
    "off": (0, 1.0, 0.0),
    "top-k": (3, 1.0, 0.0),
    "top-k beyond": (100_000, 1.0, 0.0),
    "top-p": (0, 0.8, 0.0),
    "min-p": (0, 1.0, 0.1),
    "all": (40, 0.9, 0.02),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("sharpness", "candidates"),
    [(1.0, 4096), (4.0, 4096), (4.0, 64), (1.0, 1)],
    ids=["flat", "peaked", "peaked, few candidates", "whole row"],
)
def test_thresholds_keep_the_same_tokens(
    name: str, dtype: torch.dtype, sharpness: float, candidates: int, device: torch.device
) -> None:
    logits = (sharpness * make_logits(4, 5003, device)).to(dtype)
    top_k, top_p, min_p = FILTERS[name]
    temperature = torch.tensor([0.5, 1.0, 1.7, 0.0], device=device)
    arguments = (
        logits,
        temperature,
        torch.full((4,), top_k, dtype=torch.int32, device=device),
        torch.full((4,), top_p, device=device),
        torch.full((4,), min_p, device=device),
    )
    threshold = top_k_top_p.sampling_thresholds(*arguments, candidates=candidates)
    kept = logits >= threshold[:, None]
    expected = logits >= top_k_top_p.sampling_thresholds_reference(*arguments)[:, None]
    # Sums in another order may put the value at the edge of the nucleus on the other side.
    assert all(len(logits[i][kept[i] != expected[i]].unique()) <= 1 for i in range(4))
    assert kept[3].all(), "greedy rows are not filtered"
    assert kept[:3].any(dim=1).all()
    if name == "top-k" and dtype == torch.float32:  # the others have ties
        assert kept[:3].sum(1).tolist() == [3, 3, 3]


def test_top_p_is_the_smallest_nucleus(device: torch.device) -> None:
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]], device=device)
    one = torch.ones(1, device=device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    for top_p, kept in ((0.3, 1), (0.5, 2), (0.69, 2), (0.85, 3), (0.95, 4)):
        threshold = top_k_top_p.sampling_thresholds(
            probabilities.log(), one, none, one * top_p, one * 0.0
        )
        assert (probabilities.log() >= threshold).sum().item() == kept


def test_top_k_keeps_ties(device: torch.device) -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]], device=device)
    one = torch.ones(1, device=device)
    two = torch.full((1,), 2, dtype=torch.int32, device=device)
    threshold = top_k_top_p.sampling_thresholds(logits, one, two, one, one * 0.0)
    assert (logits >= threshold).sum().item() == 4


def test_filtered_tokens_are_never_drawn(device: torch.device) -> None:
    count = 64
    logits = make_logits(1, 300, device).expand(count, 300).contiguous()
    threshold = logits[0].sort(descending=True).values[4].expand(count).contiguous()
    tokens = sample.sample(
        logits,
        torch.full((count,), 5.0, device=device),
        torch.zeros(count, dtype=torch.int64, device=device),
        torch.arange(count, device=device),
        threshold,
    )
    drawn = set(tokens.tolist())
    assert drawn <= set(logits[0].topk(5).indices.tolist())
    assert len(drawn) == 5


@pytest.mark.parametrize("vocab", [1, 2048, 3001])
def test_penalize(vocab: int, device: torch.device) -> None:
    logits = make_logits(4, vocab, device)
    counts = torch.randint(0, 3, (7, vocab), dtype=torch.int32, device=device)
    counts[:, ::5] |= penalties.PROMPT_BIT
    rows = torch.tensor([6, 0, 3, 1], dtype=torch.int32, device=device)
    own = (
        torch.tensor([1.0, 1.3, 1.0, 2.0], device=device),
        torch.tensor([0.0, 0.5, 0.0, -1.0], device=device),
        torch.tensor([0.0, 0.0, 1.0, 0.7], device=device),
    )
    out, expected = logits.clone(), logits.double()
    penalties.penalize(out, rows, counts, *own)
    penalties.penalize_reference(expected, rows, counts, *(p.double() for p in own))
    assert_close(out, expected)
    assert torch.equal(out[0], logits[0]), "no penalty, no change"


def test_random_bits_are_a_fixed_function() -> None:
    """Golden values: a change would change every seeded answer."""
    seed = torch.tensor([0, 7, -1], dtype=torch.int64)
    position = torch.tensor([0, 3, 131072], dtype=torch.int64)
    bits = random.bits(seed, position, torch.tensor([0, 1, 128255]))
    assert bits.tolist() == GOLDEN_BITS


GOLDEN_BITS = [
    [1817238626, 3391126679, 339019486],
    [1929932817, 3247113019, 3868462941],
    [3350684382, 1327246001, 1728667973],
]


def test_uniform_numbers_stay_inside_the_open_interval() -> None:
    index = torch.arange(100_000)
    u = random.uniform(torch.tensor([3]), torch.tensor([4]), index)
    assert (u > 0).all()
    assert (u < 1).all()
    assert abs(u.mean().item() - 0.5) < 0.005
    assert abs(u.var().item() - 1 / 12) < 0.002
    assert (random.exponential(torch.tensor([3]), torch.tensor([4]), index) > 0).all()


@pytest.mark.parametrize("changed", ["seed", "position"])
def test_neighbouring_streams_are_uncorrelated(changed: str) -> None:
    count, vocab = 256, 4096
    zero, range_ = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    seed, position = (range_, zero) if changed == "seed" else (zero, range_)
    streams = random.uniform(seed, position, torch.arange(vocab))
    correlation = torch.corrcoef(streams).fill_diagonal_(0.0).abs().max().item()
    assert correlation < 6 / vocab**0.5

"""Appending what was drawn as long as it is what was proposed, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from radixgrove.kernels.accept import accept, accept_reference
from radixgrove.kernels.sample import History

DUMMY = 6


def make_history(device: torch.device) -> History:
    """Rows of 3, 4, … tokens, each followed by proposals 10, 11, 12, …"""
    lens = torch.arange(3, 4 + DUMMY, dtype=torch.int32)
    tokens = torch.zeros(DUMMY + 1, 24, dtype=torch.int32)
    for row, known in enumerate(lens.tolist()):
        tokens[row, known:] = torch.arange(10, 34 - known)
    return History(lens.to(device), tokens.to(device), DUMMY)


def integers(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize(
    ("drawn", "limit", "count"),
    [
        ([10, 11, 12, 99], 4, 4),  # all proposals hold, and one token comes after them
        ([10, 11, 50, 13], 4, 3),  # the token that differs is right, those behind it are not
        ([50, 11, 12, 13], 4, 1),
        ([10], 4, 1),
        ([10, 11, 12, 99], 1, 1),
        ([10, 11, 12, 99], 3, 3),
    ],
)
def test_a_row_gets_what_was_drawn_until_a_proposal_fails(
    drawn: list[int], limit: int, count: int
) -> None:
    cpu = torch.device("cpu")
    history = make_history(cpu)
    counts = accept_reference(
        integers(drawn, cpu),
        integers([0, len(drawn)], cpu),
        integers([limit], cpu),
        integers([2], cpu),
        history,
    )
    assert counts.tolist() == [count]
    assert history.lens.tolist() == [3, 4, 5 + count, 6, 7, 8, 9]
    assert history.tokens[2, 5 : 5 + count].tolist() == drawn[:count]


@pytest.mark.parametrize("bounds", [[4, 4, 4, 4], [1, 3, 4, 2], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("limited", [False, True])
def test_accept(bounds: list[int], limited: bool, device: torch.device) -> None:
    cpu = torch.device("cpu")
    ours, reference = make_history(device), make_history(cpu)
    rows = [4, 0, DUMMY, 3]
    limits = [1, 2, 4, 3] if limited else bounds
    ends = [sum(bounds[:i]) for i in range(len(bounds) + 1)]
    proposed = [10, 11, 12, 13]
    for wrong in (0, 1, 2, 3, 4):  # each row's drawn token that is not what was proposed
        drawn = [
            77 if place == (wrong + item) % 5 else proposed[place]
            for item, bound in enumerate(bounds)
            for place in range(bound)
        ]
        fields = (drawn, ends, limits, rows)
        counts = accept(*(integers(field, device) for field in fields), ours, most=max(bounds))
        expected = accept_reference(*(integers(field, cpu) for field in fields), reference)
        assert counts.tolist() == expected.tolist()
        assert ours.lens.tolist() == reference.lens.tolist()
        assert torch.equal(ours.tokens[:DUMMY].cpu(), reference.tokens[:DUMMY])
        for history in (ours, reference):  # the next round draws at the same places
            fresh = make_history(history.lens.device)
            history.lens.copy_(fresh.lens)
            history.tokens.copy_(fresh.tokens)

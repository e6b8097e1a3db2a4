"""A decode step's inputs from the request table, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from radixgrove.kernels import decode_inputs

DUMMY, PAGE = 9, 4


def make_table(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths 1 .. 19 (the dummy row's is 1), tokens and pages of ten rows."""
    lens = torch.arange(1, 2 * DUMMY + 3, 2, dtype=torch.int32, device=device)
    lens[DUMMY] = 1
    tokens = torch.randint(0, 1000, (10, 24), dtype=torch.int32, device=device)
    pages = torch.randperm(60, device=device).int().view(10, 6)
    return lens, tokens, pages


@pytest.mark.parametrize("width", [None, 8, 1500])
@pytest.mark.parametrize("chosen", [[], [0], [8, 3, DUMMY, DUMMY], [0, 1, 2] + [DUMMY] * 37])
def test_gather_rows(chosen: list[int], width: int | None, device: torch.device) -> None:
    lens, tokens, pages = make_table(device)
    index = torch.tensor(chosen, dtype=torch.int64, device=device)
    kinds = (torch.int32, torch.int32, torch.int64, torch.int32, torch.int64)
    out = [torch.full((len(chosen),), -1, dtype=kind, device=device) for kind in kinds]
    embedding = None
    if width is not None:
        embedding = torch.randn(1000, width, device=device)
        out.append(torch.full((len(chosen), width), float("nan"), device=device))
    expected = [tensor.clone() for tensor in out]
    if embedding is not None:
        out.insert(5, embedding)
        expected.insert(5, embedding)
    decode_inputs.gather_rows(index, lens, tokens, pages, PAGE, *out)
    decode_inputs.gather_rows_reference(index, lens, tokens, pages, PAGE, *expected)
    for ours, reference in zip(out, expected, strict=True):
        assert ours.tolist() == reference.tolist()


def test_gather_rows_of_two_tables(device: torch.device) -> None:
    """Rows have pages of their own in layers with a window."""
    lens, tokens, pages = make_table(device)
    window_pages = torch.randperm(60, device=device).int().view(10, 6)
    index = torch.tensor([8, 3, DUMMY, DUMMY], dtype=torch.int64, device=device)
    last = lens.long()[index] - 1
    kinds = (torch.int32, torch.int32, torch.int64, torch.int32, torch.int64)
    for gather in (decode_inputs.gather_rows, decode_inputs.gather_rows_reference):
        out = [torch.full((4,), -1, dtype=kind, device=device) for kind in kinds]
        slots = torch.full((4,), -1, dtype=torch.int64, device=device)
        gather(index, lens, tokens, pages, PAGE, *out, None, None, window_pages, slots)
        for table, places in ((pages, out[4]), (window_pages, slots)):
            expected = table[index, last // PAGE].long() * PAGE + last % PAGE
            assert places.tolist() == expected.tolist()

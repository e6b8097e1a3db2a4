"""Masks of tokens on logits: the kernel against its reference, which is against plain Python."""

from __future__ import annotations

import pytest
import torch

from radixgrove.kernels import bitmask
from tests.kernels.helpers import DTYPES


def words(flags: torch.Tensor) -> torch.Tensor:
    """[M, W * 32] bool as [M, W] int32."""
    weights = 1 << torch.arange(32, dtype=torch.int64)
    sums = (flags.view(len(flags), flags.shape[1] // 32, 32).long() * weights).sum(-1)
    return torch.where(sums >= 1 << 31, sums - (1 << 32), sums).int()


def expected(logits: torch.Tensor, flags: torch.Tensor, rows: list[int]) -> torch.Tensor:
    out = logits.clone()
    for flag, row in zip(flags, rows, strict=True):
        for token in range(out.shape[1]):
            if token >= len(flag) or not flag[token]:
                out[row, token] = float("-inf")
    return out


# More bits than tokens, fewer, and a vocabulary that ends within a word and beyond a block.
@pytest.mark.covering(2)
@DTYPES
@pytest.mark.parametrize(
    ("vocab", "bits"), [(31, 32), (96, 96), (100, 64), (45, 128), (4130, 4128)]
)
@pytest.mark.parametrize("rows", [[], [0], [2, 0], [1, 2, 4]])
def test_masked_tokens_have_no_probability(
    vocab: int, bits: int, rows: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Rows without a mask stay as they are, padded ones among them."""
    logits = torch.randn(5, vocab, device=device).to(dtype)
    flags = torch.rand(len(rows), bits) < 0.5
    masks, index = words(flags).to(device), torch.tensor(rows, dtype=torch.int64, device=device)
    exact = expected(logits.cpu(), flags, rows)
    reference = logits.clone()
    bitmask.mask_tokens_reference(reference, masks, index)
    assert torch.equal(reference.cpu(), exact)
    bitmask.mask_tokens(logits, masks, index)
    assert torch.equal(logits.cpu(), exact)


def test_rows_may_be_strided(device: torch.device) -> None:
    """Logits of known tokens are a view of those of the padded vocabulary."""
    whole = torch.randn(3, 80, device=device)
    kept = whole.clone()
    flags = torch.zeros(2, 64, dtype=torch.bool)
    flags[:, 7] = True
    bitmask.mask_tokens(whole[:, :50], words(flags).to(device), torch.tensor([2, 0], device=device))
    assert torch.equal(whole[:, 50:], kept[:, 50:])
    assert torch.equal(whole[1], kept[1])
    assert (whole[2, :50] > float("-inf")).nonzero().flatten().tolist() == [7]

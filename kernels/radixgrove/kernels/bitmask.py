# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Masks of tokens on logits, a bit a token."""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv, jit, tl


def mask_tokens_reference(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """See `mask_tokens`."""
    vocab = logits.shape[1]
    bits = (masks[:, :, None] >> torch.arange(32, device=masks.device)) & 1
    known = min(vocab, 32 * masks.shape[1])
    forbidden = torch.ones((len(rows), vocab), dtype=torch.bool, device=logits.device)
    forbidden[:, :known] = bits.flatten(1)[:, :known] == 0
    masked = logits.index_select(0, rows).masked_fill_(forbidden, float("-inf"))
    logits.index_copy_(0, rows, masked)


@jit(varying=("masks_ptr", "rows_ptr"))
def _mask_tokens_kernel(
    logits_ptr,
    masks_ptr,
    rows_ptr,
    vocab,
    words,
    logits_stride,
    masks_stride,
    BLOCK: tl.constexpr,
):
    """Nothing is read of the logits: -inf is written where a bit is 0."""
    item = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + item)
    word = column // 32
    bits = tl.load(masks_ptr + item * masks_stride + word, mask=word < words, other=0)
    forbidden = ((bits >> (column % 32)) & 1) == 0
    nothing = tl.full([BLOCK], float("-inf"), tl.float32)
    place = logits_ptr + row * logits_stride + column
    tl.store(place, nothing.to(logits_ptr.dtype.element_ty), mask=forbidden & (column < vocab))


def mask_tokens(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Set logits to -inf, in place, where a token may not come.

    Args:
        logits: [S, V], any floating dtype; rows may be strided, a row contiguous.
        masks: [M, W] int32: bit t % 32 of word t // 32 says whether token t may come. Tokens beyond
            the last word may not; bits beyond V say nothing.
        rows: [M] int64, which rows of the logits they are for, distinct.
    """
    vocab, block = logits.shape[1], 4096
    if len(rows):
        _mask_tokens_kernel[(len(rows), cdiv(vocab, block))](
            logits,
            masks,
            rows,
            vocab,
            masks.shape[1],
            logits.stride(0),
            masks.stride(0),
            BLOCK=block,
            num_warps=8,
        )

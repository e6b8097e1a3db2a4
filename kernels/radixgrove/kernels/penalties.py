# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Penalties on logits, before a draw."""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv, jit, tl

# `counts` holds, per row and token, how often the token was generated; this bit says that the
# prompt has it, which only the repetition penalty regards.
PROMPT_BIT = 1 << 30


def penalize_reference(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """See `penalize`."""
    seen = counts[rows.long()]
    generated = seen & (PROMPT_BIT - 1)
    scale = repetition[:, None]
    repeated = torch.where(logits > 0, logits / scale, logits * scale)
    logits.copy_(torch.where(seen != 0, repeated, logits))
    logits -= presence[:, None] * (generated > 0) + frequency[:, None] * generated


@jit(varying=("rows_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr"))
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    vocab,
    logits_stride,
    counts_stride,
    BLOCK: tl.constexpr,
    PROMPT: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < vocab
    repetition = tl.load(repetition_ptr + item)
    presence = tl.load(presence_ptr + item)
    frequency = tl.load(frequency_ptr + item)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        row = tl.load(rows_ptr + item).to(tl.int64)
        seen = tl.load(counts_ptr + row * counts_stride + column, mask=mask, other=0)
        logit = tl.load(logits_ptr + item * logits_stride + column, mask=mask, other=0.0)
        generated = (seen & (PROMPT - 1)).to(tl.float32)
        repeated = tl.where(logit > 0, logit / repetition, logit * repetition)
        logit = tl.where(seen != 0, repeated, logit)
        logit -= tl.where(generated > 0, presence, 0.0) + frequency * generated
        tl.store(logits_ptr + item * logits_stride + column, logit, mask=mask)


def penalize(
    logits: Tensor,
    rows: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Apply penalties in place: repetition (Keskar et al. 2019) to tokens of prompt and output,
    OpenAI's presence and frequency penalties to generated tokens.

    Args:
        logits: [B, V] float32; rows may be strided, a row contiguous.
        rows: [B] int32, rows of `counts`.
        counts: [max_rows, V] int32: times generated, plus `PROMPT_BIT` if the prompt has it; rows
            may be strided.
        repetition, presence, frequency: [B] float32; 1, 0 and 0 are off and cost nothing.
    """
    batch, vocab = logits.shape
    if batch:
        block = 2048
        _penalize_kernel[(batch, cdiv(vocab, block))](
            logits,
            rows,
            counts,
            repetition,
            presence,
            frequency,
            vocab,
            logits.stride(0),
            counts.stride(0),
            BLOCK=block,
            PROMPT=PROMPT_BIT,
            num_warps=8,
        )

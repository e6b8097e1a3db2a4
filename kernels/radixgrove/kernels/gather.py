# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Row gathers: token embeddings (a vocabulary shard too) and the positions that need logits."""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv, gdc_launch_dependents, gdc_wait, jit, pdl, tl


def embed_reference(weight: Tensor, token_ids: Tensor, first: int = 0) -> Tensor:
    """See `embed`."""
    local = token_ids.long() - first
    outside = (local < 0) | (local >= weight.shape[0])
    return weight[local.masked_fill(outside, 0)].masked_fill_(outside[:, None], 0)


@jit(varying=("index_ptr", "rows"))
def _gather_kernel(
    table_ptr, index_ptr, out_ptr, rows, width, first, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = tl.load(index_ptr + row).to(tl.int64) - first
    inside = (source >= 0) & (source < rows)
    values = tl.load(
        table_ptr + source * width + columns, mask=(columns < width) & inside, other=0.0
    )
    tl.store(out_ptr + row * width + columns, values, mask=columns < width)


def embed(weight: Tensor, token_ids: Tensor, first: int = 0) -> Tensor:
    """Rows of an embedding table; zeros for ids outside this shard.

    Also gathers the hidden states of the wanted logits (`weight` = hidden states).

    Args:
        weight: [rows, width] contiguous: ids `first` .. `first + rows - 1`.
        token_ids: [T] int32 or int64.

    Returns:
        [T, width], weight's dtype.
    """
    tokens, (rows, width) = token_ids.shape[0], weight.shape
    out = torch.empty((tokens, width), dtype=weight.dtype, device=weight.device)
    if tokens:
        block = 1024
        _gather_kernel[(tokens, cdiv(width, block))](
            weight, token_ids, out, rows, width, first, BLOCK=block, num_warps=4, **pdl(weight)
        )
    return out

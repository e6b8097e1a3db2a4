# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""A decode step's inputs, gathered from the request table.

That is a dozen tiny index operations, which as launches of their own would cost a small model a
tenth of its step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv, gdc_launch_dependents, gdc_wait, jit, pdl, tl


def gather_rows_reference(
    rows: Tensor,
    lens: Tensor,
    tokens: Tensor,
    pages: Tensor,
    page_size: int,
    rows32: Tensor,
    kv_lens: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    embedding: Tensor | None = None,
    hidden: Tensor | None = None,
    window_pages: Tensor | None = None,
    window_slots: Tensor | None = None,
) -> None:
    """See `gather_rows`."""
    known = lens.index_select(0, rows)
    last = known.long() - 1
    rows32.copy_(rows)
    kv_lens.copy_(known)
    positions.copy_(last)
    token_ids.copy_(tokens[rows, last])
    slots.copy_(pages[rows, last // page_size].long() * page_size + last % page_size)
    if window_pages is not None and window_slots is not None:
        places = window_pages[rows, last // page_size].long() * page_size + last % page_size
        window_slots.copy_(places)
    if embedding is not None and hidden is not None:
        torch.index_select(embedding, 0, token_ids, out=hidden)


@jit(
    varying=(
        "rows_ptr",
        "rows32_ptr",
        "kv_lens_ptr",
        "positions_ptr",
        "token_ids_ptr",
        "slots_ptr",
        "window_slots_ptr",
    )
)
def _gather_rows_kernel(
    rows_ptr,
    lens_ptr,
    tokens_ptr,
    pages_ptr,
    embedding_ptr,
    rows32_ptr,
    kv_lens_ptr,
    positions_ptr,
    token_ids_ptr,
    slots_ptr,
    hidden_ptr,
    window_pages_ptr,
    window_slots_ptr,
    tokens_stride,
    pages_stride,
    width,
    PAGE: tl.constexpr,
    EMBED: tl.constexpr,
    WINDOWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row and a part of its embedding; the first part's stores the rest."""
    item = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows_ptr + item)
    known = tl.load(lens_ptr + row)
    last = (known - 1).to(tl.int64)
    token = tl.load(tokens_ptr + row * tokens_stride + last)
    if part == 0:
        page = tl.load(pages_ptr + row * pages_stride + last // PAGE)
        tl.store(rows32_ptr + item, row.to(tl.int32))
        tl.store(kv_lens_ptr + item, known)
        tl.store(positions_ptr + item, last)
        tl.store(token_ids_ptr + item, token)
        tl.store(slots_ptr + item, page.to(tl.int64) * PAGE + last % PAGE)
        if WINDOWS:  # a table of the same form
            page = tl.load(window_pages_ptr + row * pages_stride + last // PAGE)
            tl.store(window_slots_ptr + item, page.to(tl.int64) * PAGE + last % PAGE)
    if EMBED:
        column = part * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        values = tl.load(embedding_ptr + token.to(tl.int64) * width + column, mask=inside)
        tl.store(hidden_ptr + item * width + column, values, mask=inside)


def gather_rows(
    rows: Tensor,
    lens: Tensor,
    tokens: Tensor,
    pages: Tensor,
    page_size: int,
    rows32: Tensor,
    kv_lens: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    slots: Tensor,
    embedding: Tensor | None = None,
    hidden: Tensor | None = None,
    window_pages: Tensor | None = None,
    window_slots: Tensor | None = None,
) -> None:
    """What a decode step reads of its rows: each one's last token, and where that is.

    Args:
        rows: [B] int64, rows of the table.
        lens: [max_rows] int32, known tokens of each row, at least 1.
        tokens: [max_rows, max_tokens] int32. pages: [max_rows, max_pages] int32.
        rows32, kv_lens: [B] int32, written: the rows, and their lengths.
        positions, slots: [B] int64, written: the last token's position and place in the pool.
        token_ids: [B] int32, written.
        embedding: [vocabulary, width] contiguous; with `hidden` only.
        hidden: [B, width] contiguous, written: the last token's embedding.
        window_pages: as `pages`, contiguous, of layers with a window; with `window_slots` only.
        window_slots: [B] int64, written: the last token's place in the pool of those.
    """
    count = rows.numel()
    if count:
        block = 1024
        width = 0 if embedding is None else embedding.shape[1]
        _gather_rows_kernel[(count, max(1, cdiv(width, block)))](
            rows,
            lens,
            tokens,
            pages,
            embedding,
            rows32,
            kv_lens,
            positions,
            token_ids,
            slots,
            hidden,
            window_pages,
            window_slots,
            tokens.stride(0),
            pages.stride(0),
            width,
            PAGE=page_size,
            EMBED=embedding is not None,
            WINDOWS=window_pages is not None,
            BLOCK=block,
            num_warps=4,
            **pdl(rows),
        )

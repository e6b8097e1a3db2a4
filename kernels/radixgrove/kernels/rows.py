# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The two ends of a decode step over the request table: its inputs gathered, its samples appended.

Each is a dozen tiny index operations, which as launches of their own would cost a small model a
tenth of its step.
"""

from __future__ import annotations

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
) -> None:
    """See `gather_rows`."""
    known = lens.index_select(0, rows)
    last = known.long() - 1
    rows32.copy_(rows)
    kv_lens.copy_(known)
    positions.copy_(last)
    token_ids.copy_(tokens[rows, last])
    slots.copy_(pages[rows, last // page_size].long() * page_size + last % page_size)


def append_samples_reference(
    rows: Tensor, sampled: Tensor, lens: Tensor, tokens: Tensor, dummy_row: int
) -> None:
    """See `append_samples`."""
    known = lens.index_select(0, rows)
    flat = rows * tokens.shape[1] + known
    tokens.view(-1).index_copy_(0, flat, sampled.int())
    lens.index_copy_(0, rows, known + 1)
    lens[dummy_row].fill_(1)


@jit(
    varying=(
        "rows_ptr",
        "rows32_ptr",
        "kv_lens_ptr",
        "positions_ptr",
        "token_ids_ptr",
        "slots_ptr",
        "count",
    )
)
def _gather_rows_kernel(
    rows_ptr,
    lens_ptr,
    tokens_ptr,
    pages_ptr,
    rows32_ptr,
    kv_lens_ptr,
    positions_ptr,
    token_ids_ptr,
    slots_ptr,
    count,
    tokens_stride,
    pages_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = item < count
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows_ptr + item, mask=mask, other=0)
    known = tl.load(lens_ptr + row, mask=mask, other=1)
    last = (known - 1).to(tl.int64)
    token = tl.load(tokens_ptr + row * tokens_stride + last, mask=mask, other=0)
    page = tl.load(pages_ptr + row * pages_stride + last // PAGE, mask=mask, other=0)
    tl.store(rows32_ptr + item, row.to(tl.int32), mask=mask)
    tl.store(kv_lens_ptr + item, known, mask=mask)
    tl.store(positions_ptr + item, last, mask=mask)
    tl.store(token_ids_ptr + item, token, mask=mask)
    tl.store(slots_ptr + item, page.to(tl.int64) * PAGE + last % PAGE, mask=mask)


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
) -> None:
    """What a decode step reads of its rows: each one's last token, and where that is.

    Args:
        rows: [B] int64, rows of the table.
        lens: [max_rows] int32, known tokens of each row, at least 1.
        tokens: [max_rows, max_tokens] int32. pages: [max_rows, max_pages] int32.
        rows32, kv_lens: [B] int32, written: the rows, and their lengths.
        positions, slots: [B] int64, written: the last token's position and place in the pool.
        token_ids: [B] int32, written.
    """
    count = rows.numel()
    if count:
        block = 64
        _gather_rows_kernel[(cdiv(count, block),)](
            rows,
            lens,
            tokens,
            pages,
            rows32,
            kv_lens,
            positions,
            token_ids,
            slots,
            count,
            tokens.stride(0),
            pages.stride(0),
            PAGE=page_size,
            BLOCK=block,
            num_warps=2,
            **pdl(rows),
        )


@jit(varying=("rows_ptr", "sampled_ptr", "count"))
def _append_samples_kernel(
    rows_ptr,
    sampled_ptr,
    lens_ptr,
    tokens_ptr,
    count,
    dummy_row,
    tokens_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(rows_ptr + item, mask=item < count, other=dummy_row)
    mask = (item < count) & (row != dummy_row)
    sampled = tl.load(sampled_ptr + item, mask=mask, other=0)
    known = tl.load(lens_ptr + row, mask=mask, other=0)
    tl.store(tokens_ptr + row * tokens_stride + known, sampled.to(tl.int32), mask=mask)
    tl.store(lens_ptr + row, known + 1, mask=mask)


def append_samples(
    rows: Tensor, sampled: Tensor, lens: Tensor, tokens: Tensor, dummy_row: int
) -> None:
    """Add each row's sample to its tokens and 1 to its length; the dummy row keeps its length of 1.

    Args:
        rows: [B] int64, distinct but for `dummy_row`. sampled: [B] int64.
        lens: [max_rows] int32. tokens: [max_rows, max_tokens] int32; both updated in place.
    """
    count = rows.numel()
    if count:
        block = 64
        _append_samples_kernel[(cdiv(count, block),)](
            rows,
            sampled,
            lens,
            tokens,
            count,
            dummy_row,
            tokens.stride(0),
            BLOCK=block,
            num_warps=2,
            **pdl(rows),
        )

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""How many of a row's drawn tokens stand, and where they go: a step of up to k tokens a row.

What was proposed to follow a row stands behind its tokens in the table. The token drawn at each
position assumed that the proposals before it hold: it stands as long as they do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels._triton import jit, next_power_of_2, tl
from radixgrove.kernels.sample import History


def accept_reference(
    drawn: Tensor, offsets: Tensor, limits: Tensor, rows: Tensor, history: History
) -> Tensor:
    """See `accept`."""
    counts = torch.zeros_like(rows)
    for item, row in enumerate(rows.tolist()):
        first, stop = int(offsets[item]), int(offsets[item + 1])
        known = int(history.lens[row])
        count = 1
        while (
            count < min(stop - first, int(limits[item]))
            and history.tokens[row, known + count - 1] == drawn[first + count - 1]
        ):
            count += 1
        counts[item] = count
        if row != history.dummy_row:
            history.tokens[row, known : known + count] = drawn[first : first + count].int()
            history.lens[row] = known + count
    return counts


@jit(
    varying=(
        "drawn_ptr",
        "offsets_ptr",
        "limits_ptr",
        "rows_ptr",
        "counts_ptr",
        "dummy_row",
    )
)
def _accept_kernel(
    drawn_ptr,
    offsets_ptr,
    limits_ptr,
    rows_ptr,
    counts_ptr,
    lens_ptr,
    tokens_ptr,
    tokens_stride,
    dummy_row,
    BLOCK: tl.constexpr,
):
    """One program: one row, its drawn tokens in one block."""
    item = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + item)
    first = tl.load(offsets_ptr + item)
    bound = tl.load(offsets_ptr + item + 1) - first
    bound = tl.minimum(bound, tl.load(limits_ptr + item))
    known = tl.load(lens_ptr + row)
    behind = tokens_ptr + row * tokens_stride + known
    lane = tl.arange(0, BLOCK)
    drawn = tl.load(drawn_ptr + first + lane, mask=lane < bound, other=-1)
    proposed = tl.load(behind + lane, mask=lane < bound - 1, other=-2)
    # The first token that differs from its proposal still stands: those before it held.
    count = tl.min(tl.where(drawn != proposed, lane, BLOCK), axis=0) + 1
    tl.store(counts_ptr + item, count.to(tl.int64))
    if row != dummy_row:
        tl.store(behind + lane, drawn.to(tl.int32), mask=lane < count)
        tl.store(lens_ptr + row, known + count)


def accept(
    drawn: Tensor,
    offsets: Tensor,
    limits: Tensor,
    rows: Tensor,
    history: History,
    *,
    most: int,
) -> Tensor:
    """Append to each row the first of its drawn tokens, as long as they are what was proposed.

    Args:
        drawn: [N] int64, the tokens drawn at consecutive positions of row after row.
        offsets: [S + 1] int64, where those of each row begin; at least one each.
        limits: [S] int64, at least 1: most tokens of each row.
        rows: [S] int64, distinct but for the dummy row.
        history: proposals are `tokens` at the places from `lens` on; both are brought up to date.
        most: no row has more tokens in `drawn`.

    Returns:
        [S] int64, how many tokens each row got, at least 1.
    """
    counts = torch.empty_like(rows)
    if len(rows):
        _accept_kernel[(len(rows),)](
            drawn,
            offsets,
            limits,
            rows,
            counts,
            history.lens,
            history.tokens,
            history.tokens.stride(0),
            history.dummy_row,
            BLOCK=next_power_of_2(most),
            num_warps=1,
        )
    return counts

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Samples of a pipeline's last stage on their way to the tables of the stages before, over peer
memory: the next step waits for them on the device, and no host has to have seen them.

A letter is one word: the step's mark, the row, and the token, so that it says by itself that it has
come, and nothing needs to be emptied.
"""

from __future__ import annotations

from torch import Tensor

from radixgrove.kernels._triton import gdc_launch_dependents, gdc_wait, jit, pdl, tl
from radixgrove.kernels.sample import History

MARKS = (1 << 19) - 1  # more than there may be steps between a letter and the next in its place


@jit(varying=("tokens_ptr", "rows_ptr", "first", "mark"))
def _post_kernel(
    tokens_ptr, rows_ptr, boxes_ptr, first, mark, BOXES: tl.constexpr, PDL: tl.constexpr
):
    """One program: one row, into every box."""
    item = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # Of an invalid sample the table has a token that exists; the request ends.
    token = tl.maximum(tl.load(tokens_ptr + item), 0)
    letter = (tl.cast(mark, tl.int64) << 44) | (tl.load(rows_ptr + item) << 24) | token
    for box in tl.static_range(BOXES):
        places = tl.load(boxes_ptr + box).to(tl.pointer_type(tl.int64))
        tl.store(places + first + item, letter)


@jit(varying=("first", "mark", "dummy_row"))
def _take_kernel(
    box_ptr, first, mark, lens_ptr, tokens_ptr, tokens_stride, dummy_row, PDL: tl.constexpr
):
    """One program: one letter, once it is there."""
    place = box_ptr + first + tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    letter = tl.atomic_add(place, 0, sem="relaxed", scope="sys")
    while (letter >> 44) != mark:
        letter = tl.atomic_add(place, 0, sem="relaxed", scope="sys")
    row = (letter >> 24) & 0xFFFFF
    if row != dummy_row:
        known = tl.load(lens_ptr + row)
        tl.store(tokens_ptr + row * tokens_stride + known, (letter & 0xFFFFFF).to(tl.int32))
        tl.store(lens_ptr + row, known + 1)


def post(tokens: Tensor, rows: Tensor, boxes: Tensor, first: int, mark: int) -> None:
    """Send each row's sample.

    Args:
        tokens, rows: [S] int64 contiguous; below 2 ** 24 and 2 ** 20.
        boxes: int64 on the device, addresses of the boxes as this rank maps them, of int64 each.
        first: place of the first letter. mark: of the step, at least 1 and at most `MARKS`.
    """
    if len(tokens):
        _post_kernel[(len(tokens),)](
            tokens, rows, boxes, first, mark, BOXES=len(boxes), num_warps=1, **pdl(tokens)
        )


def take(box: Tensor, count: int, first: int, mark: int, history: History) -> None:
    """Append `count` samples to their rows, which are distinct but for the dummy row; waits, on the
    device, until they have come. See `post`."""
    if count:
        _take_kernel[(count,)](
            box,
            first,
            mark,
            history.lens,
            history.tokens,
            history.tokens.stride(0),
            history.dummy_row,
            num_warps=1,
            **pdl(box),
        )

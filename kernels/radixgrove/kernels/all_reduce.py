# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""All-reduce over peer memory in one kernel with one meeting of the ranks.

Each rank writes its part into its buffer, tells the others, waits for their word, and sums all
parts in the order of the ranks ("one-shot"), so that every rank gets the same bits. Two halves of
the buffer take turns: before a half is written again, all have met once since it was read, so no
second meeting is needed.

With the RMSNorm after it in the same kernel, a program takes whole rows.
"""

from __future__ import annotations

from torch import Tensor

from radixgrove.kernels._triton import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    pdl,
    tl,
)
from radixgrove.kernels.norm import normed

# Of every call, whatever its size: each program counts its own meetings.
PROGRAMS = 128
_BLOCKS = (1024, 8192)  # elements a program takes at a time: smallest and largest


@jit
def _meet(flags_ptr, program, meeting, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Wait until the same program of every rank has come to this meeting, all it wrote visible.

    Word `program * SIZE + r` of a rank's flags is the last meeting that rank r announced to it.
    """
    tl.debug_barrier()
    heard = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + program * SIZE
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flags = tl.load(flags_ptr + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(flags + program * SIZE + RANK, meeting, sem="release", scope="sys")
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            # A peer may be one meeting ahead; the difference also survives the wrap-around.
            while tl.atomic_add(heard + peer, 0, sem="acquire", scope="sys") - meeting < 0:
                pass
    tl.debug_barrier()


@jit
def _side(buffers_ptr, peer, meeting, half, element: tl.constexpr):
    """The half of a rank's buffer whose turn it is."""
    buffer = tl.multiple_of(tl.load(buffers_ptr + peer).to(tl.pointer_type(element)), 16)
    return buffer + tl.multiple_of((meeting % 2).to(tl.int64) * half, 16)


@jit
def _total(
    x_ptr,
    buffers_ptr,
    meeting,
    half,
    places,
    inside,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The ranks' sum at `places` [BLOCK], in their order: float32."""
    element = x_ptr.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            part = tl.load(x_ptr + places, mask=inside, other=0.0)
        else:
            theirs = _side(buffers_ptr, peer, meeting, half, element)
            # Not from a cache: two calls ago the same place held other values.
            part = tl.load(theirs + places, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total


@jit
def _all_reduce_kernel(
    x_ptr,
    out_ptr,
    buffers_ptr,
    flags_ptr,
    meetings_ptr,
    count,
    half,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one slice of the tensor, exchanged with the same program of the peers."""
    program = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    meeting = tl.load(meetings_ptr + program) + 1
    chunk = tl.cdiv(tl.cdiv(count, tl.num_programs(0)), BLOCK) * BLOCK
    start = program * chunk
    stop = tl.minimum(start + chunk, count)
    if start < stop:
        lane = tl.arange(0, BLOCK)
        element = x_ptr.dtype.element_ty
        own = _side(buffers_ptr, RANK, meeting, half, element)
        for first in range(start, stop, BLOCK):
            inside = first + lane < stop
            tl.store(own + first + lane, tl.load(x_ptr + first + lane, mask=inside), mask=inside)
        _meet(flags_ptr, program, meeting, RANK, SIZE)
        for first in range(start, stop, BLOCK):
            places = first + lane
            inside = places < stop
            total = _total(x_ptr, buffers_ptr, meeting, half, places, inside, RANK, SIZE, BLOCK)
            tl.store(out_ptr + places, total.to(element), mask=inside)
    tl.store(meetings_ptr + program, meeting)


@jit
def _all_reduce_norm_kernel(
    x_ptr,
    total_ptr,
    out_ptr,
    weight_ptr,
    buffers_ptr,
    flags_ptr,
    meetings_ptr,
    rows,
    hidden,
    half,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: every PROGRAMS-th row, which it exchanges with the same program of the peers."""
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    inside = lane < hidden
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    meeting = tl.load(meetings_ptr + program) + 1
    if program < rows:
        element = x_ptr.dtype.element_ty
        own = _side(buffers_ptr, RANK, meeting, half, element)
        for row in range(program, rows, tl.num_programs(0)):
            places = row * hidden + lane
            tl.store(own + places, tl.load(x_ptr + places, mask=inside), mask=inside)
        _meet(flags_ptr, program, meeting, RANK, SIZE)
        for row in range(program, rows, tl.num_programs(0)):
            places = row * hidden + lane
            total = _total(x_ptr, buffers_ptr, meeting, half, places, inside, RANK, SIZE, BLOCK).to(
                element
            )
            tl.store(total_ptr + places, total, mask=inside)
            # The rounded sum is normalised: it is what the residual stream carries on.
            y = normed(total.to(tl.float32), weight, hidden, eps)
            tl.store(out_ptr + places, y.to(element), mask=inside)
    tl.store(meetings_ptr + program, meeting)


def all_reduce(
    x: Tensor, out: Tensor, buffers: Tensor, flags: Tensor, meetings: Tensor, half: int, rank: int
) -> None:
    """The sum of all ranks' `x` into `out`, the same bits on every rank.

    Every rank calls it with the same sizes in the same order, from one stream; captured or not.

    Args:
        x, out: contiguous, one dtype and size, 16-byte aligned, at most `half` elements; not the
            same memory.
        buffers: [size] int64 on the device, addresses of the ranks' buffers of 2 * `half` elements
            of x's dtype as this rank maps them. flags: the same of int32 [PROGRAMS * size], zero
            before the first call.
        meetings: [PROGRAMS] int32 of this rank, zero before the first call.
    """
    count = x.numel()
    block = min(max(next_power_of_2(cdiv(count, PROGRAMS)), _BLOCKS[0]), _BLOCKS[1])
    _all_reduce_kernel[(PROGRAMS,)](
        x,
        out,
        buffers,
        flags,
        meetings,
        count,
        half,
        RANK=rank,
        SIZE=buffers.shape[0],
        BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
        **pdl(x),
    )


def all_reduce_norm(
    x: Tensor,
    total: Tensor,
    out: Tensor,
    weight: Tensor,
    eps: float,
    buffers: Tensor,
    flags: Tensor,
    meetings: Tensor,
    half: int,
    rank: int,
) -> None:
    """As `all_reduce` into `total`, and the RMSNorm of that into `out`.

    Args:
        x, total, out: [T, hidden] contiguous, one dtype; three tensors.
        weight: [hidden], of the norm. eps: added to the mean square.
    """
    rows, hidden = x.shape
    block = next_power_of_2(hidden)
    _all_reduce_norm_kernel[(PROGRAMS,)](
        x,
        total,
        out,
        weight,
        buffers,
        flags,
        meetings,
        rows,
        hidden,
        half,
        eps,
        RANK=rank,
        SIZE=buffers.shape[0],
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
        **pdl(x),
    )

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""All-reduce over peer memory in one kernel, without a flag or a fence.

Each rank writes its part into a buffer of every other rank and waits until theirs have come into
its own; then it sums all parts in the order of the ranks ("one-shot"), so that every rank gets the
same bits. A place to which nothing has come holds a negative zero, which is never sent: so each
value says by itself that it is there (as in Lamport's queue of one reader and one writer), and what
crosses the links does so once, one way.

What has been read is emptied at once. Each program has two sides of its part of the buffer, which
take turns: a peer writes to a side again only after it has got what was sent from here after that
side had been emptied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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

MAX_PROGRAMS = 1024
_SMALLEST_ROOM = 1024
_PREFERRED_PROGRAMS = 256  # of sums without a norm
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class Exchange:
    """Where the programs of one rank meet those of the others.

    Attributes:
        buffers: [size] int64 on the device, addresses of the ranks' buffers as this rank maps them:
            each has `elements` of one dtype and is `cleared` before the first call.
        turns: [programs] int32 of this rank, zero before the first call.
        room: most elements that a program sends.
    """

    buffers: Tensor
    turns: Tensor
    room: int
    rank: int

    @property
    def programs(self) -> int:
        return len(self.turns)

    @staticmethod
    def room_for(hidden: int) -> int:
        """What a program needs for a row."""
        return max(_SMALLEST_ROOM, next_power_of_2(hidden))

    @staticmethod
    def elements(programs: int, room: int, size: int) -> int:
        """Of each rank's buffer."""
        return programs * 2 * size * room


def cleared(buffer: Tensor) -> Tensor:
    """The buffer with nothing in it."""
    return buffer.fill_(-0.0)


@jit
def _places(
    buffers_ptr, owner, sender, program, turn, room, word: tl.constexpr, SIZE: tl.constexpr
):
    """Where a rank's buffer has room for what this program of `sender` sends in such a turn."""
    buffer = tl.multiple_of(tl.load(buffers_ptr + owner).to(tl.pointer_type(word)), 16)
    part = (program * 2 + turn) * SIZE + sender
    return buffer + tl.multiple_of(part.to(tl.int64) * room, 16)


@jit
def _sum_over_ranks(
    bits,
    lane,
    inside,
    buffers_ptr,
    turns_ptr,
    room,
    kind: tl.constexpr,
    EMPTY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The sum of the ranks' `bits`, as numbers of `kind`, in their order: float32."""
    program = tl.program_id(0)
    turn = tl.load(turns_ptr + program)
    word = bits.dtype
    sent = tl.where(bits == EMPTY, 0, bits).to(word)
    for step in tl.static_range(1, SIZE):
        peer = (RANK + step) % SIZE
        theirs = _places(buffers_ptr, peer, RANK, program, turn, room, word, SIZE)
        tl.store(theirs + lane, sent, mask=inside)
    total = tl.zeros(bits.shape, dtype=tl.float32)
    for sender in tl.static_range(SIZE):
        part = sent
        if sender != RANK:
            own = _places(buffers_ptr, RANK, sender, program, turn, room, word, SIZE) + lane
            part = tl.load(own, mask=inside, other=0, volatile=True)
            while tl.max((part == EMPTY).to(tl.int32), axis=0) > 0:
                part = tl.load(own, mask=inside, other=0, volatile=True)
            tl.store(own, tl.full(bits.shape, EMPTY, dtype=word), mask=inside)
        total += part.to(kind, bitcast=True).to(tl.float32)
    tl.store(turns_ptr + program, 1 - turn)
    return total


@jit
def _all_reduce_kernel(
    x_ptr,
    out_ptr,
    buffers_ptr,
    turns_ptr,
    count,
    room,
    EMPTY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a block of the tensor, exchanged with the same program of the peers."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    bits = tl.load(x_ptr + places, mask=inside, other=0)
    lane = tl.arange(0, BLOCK)
    total = _sum_over_ranks(
        bits, lane, inside, buffers_ptr, turns_ptr, room, kind, EMPTY, RANK, SIZE
    )
    tl.store(out_ptr + places, total.to(kind), mask=inside)


@jit
def _all_reduce_norm_kernel(
    x_ptr,
    total_ptr,
    out_ptr,
    weight_ptr,
    buffers_ptr,
    turns_ptr,
    hidden,
    room,
    eps,
    EMPTY: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a row, exchanged with the same program of the peers."""
    lane = tl.arange(0, BLOCK)
    inside = lane < hidden
    places = tl.program_id(0) * hidden + lane
    kind: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    bits = tl.load(x_ptr + places, mask=inside, other=0)
    total = _sum_over_ranks(
        bits, lane, inside, buffers_ptr, turns_ptr, room, kind, EMPTY, RANK, SIZE
    ).to(kind)
    tl.store(total_ptr + places, total, mask=inside)
    # The rounded sum is normalised: it is what the residual stream carries on.
    y = normed(total.to(tl.float32), weight, hidden, eps)
    tl.store(out_ptr + places, y.to(kind), mask=inside)


def _words(x: Tensor) -> tuple[Tensor, int]:
    """The bits of a tensor as integers, and those of a negative zero."""
    return x.view(_INTEGERS[x.itemsize]), -(1 << (8 * x.itemsize - 1))


def all_reduce(x: Tensor, out: Tensor, exchange: Exchange) -> None:
    """The sum of all ranks' `x` into `out`, the same bits on every rank.

    Every rank calls it with the same sizes in the same order, from one stream; captured or not.

    Args:
        x, out: contiguous, one dtype and size, 16-byte aligned, at most as many elements as the
            programs have room for.
    """
    count = x.numel()
    each = cdiv(count, min(exchange.programs, _PREFERRED_PROGRAMS))
    block = min(exchange.room, max(_SMALLEST_ROOM, next_power_of_2(each)))
    bits, empty = _words(x)
    _all_reduce_kernel[(cdiv(count, block),)](
        bits,
        out,
        exchange.buffers,
        exchange.turns,
        count,
        exchange.room,
        EMPTY=empty,
        RANK=exchange.rank,
        SIZE=len(exchange.buffers),
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
    exchange: Exchange,
    warps: int | None = None,
) -> None:
    """As `all_reduce` into `total`, and the RMSNorm of that into `out`.

    Args:
        x, total, out: [T, hidden] contiguous, one dtype; at most as many rows as there are
            programs, which have room for a row each.
        weight: [hidden], of the norm. eps: added to the mean square.
    """
    rows, hidden = x.shape
    block = exchange.room
    bits, empty = _words(x)
    _all_reduce_norm_kernel[(rows,)](
        bits,
        total,
        out,
        weight,
        exchange.buffers,
        exchange.turns,
        hidden,
        exchange.room,
        eps,
        EMPTY=empty,
        RANK=exchange.rank,
        SIZE=len(exchange.buffers),
        BLOCK=block,
        num_warps=warps or min(16, max(4, block // 512)),
        **pdl(x),
    )

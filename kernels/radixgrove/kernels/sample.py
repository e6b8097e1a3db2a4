# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""From logits to tokens by the exponential race, and the samples into the request table.

Every row is drawn alone, with the numbers of `random.py`, so that its token does not depend on the
batch around it. Parameters may stand in tables of all rows, of which a batch names some: no kernel
has to gather them.

Ranks that share the vocabulary each draw from their own part and tell the others the best of it,
eight bytes a row, so that no rank needs all logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.kernels import random
from radixgrove.kernels._triton import cdiv, gdc_launch_dependents, gdc_wait, jit, pdl, tl

_MAX_PARTS = 64  # pieces of a row that are searched side by side


@dataclass(frozen=True, slots=True)
class VocabShard:
    """A rank's part of the vocabulary, and where ranks tell each other their winners.

    Attributes:
        first: token of the part.
        buffers: [size] int64 on the device, addresses of the ranks' buffers as this rank maps them:
            each is [rows, 2, size] int64, zero before the first draw.
        turns: [rows] int32 of this rank, zero before the first draw: which of the two sides of its
            place in the buffer a row of a batch is at, see `all_reduce`.
    """

    first: int
    buffers: Tensor
    turns: Tensor
    rank: int


@dataclass(frozen=True, slots=True)
class History:
    """Where the tokens of each row stand, and how many; the dummy row's do not change."""

    lens: Tensor  # [R] int32
    tokens: Tensor  # [R, most tokens] int32
    dummy_row: int


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    thresholds: Tensor | None = None,
) -> Tensor:
    """See `sample`."""
    wide = logits.float()
    index = torch.arange(logits.shape[1], device=logits.device)
    race = random.exponential(seed, position, index).log_()
    scores = wide / torch.where(temperature > 0, temperature, 1.0)[:, None]
    scores = torch.where(temperature[:, None] > 0, scores - race, scores)
    if thresholds is not None:
        scores.masked_fill_(wide < thresholds[:, None], float("-inf"))
    return scores.argmax(-1)


@jit
def _mix(x):
    """`random.mix` on uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@jit
def _keys(seed, position):
    """`random.keys` of int64 scalars: two uint32."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    step = position.to(tl.uint32) * 0x9E3779B9
    first = _mix(_mix(low ^ step) ^ high)
    second = _mix(first ^ _mix((high ^ 0x85EBCA6B) + step) ^ low)
    return first, second


@jit
def _log2(x, FAST: tl.constexpr):
    """Base-2 logarithm of a normal float; FAST is the hardware's, 2^-22 off, and not in the
    interpreter."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@jit
def _log2_exponential(first, second, index, FAST: tl.constexpr):
    """Base-2 logarithm of `random.exponential` by the words of `_keys`; index int32 block."""
    x = index.to(tl.uint32) ^ first
    x ^= x >> 16
    x = x * 0x7FEB352D + second
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    u = tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    # log1p by its series where 1 - u would lose the small values, which win the race.
    small = u * (1.0 + u * (0.5 + u * (0.3333333432674408 + u * 0.25)))
    exponential = tl.where(u < 0.01, small, _log2(1.0 - u, FAST) * -0.6931471805599453)
    return _log2(exponential, FAST)


@jit(
    varying=(
        "rows_ptr",
        "temperature_ptr",
        "seed_ptr",
        "position_ptr",
        "thresholds_ptr",
        "index_ptr",
    )
)
def _race_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    thresholds_ptr,
    best_ptr,
    index_ptr,
    vocab,
    first_token,
    logits_stride,
    temperature_stride,
    seed_stride,
    position_stride,
    chunk,
    ROWS: tl.constexpr,
    GREEDY: tl.constexpr,
    FILTER: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the best score of one chunk of a row's vocabulary.

    Scores are `(logit / temperature - log(exponential)) / log(2)`, plain logits when greedy.
    """
    item = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    start = part * chunk
    stop = tl.minimum(start + chunk, vocab)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    best_index = start + lane
    logits_ptr += item * logits_stride
    if not GREEDY:
        row = tl.load(rows_ptr + item).to(tl.int64) if ROWS else item
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        scale = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
        seed = tl.load(seed_ptr + row * seed_stride)
        first_key, second_key = _keys(seed, tl.load(position_ptr + row * position_stride))
        threshold = tl.load(thresholds_ptr + item) if FILTER else float("-inf")
    for first in range(start, stop, BLOCK):
        column = first + lane
        x = tl.load(logits_ptr + column, mask=column < stop, other=float("-inf")).to(tl.float32)
        score = x
        if not GREEDY:
            if temperature > 0:
                token = first_token + column
                score = x * scale - _log2_exponential(first_key, second_key, token, FAST)
            if FILTER:
                score = tl.where(x < threshold, float("-inf"), score)
        better = score > best
        best = tl.where(better, score, best)
        best_index = tl.where(better, column, best_index)
    winner = tl.max(best, axis=0)
    # Of equal scores the lowest index wins, as in torch.argmax; never one past the vocabulary.
    index = tl.min(tl.where(best == winner, best_index, vocab - 1), axis=0)
    tl.store(best_ptr + item * tl.num_programs(1) + part, winner)
    tl.store(index_ptr + item * tl.num_programs(1) + part, first_token + index)


@jit
def _best_of_ranks(
    winner, token, buffers_ptr, turns_ptr, item, RANK: tl.constexpr, SIZE: tl.constexpr
):
    """Score and token of the best of all ranks, of equal ones the lowest token.

    One word carries both, and says that it is there: it is never zero, which takes its place then.
    """
    turn = tl.load(turns_ptr + item)
    place = (item * 2 + turn) * SIZE
    score_bits = winner.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    own = ((token + 1).to(tl.int64) << 32) | score_bits
    for step in tl.static_range(1, SIZE):
        theirs = tl.load(buffers_ptr + (RANK + step) % SIZE).to(tl.pointer_type(tl.int64))
        tl.store(theirs + place + RANK, own)
    heard = tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.int64)) + place
    for sender in tl.static_range(SIZE):
        word = own
        if sender != RANK:
            word = tl.atomic_xchg(heard + sender, 0, sem="relaxed", scope="sys")
            while word == 0:
                word = tl.atomic_xchg(heard + sender, 0, sem="relaxed", scope="sys")
        score = (word & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        index = (word >> 32).to(tl.int32) - 1
        if sender == 0:
            winner = score
            token = index
        else:  # later ranks have higher tokens
            token = tl.where(score > winner, index, token)
            winner = tl.maximum(score, winner)
    tl.store(turns_ptr + item, 1 - turn)
    return winner, token


@jit(varying=("index_ptr", "rows_ptr", "out_ptr", "parts", "dummy_row"))
def _race_winner_kernel(
    best_ptr,
    index_ptr,
    out_ptr,
    rows_ptr,
    lens_ptr,
    tokens_ptr,
    buffers_ptr,
    turns_ptr,
    last_token,
    parts,
    tokens_stride,
    dummy_row,
    APPEND: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the token of one row, into `out` and behind the row's tokens."""
    item = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    mask = lane < parts
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    best = tl.load(best_ptr + item * parts + lane, mask=mask, other=float("-inf"))
    index = tl.load(index_ptr + item * parts + lane, mask=mask, other=last_token)
    winner = tl.max(best, axis=0)
    token = tl.min(tl.where(best == winner, index, last_token), axis=0)
    if SIZE > 1:
        winner, token = _best_of_ranks(winner, token, buffers_ptr, turns_ptr, item, RANK, SIZE)
    # Nothing exceeds -inf where the logits are NaN. The row goes on with a token that exists.
    tl.store(out_ptr + item, tl.where(winner > float("-inf"), token, -1))
    if APPEND:
        row = tl.load(rows_ptr + item).to(tl.int64)
        if row != dummy_row:
            known = tl.load(lens_ptr + row)
            tl.store(tokens_ptr + row * tokens_stride + known, token)
            tl.store(lens_ptr + row, known + 1)


def argmax(
    logits: Tensor,
    *,
    rows: Tensor | None = None,
    history: History | None = None,
    out: Tensor | None = None,
    shard: VocabShard | None = None,
) -> Tensor:
    """The most probable token of each row [B, V], [B] int64: `sample` at temperature 0.

    -1 for a row of NaN alone.
    """
    out = _allocate(logits, out)
    if len(out):
        best, index = _race(logits, None, None, None, None, None, shard)
        _finish(best, index, out, logits.shape[1], rows, history, shard)
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    thresholds: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    history: History | None = None,
    out: Tensor | None = None,
    shard: VocabShard | None = None,
) -> Tensor:
    """Draw one token a row: `argmax(logits / temperature - log(exponential))`, greedy at 0.

    Args:
        logits: [B, V], float32, bfloat16 or float16; rows may be strided, a row contiguous.
        temperature: [B] float32. seed: [B] int64. position: [B] int32 or int64, the position the
            token will have; the random numbers are those of `random.exponential`.
        thresholds: [B] float32 from `sampling_thresholds`; smaller logits cannot win.
        rows: [B] int64, distinct but for the dummy row; with it parameters but `thresholds` are
            [R], and row i of the batch takes those of `rows[i]`. They may be strided.
        history: where each token is appended, for `rows`; `position` may be its `lens`.
        out: [B] int64 contiguous, where to write; allocated when None.
        shard: what part of the vocabulary `logits` are of; every rank calls it with as many rows,
            in the same order, from one stream. None: all of it.

    Returns:
        [B] int64; -1 for a row of NaN alone.
    """
    out = _allocate(logits, out)
    if len(out):
        best, index = _race(logits, temperature, seed, position, thresholds, rows, shard)
        _finish(best, index, out, logits.shape[1], rows, history, shard)
    return out


def _allocate(logits: Tensor, out: Tensor | None) -> Tensor:
    if out is not None:
        return out
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


def _has_fast_logarithm(x: Tensor) -> bool:
    return x.is_cuda  # the interpreter has no inline assembly


def _race(
    logits: Tensor,
    temperature: Tensor | None,
    seed: Tensor | None,
    position: Tensor | None,
    thresholds: Tensor | None,
    rows: Tensor | None,
    shard: VocabShard | None,
) -> tuple[Tensor, Tensor]:
    """Scores and tokens, [B, parts], of the winners of each part of the vocabulary."""
    batch, vocab = logits.shape
    block = 1024
    # Enough programs to fill the device twice, so that none of its parts waits for a last one.
    parts = max(1, min(_MAX_PARTS, cdiv(2048, batch), cdiv(vocab, block)))
    chunk = cdiv(cdiv(vocab, parts), block) * block
    parts = cdiv(vocab, chunk)
    best = torch.empty((batch, parts), dtype=torch.float32, device=logits.device)
    index = torch.empty((batch, parts), dtype=torch.int32, device=logits.device)
    _race_kernel[(batch, parts)](
        logits,
        rows,
        temperature,
        seed,
        position,
        thresholds,
        best,
        index,
        vocab,
        shard.first if shard is not None else 0,
        logits.stride(0),
        temperature.stride(0) if temperature is not None else 0,
        seed.stride(0) if seed is not None else 0,
        position.stride(0) if position is not None else 0,
        chunk,
        ROWS=rows is not None,
        GREEDY=temperature is None,
        FILTER=thresholds is not None,
        FAST=_has_fast_logarithm(logits),
        BLOCK=block,
        num_warps=4,
        **pdl(logits),
    )
    return best, index


def _finish(
    best: Tensor,
    index: Tensor,
    out: Tensor,
    vocab: int,
    rows: Tensor | None,
    history: History | None,
    shard: VocabShard | None,
) -> None:
    batch, parts = best.shape
    first = shard.first if shard is not None else 0
    _race_winner_kernel[(batch,)](
        best,
        index,
        out,
        rows,
        history.lens if history is not None else None,
        history.tokens if history is not None else None,
        shard.buffers if shard is not None else None,
        shard.turns if shard is not None else None,
        first + vocab - 1,
        parts,
        history.tokens.stride(0) if history is not None else 0,
        history.dummy_row if history is not None else 0,
        APPEND=history is not None,
        RANK=shard.rank if shard is not None else 0,
        SIZE=len(shard.buffers) if shard is not None else 1,
        BLOCK=_MAX_PARTS,
        num_warps=1,
        **pdl(best),
    )

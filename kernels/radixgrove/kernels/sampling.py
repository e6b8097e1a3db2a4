# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""From logits to tokens without a sort: penalties, filters as thresholds, the exponential race.

Every function treats each row alone and reduces in a fixed order, so that a row's token does not
depend on the batch around it. Filters keep ties: all logits equal to the k-th best survive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels import random
from radixgrove.kernels._triton import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl,
    tl,
)

# `counts` holds, per row and token, how often the token was generated; this bit says that the
# prompt has it, which only the repetition penalty regards.
PROMPT_BIT = 1 << 30
_MAX_PARTS = 64  # pieces of a row that are searched side by side
# Low bits of a float32 that are zero when its value came from a smaller type (normal numbers).
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


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


def sampling_thresholds_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """See `sampling_thresholds`."""
    logits = logits.float()
    best = logits.amax(-1)
    scale = 1.0 / temperature.clamp(min=1e-6)
    threshold = best + torch.log(min_p) / scale
    ordered = logits.sort(dim=-1, descending=True).values
    k = torch.where(top_k > 0, top_k.clamp(max=logits.shape[1]), logits.shape[1]).long()
    threshold = torch.maximum(threshold, ordered.gather(1, k[:, None] - 1).squeeze(1))
    # top-p applies to what top-k left; the nucleus is the shortest prefix that reaches p.
    mass = torch.exp((ordered - best[:, None]) * scale[:, None])
    mass *= torch.arange(logits.shape[1], device=logits.device) < k[:, None]
    reached = (mass.cumsum(-1) >= top_p[:, None] * mass.sum(-1, keepdim=True)).int().argmax(-1)
    nucleus = ordered.gather(1, reached[:, None]).squeeze(1)
    threshold = torch.where(top_p < 1.0, torch.maximum(threshold, nucleus), threshold)
    return torch.where(temperature > 0, threshold, float("-inf"))


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
def _penalize_kernel(
    logits_ptr,
    rows_ptr,
    counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    vocab,
    logits_stride,
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
        seen = tl.load(counts_ptr + row * vocab + column, mask=mask, other=0)
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
        counts: [max_rows, V] int32: times generated, plus `PROMPT_BIT` if the prompt has it.
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
            BLOCK=block,
            PROMPT=PROMPT_BIT,
            num_warps=8,
        )


@jit
def _ordered(x):
    """float32 -> int32 that sorts alike (two's complement of the sign-magnitude bits)."""
    raw = x.to(tl.int32, bitcast=True)
    return raw ^ ((raw >> 31) & 0x7FFFFFFF)


@jit
def _unordered(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def _weight(x, best, scale, COUNT: tl.constexpr):
    return tl.full(x.shape, 1.0, dtype=tl.float32) if COUNT else tl.exp((x - best) * scale)


@jit
def _mass_at_least(logits_ptr, vocab, pivot, best, scale, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Over logits whose ordered key is >= pivot: how many (COUNT), or their summed weight."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, vocab, BLOCK):
        column = first + lane
        x = tl.load(logits_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        keep = (_ordered(x) >= pivot) & (column < vocab)
        total += tl.where(keep, _weight(x, best, scale, COUNT), 0.0)
    return tl.sum(total, axis=0)


@jit
def _largest_pivot(
    logits_ptr,
    vocab,
    best,
    scale,
    low,
    target,
    COUNT: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest key in [low, key(best)] whose `_mass_at_least` reaches `target`.

    A pass over the row tries three pivots, which leaves a quarter of the range. Keys of a type with
    fewer bits than float32 are multiples of `1 << SHIFT`, and only those are tried.
    """
    high = (_ordered(best) >> SHIFT).to(tl.int64)
    low = (low >> SHIFT).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    while low < high:
        step = (high - low + 3) // 4
        one = low + step
        two = tl.minimum(one + step, high)
        three = tl.minimum(two + step, high)
        pivot_one = (one << SHIFT).to(tl.int32)
        pivot_two = (two << SHIFT).to(tl.int32)
        pivot_three = (three << SHIFT).to(tl.int32)
        above_one = tl.zeros((BLOCK,), dtype=tl.float32)
        above_two = tl.zeros((BLOCK,), dtype=tl.float32)
        above_three = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in range(0, vocab, BLOCK):
            column = first + lane
            inside = column < vocab
            x = tl.load(logits_ptr + column, mask=inside, other=float("-inf")).to(tl.float32)
            key = _ordered(x)
            weight = tl.where(inside, _weight(x, best, scale, COUNT), 0.0)
            above_one += tl.where(key >= pivot_one, weight, 0.0)
            above_two += tl.where(key >= pivot_two, weight, 0.0)
            above_three += tl.where(key >= pivot_three, weight, 0.0)
        if tl.sum(above_three, axis=0) >= target:
            low = three
        elif tl.sum(above_two, axis=0) >= target:
            low = two
            high = three - 1
        elif tl.sum(above_one, axis=0) >= target:
            low = one
            high = two - 1
        else:
            high = one - 1
    return (low << SHIFT).to(tl.int32)


@jit
def _surviving_key(
    source_ptr,
    length,
    best,
    scale,
    key,
    k,
    top_p,
    total,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Smallest ordered key that survives top-k (off at 0) and then top-p, of values that hold all
    survivors. `key` is a bound below; `total` the weight of all tokens."""
    if k > 0:
        key = _largest_pivot(
            source_ptr, length, best, scale, key, k, COUNT=True, SHIFT=SHIFT, BLOCK=BLOCK
        )
        total = _mass_at_least(source_ptr, length, key, best, scale, COUNT=False, BLOCK=BLOCK)
    if top_p < 1.0:
        key = _largest_pivot(
            source_ptr,
            length,
            best,
            scale,
            key,
            top_p * total,
            COUNT=False,
            SHIFT=SHIFT,
            BLOCK=BLOCK,
        )
    return key


@jit
def _thresholds_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    candidates_ptr,
    vocab,
    logits_stride,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """One program: one row.

    A search reads its values some eight times. It does so over the few candidates within some
    distance of the best where they hold all survivors for certain, over the whole row otherwise.
    """
    item = tl.program_id(0).to(tl.int64)
    logits_ptr += item * logits_stride
    candidates_ptr += item * CANDIDATES
    temperature = tl.load(temperature_ptr + item)
    top_k = tl.load(top_k_ptr + item)
    top_p = tl.load(top_p_ptr + item)
    min_p = tl.load(min_p_ptr + item)
    k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0).to(tl.float32)
    threshold = float("-inf")
    if (temperature > 0) & ((k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        scale = 1.0 / temperature
        lane = tl.arange(0, BLOCK)
        running = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        lowest = tl.full((BLOCK,), float("inf"), dtype=tl.float32)
        for first in range(0, vocab, BLOCK):
            column = first + lane
            x = tl.load(logits_ptr + column, mask=column < vocab, other=float("-inf"))
            x = x.to(tl.float32)
            running = tl.maximum(running, x)
            lowest = tl.minimum(lowest, tl.where(column < vocab, x, float("inf")))
        best = tl.max(running, axis=0)
        key = _ordered(tl.min(lowest, axis=0))
        if (k > 0) | (top_p < 1.0):
            # Distances from the best, in nats: candidates are what lies within the shortest that
            # reaches k tokens or (with a margin for the order of sums) p of the whole weight. Top-p
            # after top-k is of what top-k left.
            within = 5.0 + 5.0 * tl.arange(0, 4).to(tl.float32)
            counts = tl.zeros((4, BLOCK), dtype=tl.float32)
            masses = tl.zeros((4, BLOCK), dtype=tl.float32)
            sums = tl.zeros((BLOCK,), dtype=tl.float32)
            for first in range(0, vocab, BLOCK):
                column = first + lane
                x = tl.load(logits_ptr + column, mask=column < vocab, other=float("-inf"))
                distance = (best - x.to(tl.float32)) * scale
                weight = tl.exp(-distance)
                near = distance[None, :] <= within[:, None]
                counts += tl.where(near, 1.0, 0.0)
                masses += tl.where(near, weight[None, :], 0.0)
                sums += weight
            total = tl.sum(sums, axis=0)
            count = tl.sum(counts, axis=1)
            mass = tl.where((top_p < 1.0) & (k == 0), 1.001 * top_p * total, 0.0)
            enough = (count >= k) & (count <= CANDIDATES) & (tl.sum(masses, axis=1) >= mass)
            reach = tl.min(tl.where(enough, within, float("inf")), axis=0)
            if reach < float("inf"):
                taken = 0
                for first in range(0, vocab, BLOCK):
                    column = first + lane
                    x = tl.load(logits_ptr + column, mask=column < vocab, other=float("-inf"))
                    x = x.to(tl.float32)
                    near = ((best - x) * scale <= reach).to(tl.int32)
                    place = taken + tl.cumsum(near, axis=0) - 1
                    tl.store(candidates_ptr + place, x, mask=near > 0)
                    taken += tl.sum(near, axis=0)
                tl.debug_barrier()
                key = _surviving_key(
                    candidates_ptr,
                    taken,
                    best,
                    scale,
                    key,
                    k,
                    top_p,
                    total,
                    SHIFT=SHIFT,
                    BLOCK=BLOCK,
                )
            else:
                key = _surviving_key(
                    logits_ptr,
                    vocab,
                    best,
                    scale,
                    key,
                    k,
                    top_p,
                    total,
                    SHIFT=SHIFT,
                    BLOCK=BLOCK,
                )
        threshold = _unordered(key)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, best + tl.log(min_p) * temperature)
    tl.store(out_ptr + item, threshold)


def sampling_thresholds(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    candidates: int = 4096,
) -> Tensor:
    """The smallest logit that survives top-k, then top-p (Holtzman et al. 2020), and min-p.

    Args:
        logits: [B, V] float32, bfloat16 or float16, finite or -inf; rows may be strided, a row
            contiguous. Fewer bits take fewer passes.
        temperature: [B] float32; a row at 0 (greedy) is not filtered.
        top_k: [B] int32, 0 is off. top_p, min_p: [B] float32, 1 and 0 are off.
        candidates: rows whose survivors are fewer are searched much faster.

    Returns:
        [B] float32; -inf where nothing is filtered.
    """
    batch, vocab = logits.shape
    out = torch.empty(batch, dtype=torch.float32, device=logits.device)
    if batch:
        _thresholds_kernel[(batch,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            out,
            torch.empty(batch * candidates, dtype=torch.float32, device=logits.device),
            vocab,
            logits.stride(0),
            SHIFT=_UNUSED_BITS[logits.dtype],
            BLOCK=4096,
            CANDIDATES=candidates,
            num_warps=32,
        )
    return out


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


@jit(varying=("temperature_ptr", "seed_ptr", "position_ptr", "thresholds_ptr", "index_ptr"))
def _race_kernel(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    position_ptr,
    thresholds_ptr,
    best_ptr,
    index_ptr,
    vocab,
    logits_stride,
    chunk,
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
        temperature = tl.load(temperature_ptr + item)
        scale = 1.4426950408889634 / tl.maximum(temperature, 1e-30)
        first_key, second_key = _keys(tl.load(seed_ptr + item), tl.load(position_ptr + item))
        threshold = tl.load(thresholds_ptr + item) if FILTER else float("-inf")
    for first in range(start, stop, BLOCK):
        column = first + lane
        x = tl.load(logits_ptr + column, mask=column < stop, other=float("-inf")).to(tl.float32)
        score = x
        if not GREEDY:
            if temperature > 0:
                score = x * scale - _log2_exponential(first_key, second_key, column, FAST)
            if FILTER:
                score = tl.where(x < threshold, float("-inf"), score)
        better = score > best
        best = tl.where(better, score, best)
        best_index = tl.where(better, column, best_index)
    winner = tl.max(best, axis=0)
    # Of equal scores the lowest index wins, as in torch.argmax; never one past the vocabulary.
    index = tl.min(tl.where(best == winner, best_index, vocab - 1), axis=0)
    tl.store(best_ptr + item * tl.num_programs(1) + part, winner)
    tl.store(index_ptr + item * tl.num_programs(1) + part, index)


@jit(varying=("index_ptr", "parts"))
def _race_winner_kernel(
    best_ptr, index_ptr, out_ptr, vocab, parts, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    item = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    mask = lane < parts
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    best = tl.load(best_ptr + item * parts + lane, mask=mask, other=float("-inf"))
    index = tl.load(index_ptr + item * parts + lane, mask=mask, other=vocab - 1)
    winner = tl.max(best, axis=0)
    tl.store(out_ptr + item, tl.min(tl.where(best == winner, index, vocab - 1), axis=0))


def argmax(logits: Tensor) -> Tensor:
    """The most probable token of each row [B, V], [B] int64: `sample` at temperature 0."""
    return _race(logits, None, None, None, None)


def sample(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    position: Tensor,
    thresholds: Tensor | None = None,
) -> Tensor:
    """Draw one token a row: `argmax(logits / temperature - log(exponential))`, greedy at 0.

    Args:
        logits: [B, V], float32, bfloat16 or float16; rows may be strided, a row contiguous.
        temperature: [B] float32. seed: [B] int64. position: [B] int64, the position the token
            will have; the random numbers are those of `random.exponential`.
        thresholds: [B] float32 from `sampling_thresholds`; smaller logits cannot win.

    Returns:
        [B] int64.
    """
    return _race(logits, temperature, seed, position, thresholds)


def _has_fast_logarithm(x: Tensor) -> bool:
    return x.is_cuda  # the interpreter has no inline assembly


def _race(
    logits: Tensor,
    temperature: Tensor | None,
    seed: Tensor | None,
    position: Tensor | None,
    thresholds: Tensor | None,
) -> Tensor:
    batch, vocab = logits.shape
    out = torch.empty(batch, dtype=torch.int64, device=logits.device)
    if not batch:
        return out
    block = 1024
    # Enough programs to fill the device twice, so that none of its parts waits for a last one.
    parts = max(1, min(_MAX_PARTS, cdiv(2048, batch), cdiv(vocab, block)))
    chunk = cdiv(cdiv(vocab, parts), block) * block
    parts = cdiv(vocab, chunk)
    best = torch.empty((batch, parts), dtype=torch.float32, device=logits.device)
    index = torch.empty((batch, parts), dtype=torch.int32, device=logits.device)
    _race_kernel[(batch, parts)](
        logits,
        temperature,
        seed,
        position,
        thresholds,
        best,
        index,
        vocab,
        logits.stride(0),
        chunk,
        GREEDY=temperature is None,
        FILTER=thresholds is not None,
        FAST=_has_fast_logarithm(logits),
        BLOCK=block,
        num_warps=4,
        **pdl(logits),
    )
    _race_winner_kernel[(batch,)](
        best, index, out, vocab, parts, BLOCK=_MAX_PARTS, num_warps=1, **pdl(logits)
    )
    return out

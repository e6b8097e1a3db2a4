# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Top-k, top-p and min-p as thresholds: the smallest logit that survives, found without a sort.

A row's threshold does not depend on the batch around it, since reductions have a fixed order. Ties
are kept: all logits equal to the k-th best survive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels._triton import gdc_wait, jit, pdl, tl

# Low bits of a float32 that are zero when its value came from a smaller type (normal numbers).
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}


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
    """Over logits with an ordered key >= pivot: how many (COUNT), or their summed weight."""
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
    """Largest key in [low, key(best)] at which `_mass_at_least` reaches `target`.

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


@jit(varying=("rows_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "out_ptr"))
def _thresholds_kernel(
    logits_ptr,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    candidates_ptr,
    vocab,
    logits_stride,
    floats_stride,
    top_k_stride,
    ROWS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row.

    A search reads its values some eight times. It does so over the few candidates within some
    distance of the best where they hold all survivors for certain, over the whole row otherwise.
    """
    item = tl.program_id(0).to(tl.int64)
    logits_ptr += item * logits_stride
    candidates_ptr += item * CANDIDATES
    if PDL:
        gdc_wait()
    row = tl.load(rows_ptr + item).to(tl.int64) if ROWS else item
    temperature = tl.load(temperature_ptr + row * floats_stride)
    top_k = tl.load(top_k_ptr + row * top_k_stride)
    top_p = tl.load(top_p_ptr + row * floats_stride)
    min_p = tl.load(min_p_ptr + row * floats_stride)
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
    rows: Tensor | None = None,
    candidates: int = 4096,
) -> Tensor:
    """The smallest logit that survives top-k, then top-p (Holtzman et al. 2020), and min-p.

    Args:
        logits: [B, V] float32, bfloat16 or float16, finite or -inf; rows may be strided, a row
            contiguous. Fewer bits take fewer passes.
        temperature: [B] float32; a row at 0 (greedy) is not filtered.
        top_k: [B] int32 or int64, 0 is off. top_p, min_p: [B] float32, 1 and 0 are off.
        rows: [B] int64; with it parameters are [R], and row i of the batch takes those of
            `rows[i]`. They may be strided; those in float32 alike.
        candidates: rows with fewer survivors than this are searched much faster.

    Returns:
        [B] float32; -inf where nothing is filtered.
    """
    batch, vocab = logits.shape
    out = torch.empty(batch, dtype=torch.float32, device=logits.device)
    if batch:
        _thresholds_kernel[(batch,)](
            logits,
            rows if rows is not None else top_k,
            temperature,
            top_k,
            top_p,
            min_p,
            out,
            torch.empty(batch * candidates, dtype=torch.float32, device=logits.device),
            vocab,
            logits.stride(0),
            temperature.stride(0),
            top_k.stride(0),
            ROWS=rows is not None,
            SHIFT=_UNUSED_BITS[logits.dtype],
            BLOCK=4096,
            CANDIDATES=candidates,
            num_warps=32,
            **pdl(logits),
        )
    return out

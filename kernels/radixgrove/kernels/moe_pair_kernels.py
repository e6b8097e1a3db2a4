# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The device code of `moe` for few tokens: CUDA cores read the experts of each."""

from __future__ import annotations

from radixgrove.kernels._triton import gdc_launch_dependents, gdc_wait, jit, tl
from radixgrove.kernels.linear import activated, folded


@jit
def _eights(
    weights,
    x,
    scale_ptr,
    row,
    offset,
    k,
    WIDE: tl.constexpr,
    HIGH: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[N, K / 8] sums of eight products each of weights [N, K] and x [K], times the scales of the
    weight's blocks; with `ONE_BLOCK` all rows are in one's, and `row` is the first."""
    sums = folded(weights.to(tl.float32) * x.to(tl.float32)[None, :])
    if WIDE:
        eight = offset + 8 * tl.arange(0, BLOCK_K // 8)
        if ONE_BLOCK:
            where = (row // HIGH * tl.cdiv(k, WIDE) + eight // WIDE)[None, :]
        else:
            where = (row // HIGH)[:, None] * tl.cdiv(k, WIDE) + (eight // WIDE)[None, :]
        sums *= tl.load(scale_ptr + where, mask=(eight < k)[None, :], other=0.0)
    return sums


@jit
def gate_up_pairs_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    ids_ptr,
    out_ptr,
    n,
    k,
    TOP_K: tl.constexpr,
    BIASED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SCALED: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: some outputs of one pair, gate and up activated, read on CUDA cores.

    With `ONE_TILE` a row of the weight is one step, which needs no pipeline.
    """
    pair = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_K)
    alive = row < n
    held = tl.where(alive, row, 0)
    of = first if ONE_BLOCK else held
    xs = x_ptr + (pair // TOP_K).to(tl.int64) * k + lane
    if ONE_TILE:  # the kernel before has routed by x: it is there
        x = tl.load(xs, mask=lane < k, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(ids_ptr + pair)
    if expert < 0:
        return
    base = weight_ptr + expert.to(tl.int64) * 2 * n * k
    gates = base + held.to(tl.int64)[:, None] * k + lane[None, :]
    ups = gates + tl.cast(n, tl.int64) * k
    own = scale_ptr
    if WIDE:
        own += expert.to(tl.int64) * tl.cdiv(2 * n, HIGH) * tl.cdiv(k, WIDE)
    if ONE_TILE:
        inside = (lane < k)[None, :]
        w = tl.load(gates, mask=inside, other=0.0)
        u = tl.load(ups, mask=inside, other=0.0)
        gate = _eights(w, x, own, of, 0, k, WIDE, HIGH, ONE_BLOCK, BLOCK_K)
        up = _eights(u, x, own, n + of, 0, k, WIDE, HIGH, ONE_BLOCK, BLOCK_K)
    else:
        gate = tl.zeros((ROWS, BLOCK_K // 8), dtype=tl.float32)
        up = tl.zeros((ROWS, BLOCK_K // 8), dtype=tl.float32)
        for offset in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            inside = offset + lane < k
            x = tl.load(xs + offset, mask=inside, other=0.0)
            w = tl.load(gates + offset, mask=inside[None, :], other=0.0)
            u = tl.load(ups + offset, mask=inside[None, :], other=0.0)
            gate += _eights(w, x, own, of, offset, k, WIDE, HIGH, ONE_BLOCK, BLOCK_K)
            up += _eights(u, x, own, n + of, offset, k, WIDE, HIGH, ONE_BLOCK, BLOCK_K)
    y, z = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if SCALED and not WIDE:
        own = scale_ptr + expert.to(tl.int64) * 2 * n + row
        y *= tl.load(own, mask=alive, other=0.0)
        z *= tl.load(own + n, mask=alive, other=0.0)
    if BIASED:
        biases = bias_ptr + expert.to(tl.int64) * 2 * n + row
        y += tl.load(biases, mask=alive, other=0.0).to(tl.float32)
        z += tl.load(biases + n, mask=alive, other=0.0).to(tl.float32)
    y = activated(y, z, out_ptr, LIMIT, ALPHA)
    tl.store(out_ptr + pair.to(tl.int64) * n + row, y.to(out_ptr.dtype.element_ty), mask=alive)


@jit
def down_pairs_kernel(
    h_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    ids_ptr,
    scales_ptr,
    residual_ptr,
    out_ptr,
    n,
    k,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BIASED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PLACES: tl.constexpr,
    SCALED: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: some outputs of one token, over all of its experts in their order.

    With `ONE_TILE` a row of the weight is one step: those of all experts are on their way before
    the kernel before has ended, since routing came before that one.
    """
    token = tl.program_id(1)
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_K)
    alive = row < n
    held = tl.where(alive, row, 0)
    of = first if ONE_BLOCK else held
    rows = held.to(tl.int64)[:, None] * k + lane[None, :]
    count = tl.cdiv(n, HIGH) * tl.cdiv(k, WIDE) if WIDE else n
    if ONE_TILE:
        slot = tl.arange(0, SLOTS)
        ids = tl.load(
            ids_ptr + token * TOP_K + slot, mask=slot < TOP_K, other=-1, cache_modifier=".cg"
        )
        here = (ids >= 0)[:, None, None] & (lane < k)[None, None, :]
        experts = tl.maximum(ids, 0).to(tl.int64)[:, None, None]
        w = tl.load(weight_ptr + experts * n * k + rows[None, :, :], mask=here, other=0.0)
        if WIDE:
            eight = 8 * tl.arange(0, BLOCK_K // 8)
            where = eight[None, None, :] // WIDE
            if ONE_BLOCK:
                where += of // HIGH * tl.cdiv(k, WIDE)
            else:
                where += (of // HIGH * tl.cdiv(k, WIDE))[None, :, None]
            blocks = scale_ptr + experts * count + where
            scales = tl.load(blocks, mask=(eight < k)[None, None, :], other=0.0)
        elif SCALED:
            scales = tl.load(scale_ptr + experts * count + held[None, :, None])
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        pairs = token.to(tl.int64) * TOP_K + slot
        h = tl.load(h_ptr + pairs[:, None, None] * k + lane[None, None, :], mask=here, other=0.0)
        chosen = tl.load(scales_ptr + pairs, mask=ids >= 0, other=0.0)[:, None, None]
        products = w.to(tl.float32) * h.to(tl.float32)
        parts = tl.sum(tl.reshape(products, (SLOTS, ROWS, BLOCK_K // 8, 8)), axis=3)
        if SCALED:
            parts *= scales
        total = tl.sum(parts * chosen, axis=0)
    else:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        total = tl.zeros((ROWS, BLOCK_K // 8), dtype=tl.float32)
        steps = tl.cdiv(k, BLOCK_K)
        for step in tl.range(0, TOP_K * steps, num_stages=STAGES):
            pair = token * TOP_K + step // steps
            offset = step % steps * BLOCK_K
            expert = tl.load(ids_ptr + pair)
            inside = offset + lane < k
            if PLACES:
                inside = inside & (expert >= 0)
            scale = tl.load(scales_ptr + pair)
            h = tl.load(h_ptr + pair.to(tl.int64) * k + offset + lane, mask=inside, other=0.0)
            w = tl.load(
                weight_ptr + expert.to(tl.int64) * n * k + rows + offset,
                mask=inside[None, :],
                other=0.0,
            )
            own = scale_ptr + tl.maximum(expert, 0).to(tl.int64) * count
            h = h.to(tl.float32) * scale
            part = _eights(w, h, own, of, offset, k, WIDE, HIGH, ONE_BLOCK, BLOCK_K)
            if SCALED and not WIDE:
                part *= tl.load(own + held)[:, None]
            total += part
    y = tl.sum(total, axis=1)
    if BIASED:
        for index in tl.static_range(TOP_K):
            expert = tl.load(ids_ptr + token * TOP_K + index)
            scale = tl.load(scales_ptr + token * TOP_K + index)
            biases = bias_ptr + tl.maximum(expert, 0).to(tl.int64) * n + held
            y += tl.where(expert >= 0, tl.load(biases).to(tl.float32) * scale, 0.0)
    target = token.to(tl.int64) * n + row
    if RESIDUAL:
        y += tl.load(residual_ptr + target, mask=alive, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, y.to(out_ptr.dtype.element_ty), mask=alive)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The device code of `moe` for many tokens: tensor cores multiply an expert by blocks of them."""

from __future__ import annotations

from radixgrove.kernels._triton import gdc_launch_dependents, gdc_wait, jit, tl
from radixgrove.kernels.float8 import stored
from radixgrove.kernels.linear import activated


@jit
def _block_of(blocks, tiles, GROUP: tl.constexpr):
    """Block and tile of this program: `GROUP` neighbouring blocks go over a tile together, since
    blocks of one expert share it."""
    program = tl.program_id(0)
    in_group = GROUP * tiles
    first = program // in_group * GROUP
    size = tl.minimum(blocks - first, GROUP)
    within = program % in_group
    return first + within % size, within // size


@jit
def _along(vector, FIRST: tl.constexpr):
    """A vector along the first dimension of a matrix, or the second."""
    if FIRST:
        return vector[:, None]
    else:
        return vector[None, :]


@jit
def _multiplied(
    rows,
    weights,
    total,
    row_scales,
    scale_ptr,
    column,
    offset,
    k,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    HIGH: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`total` + rows [M, K] times weights [N, K]: [M, N], or [N, M] with `SWAP`, which puts the
    weights on the tensor cores' long side.

    Float8 weights are widened, which is exact, unless rows are float8 too (`QUANTIZED`), with
    `row_scales` [M] of this step along K (`PARTS`). A step is within one block of scales, which is
    one block of all columns with `ONE_BLOCK`: `column` is the first then.
    """
    if not QUANTIZED:
        weights = weights.to(rows.dtype)
    if WIDE:
        # Asked for before the product, which hides how long it takes.
        scales = tl.load(scale_ptr + column // HIGH * tl.cdiv(k, WIDE) + offset // WIDE)
    if SWAP:
        left, right = weights, tl.trans(rows)
    else:
        left, right = rows, tl.trans(weights)
    if WIDE or PARTS:
        part = tl.dot(left, right, input_precision=PRECISION)
        if PARTS and ONE_BLOCK:
            part *= _along(row_scales * scales, not SWAP)
        elif PARTS:
            part *= _along(row_scales, not SWAP)
        if ONE_BLOCK and not PARTS:
            part *= scales
        elif WIDE and not ONE_BLOCK:
            part *= _along(scales, SWAP)
        total += part
    else:
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@jit
def _scaled_columns(total, scale_ptr, column, SWAP: tl.constexpr):
    """Times the scales of the weight's rows, which are the product's columns."""
    return total * _along(tl.load(scale_ptr + column), SWAP)


@jit(varying=("pairs", "tokens"))
def gate_up_tiles_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    order_ptr,
    offsets_ptr,
    block_expert_ptr,
    block_start_ptr,
    num_blocks_ptr,
    like_ptr,
    out_ptr,
    out_scale_ptr,
    n,
    k,
    tiles,
    pairs,
    tokens,
    bound,
    TOP_K: tl.constexpr,
    BIASED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    SCALED: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    X_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: gate and up of a block of pairs, activated, for a tile of outputs; rows of `out`
    are in the order of experts, and rounded to the type behind `like_ptr`.

    With `QUANTIZED` x is float8 with scales of tokens, or of parts as wide as a block of the weight
    (`X_PARTS`: [parts, T]), and `out` becomes float8 with a scale for each row of the tile:
    [tiles, pairs].
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    blocks = tl.load(num_blocks_ptr)
    if tl.program_id(0) >= blocks * tiles:
        return
    block, tile = _block_of(blocks, tiles, GROUP)
    expert = tl.load(block_expert_ptr + block)
    row = tl.load(block_start_ptr + block) + tl.arange(0, BLOCK_M)
    alive = row < tl.load(offsets_ptr + expert + 1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    token = tl.load(order_ptr + row, mask=alive, other=0) // TOP_K
    xs = x_ptr + token.to(tl.int64)[:, None] * k + lane[None, :]
    base = weight_ptr + expert.to(tl.int64) * 2 * n * k
    # Columns past the end read the tile's first rather than carry a mask through the pipeline, and
    # have no other largest value.
    held = tl.where(column < n, column, tile * BLOCK_N)
    gates = base + held.to(tl.int64)[:, None] * k + lane[None, :]
    half = tl.cast(n, tl.int64) * k
    if SWAP:
        gate = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    own = scale_ptr
    if SCALED:
        count = tl.cdiv(2 * n, HIGH) * tl.cdiv(k, WIDE) if WIDE else 2 * n
        own += expert.to(tl.int64) * count
    of = tile * BLOCK_N if ONE_BLOCK else held
    for offset in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        inside = (offset + lane < k)[None, :]
        x = tl.load(xs + offset, mask=inside, other=0.0)
        w = tl.load(gates + offset, mask=inside, other=0.0)
        u = tl.load(gates + (half + offset), mask=inside, other=0.0)
        rows = tl.load(x_scale_ptr + offset // WIDE * tokens + token) if X_PARTS else 1.0
        gate = _multiplied(
            x,
            w,
            gate,
            rows,
            own,
            of,
            offset,
            k,
            SWAP,
            PRECISION,
            WIDE,
            HIGH,
            ONE_BLOCK,
            QUANTIZED,
            X_PARTS,
        )
        up = _multiplied(
            x,
            u,
            up,
            rows,
            own,
            n + of,
            offset,
            k,
            SWAP,
            PRECISION,
            WIDE,
            HIGH,
            ONE_BLOCK,
            QUANTIZED,
            X_PARTS,
        )
    if QUANTIZED and not X_PARTS:
        rows = _along(tl.load(x_scale_ptr + token), not SWAP)
        gate *= rows
        up *= rows
    if SCALED and not WIDE:
        gate = _scaled_columns(gate, own, held, SWAP)
        up = _scaled_columns(up, own, n + held, SWAP)
    if BIASED:
        biases = bias_ptr + expert.to(tl.int64) * 2 * n + held
        gate += _along(tl.load(biases).to(tl.float32), SWAP)
        up += _along(tl.load(biases + n).to(tl.float32), SWAP)
    y = activated(gate, up, like_ptr, LIMIT, ALPHA).to(like_ptr.dtype.element_ty)
    if QUANTIZED:
        y = y.to(tl.float32)
        largest = tl.minimum(tl.max(tl.abs(y), axis=0 if SWAP else 1), bound)
        scales = tl.maximum(largest / 448.0, 1e-12)
        tl.store(out_scale_ptr + tile * pairs + row, scales, mask=alive)
        y = stored(y / _along(scales, not SWAP), out_ptr)
    if SWAP:
        y = tl.trans(y)
    mask = alive[:, None] & (column < n)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * n + column[None, :], y, mask=mask)


@jit(varying=("pairs",))
def down_tiles_kernel(
    h_ptr,
    h_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    order_ptr,
    offsets_ptr,
    block_expert_ptr,
    block_start_ptr,
    num_blocks_ptr,
    ids_ptr,
    scales_ptr,
    part_ptr,
    counter_ptr,
    residual_ptr,
    out_ptr,
    n,
    k,
    tiles,
    pairs,
    TOP_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PLACES: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    H_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a block of pairs for a tile of outputs.

    Every pair leaves its part. The program that sees a token's last part arrive sums them all, each
    times its weight, in the order in which the token chose its experts.

    With `H_WIDTH` h is float8 with a scale for so many columns of a row: [groups, pairs].
    """
    # Sorting came before the kernel before, which has waited for it.
    blocks = tl.load(num_blocks_ptr, cache_modifier=".cg")
    if tl.program_id(0) >= blocks * tiles:
        return
    block, tile = _block_of(blocks, tiles, GROUP)
    expert = tl.load(block_expert_ptr + block, cache_modifier=".cg")
    row = tl.load(block_start_ptr + block, cache_modifier=".cg") + tl.arange(0, BLOCK_M)
    alive = row < tl.load(offsets_ptr + expert + 1, cache_modifier=".cg")
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    source = tl.where(alive, row, 0)
    hs = h_ptr + source.to(tl.int64)[:, None] * k + lane[None, :]
    base = weight_ptr + expert.to(tl.int64) * n * k
    held = tl.where(column < n, column, 0)
    weights = base + held.to(tl.int64)[:, None] * k + lane[None, :]
    scales = scale_ptr
    if SCALED:
        count = tl.cdiv(n, HIGH) * tl.cdiv(k, WIDE) if WIDE else n
        scales += expert.to(tl.int64) * count
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    of = tile * BLOCK_N if ONE_BLOCK else held
    for offset in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        inside = (offset + lane < k)[None, :]
        h = tl.load(hs + offset, mask=inside, other=0.0)
        w = tl.load(weights + offset, mask=inside, other=0.0)
        rows = tl.load(h_scale_ptr + offset // H_WIDTH * pairs + source) if H_WIDTH else 1.0
        total = _multiplied(
            h,
            w,
            total,
            rows,
            scales,
            of,
            offset,
            k,
            SWAP,
            PRECISION,
            WIDE,
            HIGH,
            ONE_BLOCK,
            H_WIDTH > 0,
            H_WIDTH > 0,
        )
    if SCALED and not WIDE:
        total = _scaled_columns(total, scales, held, SWAP)
    if BIASED:
        biases = tl.load(bias_ptr + expert.to(tl.int64) * n + held)
        total += _along(biases.to(tl.float32), SWAP)
    if SWAP:
        total = tl.trans(total)
    pair = tl.load(order_ptr + row, mask=alive, other=0)
    mask = alive[:, None] & (column < n)[None, :]
    own = pair.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(part_ptr + own, total.to(part_ptr.dtype.element_ty), mask=mask)
    token = pair // TOP_K
    expected = tl.full((BLOCK_M,), TOP_K, dtype=tl.int32)
    if PLACES:
        expected = tl.zeros((BLOCK_M,), dtype=tl.int32)
        for index in range(TOP_K):
            other = tl.load(ids_ptr + token * TOP_K + index, mask=alive, other=-1)
            expected += (other >= 0).to(tl.int32)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + token * tiles + tile, 1, mask=alive, sem="acq_rel")
    tl.debug_barrier()
    last = alive & (arrived == expected - 1)
    mask = last[:, None] & (column < n)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for index in range(TOP_K):
        here = mask
        if PLACES:
            other = tl.load(ids_ptr + token * TOP_K + index, mask=last, other=-1)
            here = mask & (other >= 0)[:, None]
        other = token * TOP_K + index
        theirs = other.to(tl.int64)[:, None] * n + column[None, :]
        part = tl.load(part_ptr + theirs, mask=here, other=0.0, cache_modifier=".cg")
        scale = tl.load(scales_ptr + other, mask=last, other=0.0)[:, None]
        total += tl.where(here, part.to(tl.float32) * scale, 0.0)
    target = token.to(tl.int64)[:, None] * n + column[None, :]
    if RESIDUAL:
        total += tl.load(residual_ptr + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def combine_kernel(
    y_ptr,
    position_ptr,
    scales_ptr,
    residual_ptr,
    out_ptr,
    n,
    TOP_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a token's rows of `y`, which is in the order of experts, times their weights."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in tl.static_range(TOP_K):
        row = tl.load(position_ptr + token * TOP_K + index)
        scale = tl.load(scales_ptr + token * TOP_K + index)
        y = tl.load(y_ptr + row.to(tl.int64) * n + column, mask=inside & (row >= 0), other=0.0)
        total += tl.where(row >= 0, scale, 0.0) * y.to(tl.float32)
    target = token.to(tl.int64) * n + column
    if RESIDUAL:
        total += tl.load(residual_ptr + target, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=inside)

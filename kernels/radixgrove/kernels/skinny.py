# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The product of a decode batch: `skinny`, for up to 128 tokens, bound by reading the weights.

It puts the weights on the tensor cores' long side, splits the reduction when there are too few
tiles for the chip, and folds SiLU-and-multiply or the residual addition into its end. Past 128
tokens every program would read more of x than of its weights.
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
from radixgrove.kernels.float8 import stored
from radixgrove.kernels.linear import (
    ProductScales,
    gated,
    rounded,
    rows_in_block,
    scale_arguments,
)
from radixgrove.kernels.weight import QuantizedRows

MAX_SKINNY_TOKENS = 128


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Tile of the weight (block_n x block_k), ways to split K, pipeline stages and warps."""

    block_n: int = 64
    block_k: int = 128
    splits: int = 1
    stages: int = 4
    warps: int = 4

    def shared_memory_bytes(self, tokens: int, itemsize: int, *, silu: bool) -> int:
        """What a program takes: tiles of the weight and of x in every stage."""
        rows = self.block_n * (2 if silu else 1) + _block_m(tokens)
        return self.stages * rows * self.block_k * itemsize


@jit
def _block_scales(
    weight_scales,
    upper_scales,
    input_scales,
    offset,
    k,
    x_part_stride,
    SILU: tl.constexpr,
    WIDE: tl.constexpr,
    X_PARTS: tl.constexpr,
):
    """Of the columns from `offset` on: what their sums are multiplied by, of the weight's rows,
    those of `up`, and x's."""
    column = tl.minimum(offset, k - 1) // WIDE
    scale = tl.load(weight_scales + column)
    upper = tl.load(upper_scales + column) if SILU else scale
    own = tl.load(input_scales + column * x_part_stride) if X_PARTS else scale
    return scale, upper, own


@jit
def _times(part, scale, own, IN_BLOCK: tl.constexpr, X_PARTS: tl.constexpr):
    """Sums [N, M], times the scales of the weight's rows, or of all, and of x's rows."""
    if IN_BLOCK and X_PARTS:
        part *= (own * scale)[None, :]
    elif IN_BLOCK:
        part *= scale
    else:
        part *= scale[:, None]
    if X_PARTS and not IN_BLOCK:
        part *= own[None, :]
    return part


@jit
def _added_columns(
    total,
    upper_total,
    weights,
    inputs,
    scale,
    upper_scale,
    own_scale,
    offset,
    stop,
    half,
    TILE_K: tl.constexpr,
    SILU: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDENED: tl.constexpr,
    WIDE: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    X_PARTS: tl.constexpr,
):
    """Sums of the weight's rows, and those of `up` that are `half` further on, with the products
    of `TILE_K` columns, within one block of scales if there are some."""
    inside = offset + tl.arange(0, TILE_K) < stop
    w = tl.load(weights + offset, mask=inside[None, :], other=0.0)
    x = tl.load(inputs + offset, mask=inside[:, None], other=0.0)
    if WIDENED:
        w = w.to(x.dtype)
    if WIDE > 0:
        part = tl.dot(w, x, input_precision=PRECISION)
        total += _times(part, scale, own_scale, IN_BLOCK, X_PARTS)
    else:
        total = tl.dot(w, x, total, input_precision=PRECISION)
    if SILU:
        upper = tl.load(weights + half + offset, mask=inside[None, :], other=0.0)
        if WIDENED:
            upper = upper.to(x.dtype)
        if WIDE > 0:
            part = tl.dot(upper, x, input_precision=PRECISION)
            upper_total += _times(part, upper_scale, own_scale, IN_BLOCK, X_PARTS)
        else:
            upper_total = tl.dot(upper, x, upper_total, input_precision=PRECISION)
    return total, upper_total


@jit(varying=("tokens", "x_part_stride"))
def _skinny_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    out_scale_ptr,
    like_ptr,
    partial_ptr,
    counter_ptr,
    w_scale_ptr,
    x_scale_ptr,
    tokens,
    n,
    k,
    k_split,
    x_scale_stride,
    x_part_stride,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    QUANTIZES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    SCALED: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    X_SCALED: tl.constexpr,
    X_PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: out[:, tile] over one share of K, as weight_tile @ x.T in float32.

    With `IN_BLOCK` a tile's rows share blocks of scales. With `QUANTIZES` the output is float8, and
    each token has a scale for the tile: [tiles, T].
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    TILE_K: tl.constexpr = WIDE if BLOCK_K > WIDE and WIDE > 0 else BLOCK_K
    lane = tl.arange(0, TILE_K)
    alive = row < n
    # Rows past the end read row 0 rather than carry a mask through the pipeline.
    source = tl.where(alive, row, 0)
    own = tl.where(token < tokens, token, 0)
    weights = weight_ptr + source.to(tl.int64)[:, None] * k + lane[None, :]
    inputs = x_ptr + own[None, :] * k + lane[:, None]
    start = split * k_split
    stop = tl.minimum(start + k_split, k)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    upper_total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    half = tl.cast(n, tl.int64) * k
    if WIDE > 0:
        of = tile * BLOCK_N if IN_BLOCK else source
        columns = tl.cdiv(k, WIDE)
        first_scales = w_scale_ptr + of // HIGH * columns
        upper_scales = w_scale_ptr + (of + n) // HIGH * columns
        own_scales = x_scale_ptr + own * x_scale_stride
        # Scales are asked for while the step before is multiplied.
        scale, upper_scale, own_scale = _block_scales(
            first_scales, upper_scales, own_scales, start, k, x_part_stride, SILU, WIDE, X_PARTS
        )
        scale_2, upper_scale_2, own_scale_2 = scale, upper_scale, own_scale
        if BLOCK_K > TILE_K:
            scale_2, upper_scale_2, own_scale_2 = _block_scales(
                first_scales,
                upper_scales,
                own_scales,
                start + TILE_K,
                k,
                x_part_stride,
                SILU,
                WIDE,
                X_PARTS,
            )
    else:
        scale, upper_scale, own_scale = 1.0, 1.0, 1.0
    for offset in tl.range(start, stop, BLOCK_K, num_stages=STAGES):
        total, upper_total = _added_columns(
            total,
            upper_total,
            weights,
            inputs,
            scale,
            upper_scale,
            own_scale,
            offset,
            stop,
            half,
            TILE_K,
            SILU,
            PRECISION,
            SCALED and not X_SCALED,
            WIDE,
            IN_BLOCK,
            X_PARTS,
        )
        if WIDE > 0:
            scale, upper_scale, own_scale = _block_scales(
                first_scales,
                upper_scales,
                own_scales,
                offset + BLOCK_K,
                k,
                x_part_stride,
                SILU,
                WIDE,
                X_PARTS,
            )
        if BLOCK_K > TILE_K:
            total, upper_total = _added_columns(
                total,
                upper_total,
                weights,
                inputs,
                scale_2,
                upper_scale_2,
                own_scale_2,
                offset + TILE_K,
                stop,
                half,
                TILE_K,
                SILU,
                PRECISION,
                SCALED and not X_SCALED,
                WIDE,
                IN_BLOCK,
                X_PARTS,
            )
            scale_2, upper_scale_2, own_scale_2 = _block_scales(
                first_scales,
                upper_scales,
                own_scales,
                offset + BLOCK_K + TILE_K,
                k,
                x_part_stride,
                SILU,
                WIDE,
                X_PARTS,
            )
    last = True
    if SPLITS > 1:
        # Every split leaves its share; the last one to arrive sums them in a fixed order.
        tiles = tl.num_programs(0)
        area: tl.constexpr = BLOCK_N * BLOCK_M
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + token[None, :]
        halves: tl.constexpr = 2 if SILU else 1
        slot = partial_ptr + (split * tiles + tile).to(tl.int64) * halves * area
        tl.store(slot + inner, total)
        if SILU:
            tl.store(slot + area + inner, upper_total)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        last = arrived == SPLITS - 1
        if last:
            tl.store(counter_ptr + tile, 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            upper_total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for other in range(SPLITS):
                slot = partial_ptr + (other * tiles + tile).to(tl.int64) * halves * area
                total += tl.load(slot + inner, cache_modifier=".cg")
                if SILU:
                    upper_total += tl.load(slot + area + inner, cache_modifier=".cg")
    if last:
        y = total
        if SCALED and WIDE == 0:
            y *= tl.load(w_scale_ptr + source)[:, None]
            if SILU:
                upper_total *= tl.load(w_scale_ptr + source + n)[:, None]
        if X_SCALED and not X_PARTS:
            factor = tl.load(x_scale_ptr + own * x_scale_stride)[None, :]
            y *= factor
            if SILU:
                upper_total *= factor
        if BIAS:
            y += tl.load(bias_ptr + row, mask=alive, other=0.0).to(tl.float32)[:, None]
        if SILU:
            y = gated(y, upper_total, like_ptr)
        mask = alive[:, None] & (token < tokens)[None, :]
        target = token[None, :] * n + row[:, None]
        if RESIDUAL:
            y = rounded(y, like_ptr)
            y += tl.load(residual_ptr + target, mask=mask, other=0.0).to(tl.float32)
        if QUANTIZES:
            y = rounded(y, like_ptr)
            scales = tl.maximum(tl.max(tl.abs(y), axis=0) / 448.0, 1e-12)
            place = out_scale_ptr + tile * tokens + token
            tl.store(place, scales, mask=token < tokens)
            y = stored(y / scales[None, :], out_ptr)
        tl.store(out_ptr + target, y.to(out_ptr.dtype.element_ty), mask=mask)


class SkinnyWorkspace:
    """Partial sums and counters of split products of one device; used by one stream at a time.

    Counters are zero between launches: the program that sees the last arrival puts them back.
    """

    def __init__(
        self, device: torch.device, *, partials: int = 16 << 20, tiles: int = 8192
    ) -> None:
        self.partials = torch.empty(partials, dtype=torch.float32, device=device)
        self.counters = torch.zeros(tiles, dtype=torch.int32, device=device)

    def fits(self, config: SkinnyConfig, tokens: int, n: int, silu: bool) -> bool:
        tiles = cdiv(n, config.block_n)
        area = config.block_n * _block_m(tokens) * (2 if silu else 1)
        return tiles <= len(self.counters) and config.splits * tiles * area <= len(self.partials)


def within(step: int, block: tuple[int, int]) -> bool:
    """Whether a step of so many columns is in one block of scales, or is two of them."""
    return block[1] % step == 0 or step == 2 * block[1]


def _block_m(tokens: int) -> int:
    """Tokens in a tile of x: a power of two that the tensor cores have."""
    return max(16, next_power_of_2(tokens))


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    residual: Tensor | None = None,
    config: SkinnyConfig | None = None,
    workspace: SkinnyWorkspace | None = None,
    out: Tensor | None = None,
    scales: ProductScales | None = None,
    dtype: torch.dtype | None = None,
    quantized: QuantizedRows | None = None,
) -> Tensor:
    """`ending(x @ weight.T + bias)` for 1 to `MAX_SKINNY_TOKENS` tokens.

    Args:
        x: [T, K] contiguous, float32, bfloat16 or float16; float8 with `scales` of inputs.
        weight: [N, K] contiguous, or [2 N, K] with `silu`. bias, silu, residual, out: as of `gemv`.
        config: a step along K divides the width of blocks that share a scale, or is two of them.
        scales: of a weight in float8, and of x where it is.
        dtype: of the result, if not x's.
        quantized: where to write in place of `out`, rounded to `dtype` first, with scales for as
            many columns as a tile of `config` has, which divides N; not with `residual`.

    Returns:
        [T, N]: `residual`, `out` or a new one; the values of `quantized`.

    Raises:
        ValueError: too many tokens, steps that do not, or `config` splits K and `workspace` is
            absent or too small.
    """
    tokens, k = x.shape
    n = weight.shape[0] // 2 if silu else weight.shape[0]
    config = config or SkinnyConfig()
    if not 1 <= tokens <= MAX_SKINNY_TOKENS:
        raise ValueError(f"{tokens} tokens are not within 1..{MAX_SKINNY_TOKENS}")
    if scales is not None and scales.block and not within(config.block_k, scales.block):
        raise ValueError(
            f"steps of {config.block_k} are neither within blocks of {scales.block[1]} nor two"
        )
    if config.splits > 1 and (workspace is None or not workspace.fits(config, tokens, n, silu)):
        raise ValueError("splitting K needs a workspace of sufficient size")
    like = residual
    if quantized is not None:
        out, like = quantized.values, torch.empty(0, dtype=dtype or x.dtype, device=x.device)
    elif residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((tokens, n), dtype=dtype or x.dtype, device=x.device)
    k_split = cdiv(cdiv(k, config.splits), config.block_k) * config.block_k
    _skinny_kernel[(cdiv(n, config.block_n), config.splits)](
        x,
        weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        out,
        quantized.scales if quantized is not None else x,
        like if like is not None else out,
        workspace.partials if workspace is not None else x,
        workspace.counters if workspace is not None else x,
        tokens=tokens,
        n=n,
        k=k,
        k_split=k_split,
        x_part_stride=scales.part_stride if scales is not None else 0,
        SILU=silu,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        QUANTIZES=quantized is not None,
        SPLITS=config.splits,
        BLOCK_M=_block_m(tokens),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        IN_BLOCK=rows_in_block(scales, config.block_n, n if silu else 0),
        **scale_arguments(scales, x),
        num_warps=config.warps,
        **pdl(x),
    )
    return out

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The product of one token: `gemv`, bound by reading the weights.

It stays on CUDA cores, folds the RMSNorm before it into the same pass (the scale factors out of the
sum), and SiLU-and-multiply or the residual addition into its end. A program's first tile of weights
is in registers before the kernel before has ended, the others are copied ahead asynchronously.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv, gdc_launch_dependents, gdc_wait, jit, pdl, tl
from radixgrove.kernels.linear import (
    ProductScales,
    folded,
    gated,
    rounded,
    rows_in_block,
    scale_arguments,
)

_GEMV_STAGES = 3  # of the pipeline of tiles after a program's first


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """Rows of the weight a program owns, the step along K, and warps."""

    rows: int = 4
    block_k: int = 1024
    warps: int = 4


@jit
def _inputs(x_ptr, column, k):
    """[1, K] of one token as float32, without its scales."""
    return tl.load(x_ptr + column, mask=column < k, other=0.0).to(tl.float32)[None, :]


@jit
def _sums(
    w,
    x,
    w_scale_ptr,
    x_scale_ptr,
    row,
    first_row,
    offset,
    k,
    SCALED: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    X_PARTS: tl.constexpr,
    ROWS_IN_BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[N, K / 8]: sums of eight products each, of a tile of the weight with columns from `offset`
    on, times the scales of their blocks and of the parts of x.

    Where all rows from `first_row` on share blocks, a scale is loaded once for eight columns.
    """
    w = w.to(tl.float32)
    if SCALED and WIDE > 0 and not ROWS_IN_BLOCK:
        column = offset + tl.arange(0, BLOCK_K)
        scales = w_scale_ptr + (row // HIGH)[:, None] * tl.cdiv(k, WIDE) + (column // WIDE)[None, :]
        w *= tl.load(scales, mask=(column < k)[None, :], other=0.0)
    sums = folded(w * x)
    if X_PARTS or ROWS_IN_BLOCK:
        eight = offset + tl.arange(0, BLOCK_K // 8) * 8
        inside = eight < k
        scales = tl.full((BLOCK_K // 8,), 1.0, dtype=tl.float32)
        if X_PARTS:
            scales = tl.load(x_scale_ptr + eight // WIDE, mask=inside, other=0.0)
        if ROWS_IN_BLOCK:
            blocks = w_scale_ptr + first_row // HIGH * tl.cdiv(k, WIDE) + eight // WIDE
            scales *= tl.load(blocks, mask=inside, other=0.0)
        sums *= scales[None, :]
    return sums


@jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    w_scale_ptr,
    x_scale_ptr,
    n,
    k,
    eps,
    x_scale_stride,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ONE_TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    X_SCALED: tl.constexpr,
    X_PARTS: tl.constexpr,
    ROWS_IN_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK_K)
    alive = row < n
    # Rows past the end read row 0 rather than carry a mask through the pipeline.
    source = tl.where(alive, row, 0)
    weights = weight_ptr + source.to(tl.int64)[:, None] * k + lane[None, :]
    upper = weights + tl.cast(n, tl.int64) * k  # the `up` half of a fused gate/up weight
    # Weights do not depend on the kernel before: their first tile is under way while it ends, and
    # is multiplied last, so that the tiles after it are asked for without waiting for it.
    first = (lane < k)[None, :]
    tile = tl.load(weights, mask=first, other=0.0)
    upper_tile = tl.load(upper, mask=first, other=0.0) if SILU else tile
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((ROWS, BLOCK_K // 8), dtype=tl.float32)
    upper_total = tl.zeros((ROWS, BLOCK_K // 8), dtype=tl.float32)
    squares = tl.zeros((1, BLOCK_K // 8), dtype=tl.float32)
    own = tl.program_id(0) * ROWS
    if not ONE_TILE:
        for offset in tl.range(BLOCK_K, k, BLOCK_K, num_stages=STAGES):
            column = offset + lane
            inside = column < k
            x = _inputs(x_ptr, column, k)
            w = tl.load(weights + offset, mask=inside[None, :], other=0.0)
            if NORM:
                squares += folded(x * x)
                norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
                x *= norm.to(tl.float32)[None, :]
            total += _sums(
                w,
                x,
                w_scale_ptr,
                x_scale_ptr,
                source,
                own,
                offset,
                k,
                SCALED,
                HIGH,
                WIDE,
                X_PARTS,
                ROWS_IN_BLOCK,
                BLOCK_K,
            )
            if SILU:
                u = tl.load(upper + offset, mask=inside[None, :], other=0.0)
                upper_total += _sums(
                    u,
                    x,
                    w_scale_ptr,
                    x_scale_ptr,
                    source + n,
                    own + n,
                    offset,
                    k,
                    SCALED,
                    HIGH,
                    WIDE,
                    X_PARTS,
                    ROWS_IN_BLOCK,
                    BLOCK_K,
                )
    x = _inputs(x_ptr, lane, k)
    if NORM:
        squares += folded(x * x)
        x *= tl.load(norm_ptr + lane, mask=lane < k, other=0.0).to(tl.float32)[None, :]
    total += _sums(
        tile,
        x,
        w_scale_ptr,
        x_scale_ptr,
        source,
        own,
        0,
        k,
        SCALED,
        HIGH,
        WIDE,
        X_PARTS,
        ROWS_IN_BLOCK,
        BLOCK_K,
    )
    y = tl.sum(total, axis=1)
    upper_y = y
    if SILU:
        upper_total += _sums(
            upper_tile,
            x,
            w_scale_ptr,
            x_scale_ptr,
            source + n,
            own + n,
            0,
            k,
            SCALED,
            HIGH,
            WIDE,
            X_PARTS,
            ROWS_IN_BLOCK,
            BLOCK_K,
        )
        upper_y = tl.sum(upper_total, axis=1)
    if SCALED and WIDE == 0:
        y *= tl.load(w_scale_ptr + source)
        if SILU:
            upper_y *= tl.load(w_scale_ptr + source + n)
    if X_SCALED and not X_PARTS:
        scale = tl.load(x_scale_ptr)
        y *= scale
        upper_y *= scale
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / k + eps)
        y *= scale
        upper_y *= scale
    if BIAS:
        y += tl.load(bias_ptr + row, mask=alive, other=0.0).to(tl.float32)
    if SILU:
        y = gated(y, upper_y, out_ptr)
    if RESIDUAL:
        y = rounded(y, out_ptr)
        y += tl.load(residual_ptr + row, mask=alive, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=alive)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    silu: bool = False,
    residual: Tensor | None = None,
    config: GemvConfig | None = None,
    out: Tensor | None = None,
    scales: ProductScales | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`ending(norm(x) @ weight.T + bias)` for one token, summed in float32.

    Args:
        x: [1, K] contiguous, float32, bfloat16 or float16; float8 with `scales` of inputs.
        weight: [N, K] contiguous, or [2 N, K] (gate, then up) with `silu`. bias: [N], not with
            `silu`.
        norm: [K], weight of an RMSNorm of x with `eps`, applied first.
        silu: SiLU-and-multiply the halves of the product.
        residual: [1, N], added to, in place, and returned.
        out: where to write without `residual`, x's dtype or float32; allocated when None.
        scales: of a weight in float8, and of x where it is; not with `norm` then.
        dtype: of the result, if not x's.

    Returns:
        [1, N], `dtype`, x's or that of `out`.
    """
    k = x.shape[1]
    n = weight.shape[0] // 2 if silu else weight.shape[0]
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((1, n), dtype=dtype or x.dtype, device=x.device)
    config = config or GemvConfig()
    _gemv_kernel[(cdiv(n, config.rows),)](
        x,
        weight,
        bias if bias is not None else x,
        norm if norm is not None else x,
        residual if residual is not None else x,
        out,
        n=n,
        k=k,
        eps=eps,
        NORM=norm is not None,
        SILU=silu,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        ROWS=config.rows,
        BLOCK_K=config.block_k,
        ONE_TILE=config.block_k >= k,
        STAGES=_GEMV_STAGES,
        ROWS_IN_BLOCK=rows_in_block(scales, config.rows, n if silu else 0),
        **scale_arguments(scales, x),
        num_warps=config.warps,
        **pdl(x),
    )
    return out

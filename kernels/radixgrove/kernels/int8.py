# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Products of int8 weights, with a scale a row, and int8 inputs, with a scale a token.

Few tokens leave their inputs as they are: the kernels that are bound by reading weights widen those
(`linear`). Many are quantized, and summed in int32, which is exact: up to 131,072 columns fit.
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
from radixgrove.kernels.norm import prepared_row
from radixgrove.kernels.weight import MIN_SCALE, QuantizedRows, Weight
from radixgrove.protocol.model.quantization import Activations

INT8_MAX = 127.0


@dataclass(frozen=True, slots=True)
class Int8Config:
    """Tile of the result (block_m tokens x block_n outputs), step along K, stages and warps."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    stages: int = 3
    warps: int = 8


# By tokens: up to so many.
_CONFIGS = (
    (16, Int8Config(block_m=16, block_n=64, block_k=256, stages=4, warps=4)),
    (32, Int8Config(block_m=32, block_n=64, block_k=256, stages=4, warps=4)),
    (256, Int8Config(block_m=64, block_n=128, block_k=128, stages=4, warps=4)),
)
_LARGEST = Int8Config()
_GROUP = 8  # rows of tiles that are computed together, so that the L2 cache holds their weights


def config_for(tokens: int) -> Int8Config:
    return next((config for most, config in _CONFIGS if tokens <= most), _LARGEST)


def quantize_int8_reference(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
    """Inputs as a product with `weight` takes them: the nearest, and ±127 at most.

    Args:
        x: [T, K], any floating point.

    Returns:
        [T, K] int8, and [T, 1] float32 scales of rows; NaN of a row with NaN, and where scales are
        dynamic infinite of one with infinity.
    """
    wide = x.float()
    if weight.activations == Activations.STATIC:
        assert weight.input_scale is not None
        scales = weight.input_scale[:1].expand(len(x), 1)
        scales = scales.where(~wide.isnan().any(-1, keepdim=True), float("nan"))
    else:
        scales = wide.abs().amax(-1, keepdim=True).div_(INT8_MAX).clamp_(min=MIN_SCALE)
    rounded = (wide / scales).round_().clamp_(-INT8_MAX, INT8_MAX)
    return rounded.nan_to_num_(0.0).to(torch.int8), scales


@jit
def _quantize_int8_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    static_ptr,
    out_ptr,
    scales_ptr,
    k,
    x_stride,
    eps,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
    STATIC: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a row, with what comes before it, into int8."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < k
    norm = 1.0
    if NORM:
        norm = tl.load(norm_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    wide = prepared_row(
        x_ptr, residual_ptr, norm, row, columns, mask, k, x_stride, eps, ADD, NORM, SILU
    )
    nan = tl.max((wide != wide).to(tl.int32), axis=0)
    if STATIC:
        scale = tl.load(static_ptr)
    else:
        scale = tl.maximum(tl.max(tl.abs(wide), axis=0) / 127.0, 1e-12)
    tl.store(scales_ptr + row, tl.where(nan > 0, float("nan"), scale))
    wide = tl.clamp(tl.where(wide == wide, wide / scale, 0.0), -127.0, 127.0)
    wide = tl.where(wide == wide, wide, 0.0)  # infinity by an infinite scale
    # Up to 2^22 this addition leaves no fraction: the nearest, ties to even.
    nearest = (wide + 12582912.0) - 12582912.0
    tl.store(out_ptr + row * k + columns, nearest.to(tl.int8), mask=mask)


def quantize_int8(
    x: Tensor,
    weight: Weight,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    silu: bool = False,
) -> QuantizedRows:
    """`quantize_int8_reference` in one kernel, with what comes before it.

    Args:
        x: [T, K], or with `silu` [T, 2 K], gate first; rows may be strided, a row contiguous.
        weight: that they are multiplied with.
        norm: [K], weight of an RMSNorm with `eps`, applied first.
        residual: [T, K] contiguous, to which x is added first, in place; not with `silu`.
        silu: SiLU-and-multiply the halves of x first.

    Returns:
        [T, K] int8 contiguous, and [T, 1] float32 scales.
    """
    tokens, width = x.shape
    k = width // 2 if silu else width
    static = weight.activations == Activations.STATIC
    out = torch.empty((tokens, k), dtype=torch.int8, device=x.device)
    scales = torch.empty((tokens, 1), dtype=torch.float32, device=x.device)
    if tokens:
        block = next_power_of_2(k)
        _quantize_int8_kernel[(tokens,)](
            x,
            residual if residual is not None else x,
            norm if norm is not None else x,
            weight.input_scale if static else scales,
            out,
            scales,
            k,
            x.stride(0),
            eps,
            ADD=residual is not None,
            NORM=norm is not None,
            SILU=silu,
            STATIC=static,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **pdl(x),
        )
    return QuantizedRows(out, scales)


@jit(varying=("tokens",))
def _int8_kernel(
    x_ptr,
    weight_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    tokens,
    n,
    k,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a tile of x @ weight.T in int32, then its scales."""
    program = tl.program_id(0)
    high, wide = tl.cdiv(tokens, BLOCK_M), tl.cdiv(n, BLOCK_N)
    band = program // (GROUP * wide)
    height = tl.minimum(high - band * GROUP, GROUP)
    within = program % (GROUP * wide)
    row = (band * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    # Rows past an end read row 0 rather than carry a mask through the pipeline.
    own = tl.where(row < tokens, row, 0)
    source = tl.where(column < n, column, 0)
    inputs = x_ptr + own.to(tl.int64)[:, None] * k + lane[None, :]
    weights = weight_ptr + source.to(tl.int64)[None, :] * k + lane[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for offset in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        inside = offset + lane < k
        x = tl.load(inputs + offset, mask=inside[None, :], other=0)
        w = tl.load(weights + offset, mask=inside[:, None], other=0)
        total = tl.dot(x, w, total, out_dtype=tl.int32)
    y = total.to(tl.float32) * tl.load(x_scale_ptr + own)[:, None]
    y *= tl.load(w_scale_ptr + source)[None, :]
    if BIAS:
        y += tl.load(bias_ptr + source).to(tl.float32)[None, :]
    mask = (row < tokens)[:, None] & (column < n)[None, :]
    target = own.to(tl.int64)[:, None] * n + column[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, y.to(out_ptr.dtype.element_ty), mask=mask)


def int8_product(
    values: Tensor,
    inputs: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    config: Int8Config | None = None,
) -> Tensor:
    """`residual += x @ weight.T + bias`, summed in int32.

    Args:
        values, inputs: x [T, K] int8 contiguous, and its scales [T, 1] float32.
        bias: [N].
        residual: [T, N] contiguous, updated in place and returned.
        out: [T, N] contiguous, where to write without `residual`; allocated when None.

    Returns:
        [T, N], `weight.dtype` or that of `out`.
    """
    (tokens, k), n = values.shape, weight.shape[0]
    assert weight.scales is not None
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((tokens, n), dtype=weight.dtype, device=values.device)
    config = config or config_for(tokens)
    _int8_kernel[(cdiv(tokens, config.block_m) * cdiv(n, config.block_n),)](
        values,
        weight.payload,
        inputs,
        weight.scales,
        bias if bias is not None else inputs,
        residual if residual is not None else inputs,
        out,
        tokens=tokens,
        n=n,
        k=k,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=_GROUP,
        STAGES=config.stages,
        num_warps=config.warps,
        **pdl(values),
    )
    return out

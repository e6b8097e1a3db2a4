# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Float8 weights and activations: quantizing, and the product in float32 that every other one is
measured against.

A weight is e4m3 times scales of its rows or blocks (`Weight`). Inputs are divided by their own
scale, of a row or of a part of a row, rounded to e4m3, and what is beyond ±448 saturates. A row
with NaN, or with infinity where scales are dynamic, is NaN throughout.
"""

from __future__ import annotations

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
from radixgrove.kernels.float8 import FLOAT8, FLOAT8_MAX, stored, to_page
from radixgrove.kernels.int8 import quantize_int8_reference
from radixgrove.kernels.norm import prepared_row
from radixgrove.kernels.weight import MIN_SCALE, QuantizedRows, Weight
from radixgrove.protocol.model.quantization import Activations

_COLUMNS = 2048  # of a program, where a row may have several


def widened(weight: Weight) -> Tensor:
    """The [..., N, K] that the weight stands for, float32."""
    wide = weight.payload.float()
    if weight.scales is None:
        return wide
    if weight.block is None:
        return wide.mul_(weight.scales[..., None])
    rows, columns = weight.block
    n, k = weight.shape
    for start in range(0, n, rows):
        scales = weight.scales[..., start // rows, :].repeat_interleave(columns, -1)[..., :k]
        wide[..., start : start + rows, :].mul_(scales[..., None, :])
    return wide


def quantize_rows(matrix: Tensor, payload: Tensor, scales: Tensor) -> None:
    """Into float8, by a scale a row.

    Args:
        matrix: [N, K], any floating point.
        payload: [N, K] float8, written. scales: [N] float32, written.

    Raises:
        ValueError: a row has values that are not finite.
    """
    wide = matrix.float()
    largest = wide.abs().amax(-1)
    if not bool(largest.isfinite().all()):
        raise ValueError("holds values that are not finite, which have no scale")
    scales.copy_(largest.div_(FLOAT8_MAX).clamp_(min=MIN_SCALE))
    payload.copy_(to_page(wide.div_(scales[:, None]), FLOAT8))


def quantize_reference(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
    """Inputs as a product with `weight` takes them.

    Args:
        x: [T, K], any floating point.

    Returns:
        [T, K] float8, and float32 scales: [1, 1] where they are static, [T, 1] of rows, or
        [T, ceil(K / block columns)]; for int8 see `int8.quantize_int8_reference`.
    """
    if weight.input_dtype == torch.int8:
        return quantize_int8_reference(x, weight)
    wide = x.float()
    if weight.activations == Activations.STATIC:
        assert weight.input_scale is not None
        scales = weight.input_scale.view(1, 1)
        return to_page(wide / scales, FLOAT8), scales
    if weight.activations == Activations.TOKEN:
        scales = _scale(wide, weight)
        return to_page(wide / scales, FLOAT8), scales
    assert weight.block is not None
    width = weight.block[1]
    tokens, k = x.shape
    missing = -k % width
    parts = torch.nn.functional.pad(wide, (0, missing)).view(tokens, -1, width)
    scales = _scale(parts, weight)
    rounded = to_page(parts / scales, FLOAT8).view(tokens, -1)[:, :k]
    return rounded.contiguous(), scales.squeeze(-1)


def _scale(wide: Tensor, weight: Weight) -> Tensor:
    """Of the last dimension, which is kept with size 1."""
    largest = wide.abs().amax(-1, keepdim=True)
    if weight.activation_bound is not None:
        largest.clamp_(max=weight.activation_bound)
    return largest.div_(FLOAT8_MAX).clamp_(min=MIN_SCALE)


def rounded(x: Tensor, weight: Weight) -> Tensor:
    """[T, K] float32: inputs with the error of their quantization."""
    if weight.activations == Activations.KEPT:
        return x.float()
    values, scales = quantize_reference(x, weight)
    if weight.activations == Activations.GROUP:
        assert weight.block is not None
        scales = scales.repeat_interleave(weight.block[1], 1)[:, : x.shape[1]]
    return values.float().mul_(scales)


def product_reference(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` with inputs quantized as the weight asks: [T, N] float32."""
    wide = None if bias is None else bias.float()
    return torch.nn.functional.linear(rounded(x, weight), widened(weight), wide)


@jit(varying=("scale_stride",))
def _quantize_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    static_ptr,
    normed_ptr,
    out_ptr,
    scales_ptr,
    k,
    x_stride,
    scale_stride,
    eps,
    bound,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    KEEP: tl.constexpr,
    SILU: tl.constexpr,
    STATIC: tl.constexpr,
    BOUND: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a row, with what comes before it, into float8; WIDTH: of parts with a scale of
    their own, of which it may take some, 0: the row has one."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
    if KEEP:
        normed = wide.to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + row * k + columns, normed, mask=mask)
    if STATIC:
        wide = wide / tl.load(static_ptr)
    elif WIDTH > 0:
        parts = tl.reshape(wide, (BLOCK // WIDTH, WIDTH))
        scales = tl.maximum(tl.max(tl.abs(parts), axis=1) / 448.0, 1e-12)
        part = tl.program_id(1) * (BLOCK // WIDTH) + tl.arange(0, BLOCK // WIDTH)
        tl.store(scales_ptr + row + part * scale_stride, scales, mask=part < tl.cdiv(k, WIDTH))
        wide = tl.reshape(parts / scales[:, None], (BLOCK,))
    else:
        largest = tl.max(tl.abs(wide), axis=0)
        if BOUND:
            largest = tl.minimum(largest, bound)
        scale = tl.maximum(largest / 448.0, 1e-12)
        tl.store(scales_ptr + row, scale)
        wide = wide / scale
    tl.store(out_ptr + row * k + columns, stored(wide, out_ptr), mask=mask)


def quantize(
    x: Tensor,
    weight: Weight,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    residual: Tensor | None = None,
    normed: Tensor | None = None,
    silu: bool = False,
) -> QuantizedRows:
    """`quantize_reference` in one kernel, with what comes before it.

    Args:
        x: [T, K], or with `silu` [T, 2 K], gate first; rows may be strided, a row contiguous.
        weight: that they are multiplied with; a width of parts is a power of two.
        norm: [K], weight of an RMSNorm with `eps`, applied first.
        residual: [T, K] contiguous, to which x is added first, in place; not with `silu`.
        normed: [T, K] contiguous, x's dtype, where to leave what is quantized.
        silu: SiLU-and-multiply the halves of x first.
    """
    tokens, width = x.shape
    k = width // 2 if silu else width
    static = weight.activations == Activations.STATIC
    group = 0
    if weight.activations == Activations.GROUP:
        assert weight.block is not None
        group = weight.block[1]
    made = QuantizedRows.by_parts(tokens, k, group or k, x.device)
    if static:
        assert weight.input_scale is not None  # before `settled`, in a rehearsal, any
        made = QuantizedRows(made.values, weight.input_scale[:1].view(1, 1))
    if tokens:
        block = max(next_power_of_2(k), group)
        if group and norm is None:  # parts have nothing in common
            block = max(group, min(block, _COLUMNS))
        bound = weight.activation_bound
        _quantize_kernel[(tokens, cdiv(k, block))](
            x,
            residual if residual is not None else x,
            norm if norm is not None else x,
            made.scales,
            normed if normed is not None else x,
            made.values,
            made.scales,
            k,
            x.stride(0),
            tokens,
            eps,
            bound if bound is not None else 0.0,
            ADD=residual is not None,
            NORM=norm is not None,
            KEEP=normed is not None,
            SILU=silu,
            STATIC=static,
            BOUND=bound is not None,
            WIDTH=group,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **pdl(x),
        )
    return made

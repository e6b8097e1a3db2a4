# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""RMSNorm (Zhang and Sennrich 2019), alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels._triton import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    pdl,
    tl,
)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `rms_norm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).mul_(weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `add_rms_norm`."""
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps)


@jit
def normed(wide, weight, width, eps):
    """The RMSNorm of a row: float32, as `wide` and `weight`, which are zero past `width`."""
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    return wide * scale * weight


@jit
def prepared_row(
    x_ptr,
    residual_ptr,
    norm,
    row,
    columns,
    mask,
    k,
    x_stride,
    eps,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    SILU: tl.constexpr,
):
    """A row of a product's inputs, float32: SiLU-and-multiplied, added to the residual, and normed
    by `norm`, each if asked for, and rounded as a kernel of its own would store it. So what is
    normed is what the residual stream carries on."""
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    if SILU:
        up = tl.load(x_ptr + row * x_stride + k + columns, mask=mask, other=0.0).to(tl.float32)
        wide = (wide / (1.0 + tl.exp(-wide)) * up).to(x.dtype).to(tl.float32)
    if ADD:
        total = wide + tl.load(residual_ptr + row * k + columns, mask=mask, other=0.0).to(
            tl.float32
        )
        x = total.to(x.dtype)
        tl.store(residual_ptr + row * k + columns, x, mask=mask)
        wide = x.to(tl.float32)
    if NORM:
        wide = normed(wide, norm, k, eps).to(x.dtype).to(tl.float32)
    return wide


@jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    hidden,
    x_stride,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    wide = prepared_row(
        x_ptr, residual_ptr, weight, row, columns, mask, hidden, x_stride, eps, ADD, True, False
    )
    tl.store(out_ptr + row * hidden + columns, wide.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    tokens, hidden = x.shape
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if tokens:
        block = next_power_of_2(hidden)
        _rms_norm_kernel[(tokens,)](
            x,
            residual if residual is not None else x,
            weight,
            out,
            hidden,
            x.stride(0),
            eps,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **pdl(x),
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, computed in float32.

    Args:
        x: [T, hidden], rows may be strided, a row contiguous; float32, bfloat16 or float16.
        weight: [hidden].

    Returns:
        [T, hidden] contiguous, x's dtype.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place, then the RMSNorm of the new residual.

    Args:
        x: [T, hidden], rows may be strided; residual: [T, hidden] contiguous, same dtype.
        weight: [hidden].

    Returns:
        [T, hidden] contiguous, x's dtype.
    """
    return _launch(x, residual, weight, eps)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Linear layers: their reference, and what the kernels of a decode batch's products share.

With few tokens a product costs the time its weights take to arrive, so what counts is bytes in
flight on every multiprocessor and the number of launches: `gemv` for one token and `skinny` for up
to 128 fold what stands before and after the product into it. Both are optional: `autotune` decides
by measurement where they beat cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.kernels._triton import jit, tl
from radixgrove.kernels.activation import silu_and_mul_reference
from radixgrove.kernels.norm import rms_norm_reference
from radixgrove.kernels.quantize import product_reference
from radixgrove.kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class ProductScales:
    """Of float8 operands; all float32.

    Attributes:
        weight: [N] of rows, or with `block` [ceil(N / rows), ceil(K / columns)].
        block: rows and columns of the weight that share a scale.
        inputs: [T, 1] of rows of x, [1, 1] of all, or [T, ceil(K / columns)]; None: x is not
            quantized.
    """

    weight: Tensor
    block: tuple[int, int] | None = None
    inputs: Tensor | None = None

    @property
    def part_stride(self) -> int:
        """From one part of x's rows to the next."""
        return 0 if self.inputs is None else self.inputs.stride(1)

    def arguments(self, x: Tensor) -> dict[str, object]:
        """For a kernel that takes them."""
        inputs = self.inputs
        high, wide = self.block or (0, 0)
        return {
            "w_scale_ptr": self.weight,
            "x_scale_ptr": self.weight if inputs is None else inputs,
            "x_scale_stride": inputs.stride(0) if inputs is not None and len(inputs) > 1 else 0,
            "SCALED": True,
            "HIGH": high,
            "WIDE": wide,
            "X_SCALED": inputs is not None,
            "X_PARTS": inputs is not None and inputs.shape[1] > 1,
        }


def scale_arguments(scales: ProductScales | None, x: Tensor) -> dict[str, object]:
    if scales is not None:
        return scales.arguments(x)
    nothing = {"w_scale_ptr": x, "x_scale_ptr": x, "x_scale_stride": 0, "SCALED": False}
    return nothing | {"HIGH": 0, "WIDE": 0, "X_SCALED": False, "X_PARTS": False}


def linear_reference(
    x: Tensor,
    weight: Tensor | Weight,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    silu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `gemv`; for any number of tokens, and for weights of every format."""
    if norm is not None:
        x = rms_norm_reference(x, norm, eps)
    if isinstance(weight, Weight) and weight.quantized:
        y = product_reference(x, weight, bias)
        if out is not None:
            return out.copy_(y)
        y = y.to(x.dtype)
        y = silu_and_mul_reference(y) if silu else y
        return y if residual is None else residual.add_(y)
    weight = weight.payload if isinstance(weight, Weight) else weight
    if out is not None:
        wide_bias = None if bias is None else bias.to(out.dtype)
        wide = torch.nn.functional.linear(x.to(out.dtype), weight.to(out.dtype), wide_bias)
        return out.copy_(wide)
    y = torch.nn.functional.linear(x, weight, bias)
    if silu:
        y = silu_and_mul_reference(y)
    return y if residual is None else residual.add_(y)


def rows_in_block(scales: ProductScales | None, rows: int, gap: int) -> bool:
    """Whether `rows` from a multiple of them on, and those `gap` further on, share blocks, and
    eight columns from a multiple of them on do."""
    if scales is None or scales.block is None:
        return False
    high, wide = scales.block
    return high % rows == 0 and gap % rows == 0 and wide % 8 == 0


@jit
def folded(products):
    """[N, K] -> [N, K / 8]: sums of what a thread loads at once; few registers hold them."""
    return tl.sum(tl.reshape(products, (products.shape[0], products.shape[1] // 8, 8)), axis=2)


@jit
def rounded(y, like_ptr):
    """Float32 of what a product that stores `y` behind the pointer would have rounded, so that
    steps with and without an ending agree."""
    return y.to(like_ptr.dtype.element_ty).to(tl.float32)


@jit
def gated(gate, up, like_ptr):
    """`silu(gate) * up` in float32 of both, rounded."""
    gate = rounded(gate, like_ptr)
    up = rounded(up, like_ptr)
    return gate / (1.0 + tl.exp(-gate)) * up


@jit
def activated(gate, up, like_ptr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """`silu(gate) * up`, or with a `LIMIT` `ClampedSwiGlu`, in float32 of both, rounded."""
    if LIMIT > 0:
        gate = rounded(gate, like_ptr)
        up = rounded(up, like_ptr)
        # Comparisons keep NaN, which a minimum would not.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        y = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    else:
        y = gated(gate, up, like_ptr)
    return y

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Pages in float8: e4m3 without infinities (Micikevicius et al. 2022, "FP8 Formats for Deep
Learning"), half the bytes of bfloat16. Unscaled: three bits of mantissa from 2^-6 to 448, steps of
2^-9 below.

Pages have the dtype of what is stored into them, or this one. A value is rounded once, when it is
stored, and widened without loss when it is read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels._triton import jit, tl

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0


def to_page(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as pages of `dtype` hold it: itself, or the nearest float8, ties to even.

    What is beyond ±448, infinity too, becomes ±448; NaN stays NaN. (A bare conversion would make
    NaN of both.)
    """
    return x if x.dtype == dtype else x.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(dtype)


def bits(x: Tensor) -> Tensor:
    """x itself, or a view of its bytes: torch cannot index or compare every float8."""
    return x.view(torch.uint8) if x.dtype == FLOAT8 else x


@jit
def stored(x, pages_ptr):
    """`to_page` of a block of values, for the pages behind the pointer."""
    if x.dtype != pages_ptr.dtype.element_ty:
        wide = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        x = wide.to(pages_ptr.dtype.element_ty)
    return x

"""Three repairs of Triton 3.6's interpreter, which runs kernels on NumPy arrays.

It turns one-element arrays into integers by `int`, which NumPy 2.4 refuses, multiplies bfloat16
matrices as the 16-bit integers that carry them, and cuts float32 off to bfloat16, which compiled
kernels round to the nearest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _float32(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def _rounded(handle: Any) -> Any:
    bits = handle.data.view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    halves = np.where(np.isnan(handle.data), 0x7FC0, nearest).astype(np.uint16)
    return interpreter.TensorHandle(halves, tl.bfloat16)


def repair() -> None:
    """Apply all, once."""
    if getattr(interpreter, "_repaired", False):
        return
    interpreter._repaired = True
    patch_tensor = interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot
    cast = interpreter.InterpreterBuilder.cast_impl

    def patch_tensor_too(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, _float32(a), _float32(b), *rest)

    def cast_to_nearest(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return _rounded(source)
        return cast(self, source, kind)

    interpreter._patch_lang_tensor = patch_tensor_too
    interpreter.InterpreterBuilder.create_dot = create_wide_dot
    interpreter.InterpreterBuilder.cast_impl = cast_to_nearest

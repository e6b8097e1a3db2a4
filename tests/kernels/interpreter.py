"""Two repairs of Triton 3.6's interpreter, which runs kernels on NumPy arrays.

It turns one-element arrays into integers by `int`, which NumPy 2.4 refuses, and multiplies bfloat16
matrices as the 16-bit integers that carry them.
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


def repair() -> None:
    """Apply both, once."""
    if getattr(interpreter, "_repaired", False):
        return
    interpreter._repaired = True
    patch_tensor = interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot

    def patch_tensor_too(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, _float32(a), _float32(b), *rest)

    interpreter._patch_lang_tensor = patch_tensor_too
    interpreter.InterpreterBuilder.create_dot = create_wide_dot

"""Repairs of Triton 3.6's interpreter, which runs kernels on NumPy arrays.

It turns one-element arrays into integers by `int`, which NumPy 2.4 refuses, multiplies matrices in
bfloat16 or float8 as the integers that carry them, cuts float32 off to bfloat16, which compiled
kernels round to the nearest, and rounds to float8 without carry into the exponent. And most of its
time goes into what is always the same: at every launch and every call of a function it looks
through all of the language for what to replace, and with every tensor it makes the objects of its
shape and the table of NumPy's types anew. Here these are kept.
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter


def _float32(handle: Any) -> Any:
    if handle.dtype.scalar == tl.float8e4nv:
        return _through_torch(handle, tl.float32)
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def _rounded(handle: Any) -> Any:
    bits = handle.data.view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    halves = np.where(np.isnan(handle.data), 0x7FC0, nearest).astype(np.uint16)
    return interpreter.TensorHandle(halves, tl.bfloat16)


_FLOATS = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}


def _through_torch(handle: Any, kind: Any) -> Any:
    """float8 to or from another type: torch rounds to the nearest, ties to even; like compiled
    kernels' conversion but that what is beyond 448 becomes NaN."""
    carrier = np.ascontiguousarray(handle.data)  # integers, where NumPy has no such type
    values = torch.from_numpy(carrier.view(f"i{carrier.itemsize}").copy())
    converted = values.view(_FLOATS[handle.dtype.scalar]).to(_FLOATS[kind.scalar])
    raw = converted.view(getattr(torch, f"int{8 * converted.itemsize}")).numpy()
    return interpreter.TensorHandle(raw.view(interpreter._get_np_dtype(kind)), kind.scalar)


@cache
def _builtins(package: Any) -> list[str]:
    """Names of the language's own functions there, before any has been replaced."""
    return [name for name, value in inspect.getmembers(package) if tl.core.is_builtin(value)]


@cache
def _tensor_shape(lengths: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's `shape` and `numel`."""
    return (
        tl.tuple([tl.constexpr(length) for length in lengths]),
        tl.constexpr(math.prod(lengths)),
    )


def _make_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _tensor_shape(tuple(type.shape) if type.is_block() else ())


_EQUAL = tl.constexpr(True)
_compare_tuples, _compare_types = tl.tuple.__eq__, tl.dtype.__eq__


def _tuples_are_equal(self: Any, other: Any) -> Any:
    return _EQUAL if self is other else _compare_tuples(self, other)


def _types_are_equal(self: Any, other: Any) -> bool:
    return self is other or _compare_types(self, other)


@cache
def _block_shape(lengths: tuple[int, ...]) -> tuple[Any, int]:
    """A block type's `shape` and `numel`."""
    if not lengths:
        raise TypeError("a block of no dimensions")
    return tl.tuple(lengths), validate_block_shape(lengths)


def _make_block(self: Any, element_ty: Any, shape: Any) -> None:
    lengths = tuple(getattr(length, "value", length) for length in shape)
    self.element_ty, self.name = element_ty, f"<{lengths}, {element_ty}>"
    self.shape, self.numel = _block_shape(lengths)


def _patch_builtins(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):  # not so inside of a launch: it has been replaced
            interpreter._patch_attr(package, name, member, builder, scope)


def repair() -> None:
    """Apply all, once."""
    if getattr(interpreter, "_repaired", False):
        return
    interpreter._repaired = True
    patch_tensor = interpreter._patch_lang_tensor
    create_dot = interpreter.InterpreterBuilder.create_dot
    cast = interpreter.InterpreterBuilder.cast_impl
    convert = interpreter.InterpreterBuilder.create_fp_to_fp
    patch_language, find_numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    numpy_types: dict[str, Any] = {}

    def patch_tensor_too(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def create_wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, _float32(a), _float32(b), *rest)

    def cast_to_nearest(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return _rounded(source)
        return cast(self, source, kind)

    def convert_to_nearest(self: Any, source: Any, kind: Any, rounding: Any) -> Any:
        if tl.float8e4nv in (source.dtype.scalar, kind.scalar):
            return _through_torch(source, kind)
        return convert(self, source, kind, rounding)

    def numpy_type(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if scalar.name not in numpy_types:
            numpy_types[scalar.name] = find_numpy_type(scalar)
        return numpy_types[scalar.name]

    def patch_language_once(function: Any) -> Any:
        """Inside of a launch, what a function uses of the language has been replaced already."""
        modules = function.__globals__.values()
        used = [each for each in modules if each is tl or each is tl.core]
        if used and not any(tl.core.is_builtin(module.load) for module in used):
            return interpreter._LangPatchScope()
        return patch_language(function)

    tl.tensor.__init__ = _make_tensor
    tl.tuple.__eq__, tl.dtype.__eq__ = _tuples_are_equal, _types_are_equal
    tl.block_type.__init__ = _make_block
    interpreter._get_np_dtype = numpy_type
    interpreter._patch_lang = patch_language_once
    interpreter._patch_lang_tensor = patch_tensor_too
    interpreter._patch_builtin = _patch_builtins
    interpreter.InterpreterBuilder.create_dot = create_wide_dot
    interpreter.InterpreterBuilder.cast_impl = cast_to_nearest
    interpreter.InterpreterBuilder.create_fp_to_fp = convert_to_nearest

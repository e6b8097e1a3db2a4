"""Matrix products by a cuBLASLt algorithm of the caller's choice.

cuBLAS ranks its algorithms by a model of the device; timing the first few of them finds faster ones
for many shapes. This binds as much of cuBLASLt (NVIDIA's cuBLAS documentation, "Using the cuBLASLt
API") as that needs, in the copy of the library that torch has loaded.

An algorithm is 64 opaque bytes, which are valid for one version of the library only: `version()`
has to be kept with them.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import (
    byref,
    c_float,
    c_int,
    c_int8,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.protocol.errors import LibraryError

ALGORITHM_BYTES = 64
_MAX_CANDIDATES = 32  # the library returns about 8
_WORKSPACE_BYTES = 64 << 20
# Algorithms are asked for, and hold, for operands aligned as torch's allocator aligns them.
_ALIGNMENT = 256

# Values of the enumerations in library_types.h, cublas_api.h and cublasLt.h.
_DATA_TYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float32: 0, torch.float8_e4m3fn: 28}
_WIDE_INPUTS = (torch.bfloat16, torch.float16)
_RESULTS = (*_WIDE_INPUTS, torch.float32)
_REAL_32F = 0
_COMPUTE_32F = 68
_DESC_TRANSPOSE_A = 3
_TRANSPOSE = 1
_DESC_SCALES_A, _DESC_SCALES_B = 17, 18
_DESC_FAST_ACCUMULATION = 25
_DESC_SCALE_MODE_A, _DESC_SCALE_MODE_B = 31, 32
_OUTER_VECTOR = 3  # a float32 scale a row of either operand
_LAYOUT_COLUMNS = 3
_PREFERENCE_WORKSPACE_BYTES = 1


class CublasLtError(LibraryError, RuntimeError):
    """The library refused, or the operands are not such as it was asked about."""


@dataclass(frozen=True, slots=True)
class CublasLtConfig:
    """An algorithm: a `cublasLtMatmulAlgo_t` of the library's present version."""

    algorithm: bytes

    def __post_init__(self) -> None:
        if len(self.algorithm) != ALGORITHM_BYTES:
            raise ValueError(f"an algorithm has {ALGORITHM_BYTES} bytes")


class _Heuristic(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = [
        ("algorithm", c_uint8 * ALGORITHM_BYTES),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The library that this process has mapped already; None without one."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
        path = next(line.split(maxsplit=5)[5] for line in lines if "/libcublasLt.so" in line)
        library = ctypes.CDLL(path)
        library.cublasLtGetVersion.restype = c_size_t
    except (OSError, StopIteration, AttributeError):
        return None
    return library


def version() -> int | None:
    """Of the library, as 130100 for 13.1.0; None without one."""
    library = _library()
    return None if library is None else int(library.cublasLtGetVersion())


def _check(status: int, what: str) -> None:
    if status:
        raise CublasLtError(f"{what}: cuBLAS status {status}")


class _Object:
    """An object of the library, destroyed with this wrapper.

    Not at exit, where the driver may be gone before it.
    """

    def __init__(self, library: ctypes.CDLL, kind: str, *arguments: object) -> None:
        self.pointer = c_void_p()
        _check(getattr(library, f"{kind}Create")(byref(self.pointer), *arguments), kind)
        destroy = getattr(library, f"{kind}Destroy")
        weakref.finalize(self, destroy, self.pointer).atexit = False


class _Product:
    """Descriptors of x [T, K] times weight [N, K] transposed; T is set before each use.

    The library counts in columns: our rows are its columns, so that the weight is its A (K x N,
    transposed), x its B (K x T) and the result N x T.
    """

    def __init__(
        self, library: ctypes.CDLL, n: int, k: int, dtype: torch.dtype, result: torch.dtype
    ) -> None:
        def layout(rows: int, columns: int, dtype: torch.dtype = dtype) -> _Object:
            return _Object(
                library,
                "cublasLtMatrixLayout",
                c_int(_DATA_TYPES[dtype]),
                c_uint64(rows),
                c_uint64(columns),
                c_int64(rows),
            )

        self._library = library
        self.operation = _Object(
            library, "cublasLtMatmulDesc", c_int(_COMPUTE_32F), c_int(_REAL_32F)
        )
        self._describe(_DESC_TRANSPOSE_A, c_int(_TRANSPOSE))
        if dtype == FLOAT8:
            self._describe(_DESC_FAST_ACCUMULATION, c_int8(1))
            self._describe(_DESC_SCALE_MODE_A, c_int(_OUTER_VECTOR))
            self._describe(_DESC_SCALE_MODE_B, c_int(_OUTER_VECTOR))
        self.weight, self.x, self.out = layout(k, n), layout(k, 1), layout(n, 1, result)
        self._tokens = 1
        # What the library has been asked about: holds while neither changes.
        self._checked: tuple[int, CublasLtConfig] | None = None
        self.algorithm = (c_uint8 * ALGORITHM_BYTES)()

    def _describe(self, attribute: int, value: c_int | c_int8 | c_void_p) -> None:
        status = self._library.cublasLtMatmulDescSetAttribute(
            self.operation.pointer,
            c_int(attribute),
            byref(value),
            c_size_t(ctypes.sizeof(value)),
        )
        _check(status, f"setting attribute {attribute} of a product")

    def set_scales(self, weight: Tensor, x: Tensor) -> None:
        """Of the operands' rows: [N] and [T]."""
        self._describe(_DESC_SCALES_A, c_void_p(weight.data_ptr()))
        self._describe(_DESC_SCALES_B, c_void_p(x.data_ptr()))

    def layouts(self) -> tuple[c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]:
        """Operation, A, B, C and D, as the library's functions take them."""
        out = self.out.pointer
        return self.operation.pointer, self.weight.pointer, self.x.pointer, out, out

    def set_tokens(self, tokens: int) -> None:
        if tokens == self._tokens:
            return
        self._checked = None
        columns = c_uint64(tokens)
        for layout in (self.x, self.out):
            status = self._library.cublasLtMatrixLayoutSetAttribute(
                layout.pointer, c_int(_LAYOUT_COLUMNS), byref(columns), c_size_t(8)
            )
            _check(status, "setting the token count")
        self._tokens = tokens

    def set_algorithm(self, handle: _Object, tokens: int, config: CublasLtConfig) -> None:
        """Take `config` for `tokens`, after asking the library whether it can do that.

        One weight shape serves all layers in turn, so that a step asks once a shape.
        """
        if self._checked == (tokens, config):
            return
        self.set_tokens(tokens)
        self._checked = None
        ctypes.memmove(self.algorithm, config.algorithm, ALGORITHM_BYTES)
        result = _Heuristic()
        status = self._library.cublasLtMatmulAlgoCheck(
            handle.pointer, *self.layouts(), self.algorithm, byref(result)
        )
        _check(status, "checking an algorithm")
        if result.workspace_bytes > _WORKSPACE_BYTES:
            raise CublasLtError(f"an algorithm needs {result.workspace_bytes} bytes of workspace")
        self._checked = tokens, config


class CublasLt:
    """One device's handle, workspace and descriptors; used by one thread and stream at a time.

    Descriptors are kept for each weight shape, of which a model has a handful.

    Raises:
        CublasLtError: no library, or it finds no device.
    """

    def __init__(self, device: torch.device) -> None:
        library = _library()
        if library is None:
            raise CublasLtError("libcublasLt is not loaded")
        self._library = library
        with torch.cuda.device(device):
            self._handle = _Object(library, "cublasLt")
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._products: dict[tuple[int, int, torch.dtype, torch.dtype], _Product] = {}

    @classmethod
    def open(cls, device: torch.device) -> CublasLt | None:
        """For a device; None where cuBLASLt cannot be had."""
        if device.type != "cuda":
            return None
        try:
            return cls(device)
        except CublasLtError:
            return None

    def candidates(self, tokens: int, weight: Tensor, result: torch.dtype) -> list[CublasLtConfig]:
        """Algorithms for x [tokens, K] and `weight` [N, K], the library's favourite first.

        Args:
            result: the weight's dtype, or float32; any of them for weights in float8.

        Raises:
            CublasLtError: the library has none.
        """
        product = self._product(weight, result)
        product.set_tokens(tokens)
        if weight.dtype == FLOAT8:  # it asks whether there are scales, not what they are
            product.set_scales(weight, weight)
        preference = _Object(self._library, "cublasLtMatmulPreference")
        limit = c_size_t(_WORKSPACE_BYTES)
        status = self._library.cublasLtMatmulPreferenceSetAttribute(
            preference.pointer, c_int(_PREFERENCE_WORKSPACE_BYTES), byref(limit), c_size_t(8)
        )
        _check(status, "limiting the workspace")
        results = (_Heuristic * _MAX_CANDIDATES)()
        count = c_int()
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle.pointer,
            *product.layouts(),
            preference.pointer,
            c_int(_MAX_CANDIDATES),
            results,
            byref(count),
        )
        _check(status, "asking for algorithms")
        found = (result for result in results[: count.value] if result.state == 0)
        return [CublasLtConfig(bytes(result.algorithm)) for result in found]

    def matmul(
        self,
        x: Tensor,
        weight: Tensor,
        config: CublasLtConfig,
        *,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """`x @ weight.T`, summed in float32, on the current stream; may be captured in a graph.

        Args:
            x: [T, K] contiguous; weight: [N, K] contiguous; both bfloat16, float16 or float8.
                Sums of float8 are in the tensor cores' fast accumulation: fewer bits than float32.
            config: of `candidates`, for the same N, K and dtypes, and for about as many tokens.
            residual: [T, N] contiguous, x's dtype, added to, in place, and returned.
            out: [T, N] contiguous, x's dtype or float32, where to write without `residual`;
                allocated when None. Either is there, in any of the wide dtypes, for float8.
            scales: of operands in float8, float32 contiguous: of the weight's rows, [N], and of
                x's, T of them.

        Returns:
            [T, N], x's dtype or that of `out` or `residual`.

        Raises:
            CublasLtError: the algorithm cannot do that; nothing was written.
        """
        tokens, n = x.shape[0], weight.shape[0]
        if residual is not None:
            out = residual
        elif out is None:
            out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
        addresses = weight.data_ptr(), x.data_ptr(), out.data_ptr()
        if any(address % _ALIGNMENT for address in addresses):
            raise CublasLtError("an operand is not aligned")
        product = self._product(weight, out.dtype)
        if scales is not None:
            product.set_scales(*scales)
        product.set_algorithm(self._handle, tokens, config)
        operation, a, b, c, d = product.layouts()
        one, beta = c_float(1.0), c_float(0.0 if residual is None else 1.0)
        weight_at, x_at, out_at = map(c_void_p, addresses)
        stream = c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
        workspace = c_void_p(self._workspace.data_ptr()), c_size_t(_WORKSPACE_BYTES)
        status = self._library.cublasLtMatmul(
            self._handle.pointer,
            operation,
            byref(one),
            *(weight_at, a, x_at, b),
            byref(beta),
            *(out_at, c, out_at, d),
            product.algorithm,
            *workspace,
            stream,
        )
        _check(status, "multiplying")
        return out

    def _product(self, weight: Tensor, result: torch.dtype) -> _Product:
        n, k = weight.shape
        key = n, k, weight.dtype, result
        if key not in self._products:
            wide = weight.dtype in _WIDE_INPUTS and result in (weight.dtype, torch.float32)
            if not wide and not (weight.dtype == FLOAT8 and result in _RESULTS):
                raise CublasLtError(f"{result} from {weight.dtype} is not supported")
            self._products[key] = _Product(self._library, *key)
        return self._products[key]

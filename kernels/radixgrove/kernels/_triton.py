"""The one place that imports Triton, so that hosts without it still have the torch references.

Kernels take `jit`, `tl` and `pdl_wait` from here. Without Triton `jit` leaves the function as it
is; nothing launches it, since `ops` chooses the references off CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, overload

import torch

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:
    triton = None
    tl = None
    gdc_launch_dependents = gdc_wait = None

__all__ = [
    "CACHE_LINE",
    "can_prefetch",
    "cdiv",
    "gdc_launch_dependents",
    "gdc_wait",
    "jit",
    "next_power_of_2",
    "pdl",
    "prefetch",
    "tl",
]

CACHE_LINE = 128  # bytes


@overload
def jit(function: Callable[..., Any]) -> Any: ...


@overload
def jit(*, varying: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]: ...


def jit(function: Callable[..., Any] | None = None, *, varying: tuple[str, ...] = ()) -> Any:
    """`triton.jit` where Triton exists.

    `varying` names arguments whose value or alignment changes from step to step: nothing is
    compiled anew for them while requests wait.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        if triton is None:
            return kernel
        options = {"do_not_specialize": varying, "do_not_specialize_on_alignment": varying}
        return triton.jit(**options)(kernel)

    return decorate if function is None else decorate(function)


@jit
def prefetch(address, size):  # type: ignore[no-untyped-def]
    """Ask for `size` bytes from each of a block of addresses to come into the L2 cache, and go on.

    Compute capability 9.0 and later. Addresses (pointers or int64) and sizes are multiples of 16
    bytes; a size that is not positive asks for nothing. A block smaller than the threads of a
    program is asked for several times over. Source: PTX ISA, `cp.async.bulk.prefetch`.
    """
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred wanted;
            setp.gt.s32 wanted, $2, 0;
            @wanted cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [address.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def can_prefetch(weight: torch.Tensor) -> bool:
    """Whether the rows of a contiguous matrix are such as `prefetch` takes."""
    return weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.itemsize % 16 == 0


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@lru_cache
def _has_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or os.environ.get("RADIXGROVE_PDL") == "0":
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def pdl(x: torch.Tensor) -> dict[str, bool]:
    """Launch options for programmatic dependent launch: the kernel may start before the previous
    one ends and waits for its results by `gdc_wait`. Hopper and later; `RADIXGROVE_PDL=0` is off.
    """
    return {"PDL": True, "launch_pdl": True} if _has_pdl(x.device) else {"PDL": False}

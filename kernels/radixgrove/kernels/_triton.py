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

__all__ = ["cdiv", "gdc_launch_dependents", "gdc_wait", "jit", "next_power_of_2", "pdl", "tl"]


@overload
def jit(function: Callable[..., Any]) -> Any: ...


@overload
def jit(*, varying: tuple[str, ...]) -> Callable[[Callable[..., Any]], Any]: ...


def jit(function: Callable[..., Any] | None = None, *, varying: tuple[str, ...] = ()) -> Any:
    """`triton.jit` where Triton exists.

    `varying` names arguments that change in value or alignment from step to step: nothing is
    compiled anew for them while requests wait.
    """

    def decorate(kernel: Callable[..., Any]) -> Any:
        if triton is None:
            return kernel
        options = {"do_not_specialize": varying, "do_not_specialize_on_alignment": varying}
        return triton.jit(**options)(kernel)

    return decorate if function is None else decorate(function)


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

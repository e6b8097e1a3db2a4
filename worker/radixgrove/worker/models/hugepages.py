"""Huge pages for weights in a CPU's memory.

A decode step streams every weight once. In pages of 4 KiB that is a miss of the address
translation, and a restart of the hardware's prefetch, every 4 KiB; many systems give pages of 2 MiB
only on request (transparent huge pages in mode `madvise`).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

_HUGE = 2 << 20  # bytes; the size on x86-64, and on arm64 with 4 KiB pages
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # since Linux 6.1: now, not whenever the kernel comes by


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Move the tensors' memory to huge pages where the kernel can; their addresses stay.

    A block that also holds other memory moves whole. It is advice: a kernel without huge pages, or
    a block not wholly mapped, leaves things as they were.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for block in sorted({block for tensor in tensors for block in _blocks(tensor)}):
        madvise(block, _HUGE, _MADV_HUGEPAGE)
        madvise(block, _HUGE, _MADV_COLLAPSE)


def _blocks(tensor: Tensor) -> range:
    """Addresses of the aligned blocks that the tensor's memory touches."""
    if tensor.layout == torch.strided:
        begin, size = tensor.data_ptr(), tensor.nbytes
    else:
        begin, size = torch.ops.mkldnn.data_ptr(tensor), torch.ops.mkldnn._nbytes(tensor)
    return range(begin // _HUGE * _HUGE, begin + size, _HUGE)

"""Host memory for pages: zeroed, in huge pages where the kernel has them, page-locked for CUDA.

Tens of gigabytes take long to lock, and longest in pages of 4 KiB: it happens in the background
while the weights load, several chunks at once.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress

import torch

from radixgrove.worker.execution.host_room import GIB
from radixgrove.worker.execution.memory import MemoryShortage

_CHUNK = GIB
_THREADS = 8
_REPORT_SECONDS = 1.0


class HostMemory:
    """`size` bytes of host memory, usable once `wait` has returned.

    Attributes:
        bytes: [size] uint8.
        chunk: bytes that CUDA knows as one block, a multiple of `unit`: a copy engine takes nothing
            that lies in two.
    """

    def __init__(self, size: int, unit: int, device: torch.device) -> None:
        """Map the memory and, for a CUDA device, begin to lock it.

        Args:
            unit: bytes that must not be parted, those of a page.

        Raises:
            MemoryShortage: the kernel does not give that much.
        """
        try:
            # Private, since the kernel has no huge pages for shared memory by default.
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise _shortage(size, f"mapping it failed: {error}") from error
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        step = math.lcm(unit, mmap.PAGESIZE)
        self.chunk = max(1, _CHUNK // step) * step
        self._closing = False
        self._locked: list[int] = []  # addresses
        self._locking: list[Future[None]] = []
        if device.type == "cuda":
            self._lock(device)

    def _lock(self, device: torch.device) -> None:
        # Each thread begins with device 0, where it would make a context.
        threads = ThreadPoolExecutor(
            min(_THREADS, os.cpu_count() or 1),
            thread_name_prefix="pin",
            initializer=torch.cuda.set_device,
            initargs=(device,),
        )
        for begin in range(0, self.bytes.nbytes, self.chunk):
            self._locking.append(threads.submit(self._lock_chunk, begin))
        threads.shutdown(wait=False)

    def _lock_chunk(self, begin: int) -> None:
        if self._closing:
            return
        size = min(self.chunk, self.bytes.nbytes - begin)
        address = self.bytes.data_ptr() + begin
        ctypes.memset(address, 0, size)  # the kernel hands it out here, on several cores at once
        cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if (error := cuda.cudaHostRegister(address, size, 0)) != cuda.cudaError.success:
            raise _shortage(self.bytes.nbytes, f"CUDA cannot lock it: {error}")
        self._locked.append(address)

    def wait(self, report: Callable[[float], None]) -> None:
        """Until all is locked; `report` gets the fraction done about every second.

        Raises:
            MemoryShortage: CUDA cannot lock that much.
        """
        while self._locking:
            done, waiting = wait(self._locking, _REPORT_SECONDS, return_when=FIRST_EXCEPTION)
            for chunk in done:
                chunk.result()
            if not waiting:
                return
            report(len(done) / len(self._locking))

    def close(self) -> None:
        """Unlock it. Nothing may be copying any more."""
        self._closing = True
        wait(self._locking)
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._locked.clear()


def _shortage(size: int, why: str) -> MemoryShortage:
    return MemoryShortage(
        f"no host tier of {size / GIB:.2f} GiB on this rank: {why}; lower host_cache_gib"
    )

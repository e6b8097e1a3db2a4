"""Small copies from host to device that never wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy of `array` on the device, ordered with the current stream.

    On CUDA it goes through pinned memory of torch's caching host allocator, which does not reuse
    the block before the copy is done. On a CPU the tensor is the array.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class PinnedRing:
    """Pinned memory for short lists that go to a CUDA device step after step, used in turns: such a
    copy allocates nothing, which takes a fraction of the time of `to_device`."""

    def __init__(self, values: int, turns: int, device: torch.device) -> None:
        """
        Args:
            values: most that are sent at once.
            turns: a copy has been done before as many others are asked for.
        """
        self._sources = [torch.empty(values, dtype=torch.int64).pin_memory() for _ in range(turns)]
        self._written = [source.numpy() for source in self._sources]
        self._target = torch.empty(values, dtype=torch.int64, device=device)
        self._turn = 0

    def send(self, values: Sequence[int]) -> Tensor:
        """[N] int64 on the device, until the next call; ordered with the current stream."""
        self._turn = (self._turn + 1) % len(self._sources)
        count = len(values)
        self._written[self._turn][:count] = values
        target = self._target[:count]
        return target.copy_(self._sources[self._turn][:count], non_blocking=True)

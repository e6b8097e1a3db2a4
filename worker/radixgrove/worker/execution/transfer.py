"""Small copies from host to device that never wait for the device."""

from __future__ import annotations

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

"""How many tokens each expert was given, read without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class ExpertLoad:
    """Counters that steps add to on the device, and what is known of them on the host.

    On CUDA a reading is the copy that the reading before has begun, on a stream of its own.
    """

    def __init__(self, counts: Tensor) -> None:
        """
        Args:
            counts: [layers, experts] int64.
        """
        self._counts = counts
        self._stream: torch.cuda.Stream | None = None
        if counts.is_cuda:
            self._stream = torch.cuda.Stream(counts.device)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copy = torch.zeros(counts.shape, dtype=counts.dtype, pin_memory=True)
        self._known: NDArray[np.int64] = np.zeros(counts.shape, dtype=np.int64)

    def clear(self) -> None:
        """Forget what the start has computed; nothing may be running."""
        self._counts.zero_()

    def read(self) -> NDArray[np.int64]:
        """Tokens of each expert, [layers, experts], as of some time ago."""
        if self._stream is None:
            return self._counts.numpy().copy()
        if self._copied.query():  # type: ignore[no-untyped-call]
            self._known = self._copy.numpy().copy()
            with torch.cuda.stream(self._stream):
                self._copy.copy_(self._counts, non_blocking=True)
                self._copied.record()
        return self._known

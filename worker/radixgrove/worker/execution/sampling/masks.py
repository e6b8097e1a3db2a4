"""Masks of tokens: from the host, where they are made, to the logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixgrove.kernels import ops
from radixgrove.worker.execution.transfer import to_device


class TokenMasks:
    """Masks of some of a step's positions.

    Attributes:
        words: [M, W] int32 on the device; bit t % 32 of word t // 32 says whether token t may come.
        positions: which rows of the logits they are for, ascending.
    """

    def __init__(self, words: Tensor, positions: Sequence[int]) -> None:
        self.words = words
        self.positions = positions
        self._rows = to_device(np.array(positions, dtype=np.int64), words.device)

    def apply(self, logits: Tensor) -> None:
        """Set the logits [S, V] of tokens that may not come to -inf."""
        ops.mask_tokens(logits, self.words, self._rows)

    def applied(self, logits: Tensor, *, keep: bool) -> Tensor:
        """The masked logits: a copy if the given ones are to be kept, else those."""
        if keep:
            logits = logits.clone()
        self.apply(logits)
        return logits

    def limits(self, bounds: list[int]) -> NDArray[np.int64]:
        """Of rows with so many positions each, most tokens that each may get: positions behind a
        row's masked ones are not for it, if it has any."""
        each = np.array(bounds, dtype=np.int64)
        ends = np.cumsum(each)
        flags = np.zeros(int(ends[-1]), dtype=np.int64)
        flags[list(self.positions)] = 1
        masked: NDArray[np.int64] = np.add.reduceat(flags, ends - each)
        return np.where(masked > 0, masked, each)


class MaskCopies:
    """Buffers that the host fills, as many as there may be steps in flight, and their copies on the
    device, which a stream of its own makes."""

    def __init__(self, depth: int, device: torch.device) -> None:
        self._device = device
        self._host: list[Tensor] = [torch.empty((0, 0), dtype=torch.int32)] * depth
        self._copies: list[Tensor] = list(self._host)
        self._turn = 0
        self._filled = self._host[0]
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def rows(self, count: int, words: int) -> NDArray[np.int32]:
        """[count, words] for the next step, which nothing in flight reads."""
        self._turn = (self._turn + 1) % len(self._host)
        buffer = self._host[self._turn]
        if buffer.shape[0] < count or buffer.shape[1] != words:
            size = 1 << (count - 1).bit_length(), words
            buffer = torch.empty(size, dtype=torch.int32, pin_memory=self._stream is not None)
            self._host[self._turn] = buffer
            if self._stream is not None:
                # Memory of the copies' own stream: kernels that used another stream's before, like
                # those of the forward that runs now, might write to it after the copy.
                with torch.cuda.stream(self._stream):
                    self._copies[self._turn] = torch.empty_like(buffer, device=self._device)
        self._filled = buffer[:count]
        rows: NDArray[np.int32] = self._filled.numpy()
        return rows

    def send(self, positions: Sequence[int]) -> TokenMasks:
        """What was filled, where the current stream can read it."""
        if self._stream is None:
            return TokenMasks(self._filled, positions)
        copy = self._copies[self._turn][: len(self._filled)]
        with torch.cuda.stream(self._stream):
            copy.copy_(self._filled, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return TokenMasks(copy, positions)

"""A weight matrix as its format stores it, and what products with it need to know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """A rank's [N, K] of a weight matrix, or a stack of such: every tensor has the stack's
    dimensions first.

    Attributes:
        payload: [..., N, K], numbers as the format stores them.
        dtype: of the inputs and outputs of products.
    """

    payload: Tensor
    dtype: torch.dtype

    @classmethod
    def plain(cls, matrix: Tensor) -> Weight:
        """Unquantized."""
        return cls(matrix, matrix.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        rows, columns = self.payload.shape[-2:]
        return rows, columns

    @property
    def device(self) -> torch.device:
        return self.payload.device

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes

    @property
    def format(self) -> str:
        """Names all but the shape that the choice of a kernel depends on."""
        return str(self.payload.dtype).removeprefix("torch.")

    def __getitem__(self, index: int) -> Weight:
        """One of a stack; shares its memory."""
        return Weight(self.payload[index], self.dtype)

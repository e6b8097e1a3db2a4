"""How a checkpoint stores the weights of its projections: one interface for every format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from radixgrove.kernels.weight import Weight
from radixgrove.worker.models.parts import Piece, WeightPart


class Format(Protocol):
    """Allocates weights, and names and slices the checkpoint's tensors that fill them.

    Experts are a stack of weights: `allocate` for one of them with `stack`, then `parts` of
    `weight[i]` with the pieces of each.
    """

    @property
    def name(self) -> str:
        """As messages name it."""
        ...

    def allocate(
        self,
        pieces: Sequence[Piece],
        dtype: torch.dtype,
        device: torch.device,
        stack: tuple[int, ...] = (),
    ) -> Weight:
        """For the pieces of one fused projection, unfilled.

        Args:
            dtype: of inputs and outputs.
            stack: dimensions before those of the matrix.

        Raises:
            ModelError: the format cannot be cut like that.
        """
        ...

    def parts(self, weight: Weight, pieces: Sequence[Piece]) -> Iterator[WeightPart]:
        """What fills a weight of `allocate`, or one of its stack."""
        ...


class Unquantized:
    """Floating-point weights, converted to the model's dtype as they are read."""

    name = "unquantized"

    def allocate(
        self,
        pieces: Sequence[Piece],
        dtype: torch.dtype,
        device: torch.device,
        stack: tuple[int, ...] = (),
    ) -> Weight:
        return Weight(
            torch.empty((*stack, *fused_shape(pieces)), dtype=dtype, device=device), dtype
        )

    def parts(self, weight: Weight, pieces: Sequence[Piece]) -> Iterator[WeightPart]:
        for piece, rows in placed(pieces):
            window = piece.rows, piece.columns
            yield WeightPart(f"{piece.prefix}.weight", weight.payload[rows], piece.shape, window)


UNQUANTIZED = Unquantized()


class Formats:
    """Which format each projection of a checkpoint has; this one: all are unquantized."""

    def of(self, prefix: str) -> Format:
        """The format of the projection of this name, and of all that are computed with it."""
        return UNQUANTIZED


ALL_UNQUANTIZED = Formats()


def fused_shape(pieces: Sequence[Piece]) -> tuple[int, int]:
    return sum(piece.height for piece in pieces), pieces[0].width


def placed(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, slice]]:
    """Each piece with its rows in the fused weight."""
    row = 0
    for piece in pieces:
        yield piece, slice(row, row + piece.height)
        row += piece.height

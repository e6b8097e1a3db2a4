"""Tensors of a checkpoint, and where a rank's slice of each goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # in checkpoints
# As safetensors names types.
FLOATS = ("F64", "F32", "BF16", "F16")
BYTES = "U8"
EXPONENTS = "F8_E8M0"  # powers of two


@dataclass(frozen=True, slots=True)
class WeightPart:
    """A tensor of a checkpoint, or this rank's slice of it, and where it goes.

    Attributes:
        name: in the checkpoint.
        target: view into a parameter; what is copied is converted to its dtype, and broadcast.
        shape: of the whole tensor in the checkpoint, of any rank.
        window: the slice of its first dimensions; the others are taken whole.
        store: takes the window, as the checkpoint has it, in place of the copy: transposes, repacks
            or quantizes it into `target`. A ValueError says what is wrong with the values.
        types: that the tensor may have, as safetensors names them.
        format: which expects the tensor, for a message; "": a decoder without quantization.
        aliases: other names that checkpoints have for it.
        instead: where the same numbers are in checkpoints of another layout, as with one tensor for
            all experts.
        optional: what a checkpoint without the tensor leaves as it is.
        loose: dimensions of size 1 count for nothing, as with scales.
        dummy: what random weights hold here; None: normal numbers.
        deviation: of those.
        draw: a random window of a shape, as a checkpoint has it, for `store`; None: normal numbers.
    """

    name: str
    target: Tensor
    shape: tuple[int, ...]
    window: tuple[slice, ...] = ()
    store: Callable[[Tensor], None] | None = None
    types: tuple[str, ...] = FLOATS
    format: str = ""
    aliases: tuple[str, ...] = ()
    instead: WeightPart | None = None
    optional: bool = False
    loose: bool = False
    dummy: float | None = None
    deviation: float = 0.02  # the usual initialisation: activations stay in range at any depth
    draw: Callable[[tuple[int, ...], torch.Generator], Tensor] | None = None

    @property
    def window_shape(self) -> tuple[int, ...]:
        """Of what is read of the tensor."""
        cut = [held.stop - held.start for held in self.window]
        return (*cut, *self.shape[len(cut) :])


@dataclass(frozen=True, slots=True)
class Piece:
    """A projection of a checkpoint, and what of it this rank holds.

    Pieces of a fused weight have the same columns, and follow each other in its rows.
    """

    prefix: str  # of its tensors' names
    shape: tuple[int, int]  # outputs and inputs of the whole projection
    rows: slice
    columns: slice

    @property
    def height(self) -> int:
        """Rows that this rank holds."""
        return int(self.rows.stop - self.rows.start)

    @property
    def width(self) -> int:
        """Columns that this rank holds."""
        return int(self.columns.stop - self.columns.start)

"""Weights of four bits (e2m1), of which 32 along a row share a power of two: MXFP4 of the Open
Compute Project. They are widened to the model's dtype while they are read, which is exact but where
a number is beyond the dtype's range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.quantization import MXFP4, MXFP4_BLOCK
from radixgrove.worker.models.formats.base import UNQUANTIZED, placed
from radixgrove.worker.models.parts import BYTES, EXPONENTS, Piece, WeightPart

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lower three bits; the fourth: minus
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_BIAS = 127  # of the exponents
_NAN = 255
_DUMMY_EXPONENT = _BIAS - 6  # with which numbers of the usual deviation are within the range
_DUMMY_DEVIATION = 0.02 * 2.0**6


class Mxfp4:
    """Blocks of 16 bytes, two numbers in each, the lower bits first; exponents beside them."""

    name = MXFP4

    def allocate(
        self,
        pieces: Sequence[Piece],
        dtype: torch.dtype,
        device: torch.device,
        stack: tuple[int, ...] = (),
    ) -> Weight:
        for piece in pieces:
            if piece.columns.start % MXFP4_BLOCK or piece.columns.stop % MXFP4_BLOCK:
                raise ModelError(
                    f"{piece.prefix}: a rank's part of {piece.shape[1]} would cut blocks of "
                    f"{MXFP4_BLOCK} that share a scale; lower tp"
                )
        return UNQUANTIZED.allocate(pieces, dtype, device, stack)

    def parts(self, weight: Weight, pieces: Sequence[Piece]) -> Iterator[WeightPart]:
        """Values first, which are multiplied by their scales then."""
        for piece, rows in placed(pieces):
            target = weight.payload[rows].view(piece.height, -1, MXFP4_BLOCK)
            blocks = piece.shape[0], piece.shape[1] // MXFP4_BLOCK
            columns = piece.columns.start // MXFP4_BLOCK, piece.columns.stop // MXFP4_BLOCK
            window = piece.rows, slice(*columns)
            yield WeightPart(
                f"{piece.prefix}.weight_blocks",
                target,
                (*blocks, MXFP4_BLOCK // 2),
                window,
                store=partial(_store_values, target),
                types=(BYTES,),
                format=self.name,
                draw=_draw_values,
            )
            yield WeightPart(
                f"{piece.prefix}.weight_scales",
                target,
                blocks,
                window,
                store=partial(_multiply, target),
                types=(BYTES, EXPONENTS),
                format=self.name,
                draw=_draw_exponents,
            )


def _store_values(target: Tensor, window: Tensor) -> None:
    """[N, blocks, 16] uint8 into [N, blocks, 32]."""
    values = torch.tensor([sign * x for sign in (1.0, -1.0) for x in _MAGNITUDES])
    codes = torch.arange(256)
    pairs = torch.stack((values[codes & 15], values[codes >> 4]), -1).to(target)
    target.copy_(pairs[window.to(target.device).int()].flatten(-2))


def _multiply(target: Tensor, window: Tensor) -> None:
    """[N, blocks, 32] by powers of two, of [N, blocks] exponents.

    Raises:
        ValueError: one is none.
    """
    exponents = window.view(torch.uint8).to(target.device)
    if bool((exponents == _NAN).any()):
        raise ValueError("holds a scale of nan, where all are finite and above 0")
    target.mul_(torch.exp2(exponents.float() - _BIAS)[..., None])


def _draw_values(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random blocks of this shape, of nearly normal numbers."""
    x = torch.empty((*shape, 2), device=generator.device)
    x.normal_(0.0, _DUMMY_DEVIATION, generator=generator)
    between = torch.tensor(_BETWEEN, device=x.device)
    codes = torch.bucketize(x.abs(), between, out_int32=True) + 8 * (x < 0)
    return (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8)


def _draw_exponents(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.full(shape, _DUMMY_EXPONENT, dtype=torch.uint8, device=generator.device)

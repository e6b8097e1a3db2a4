"""Float8 and int8 weights with scales of a tensor, of rows or of blocks, from a checkpoint or made
of unquantized ones while they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
from torch import Tensor

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.quantize import quantize_rows
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.quantization import Activations, Numbers, Scales, Scheme
from radixgrove.worker.models.formats.base import fused_shape, placed
from radixgrove.worker.models.parts import BYTES, EXPONENTS, FLOATS, Piece, WeightPart

# With these, numbers of the usual deviation are well within a format's range.
_DUMMY_SCALES = {Numbers.FLOAT8: 2.0**-12, Numbers.INT8: 2.0**-10}
_DTYPES = {Numbers.FLOAT8: FLOAT8, Numbers.INT8: torch.int8}
_TYPES = {Numbers.FLOAT8: "F8_E4M3", Numbers.INT8: "I8"}  # as safetensors names them


@dataclass(frozen=True, slots=True)
class Scaled:
    """Of a checkpoint.

    Attributes:
        method: that the checkpoint names.
        scale: what its tensors of scales are called.
    """

    method: str
    scheme: Scheme
    scale: str = "weight_scale"

    @property
    def name(self) -> str:
        return f"{self.method} ({self.scheme})"

    def allocate(
        self,
        pieces: Sequence[Piece],
        dtype: torch.dtype,
        device: torch.device,
        stack: tuple[int, ...] = (),
    ) -> Weight:
        scheme, numbers = self.scheme, _DTYPES[self.scheme.numbers]
        n, k = fused_shape(pieces)
        block = self._block(pieces)
        shape = (-(-n // block[0]), -(-k // block[1])) if block else (n,)
        inputs = None
        if scheme.activations == Activations.STATIC:
            inputs = torch.empty((*stack, len(pieces)), dtype=torch.float32, device=device)
        return Weight(
            torch.empty((*stack, n, k), dtype=numbers, device=device),
            dtype,
            scales=torch.empty((*stack, *shape), dtype=torch.float32, device=device),
            block=block,
            activations=scheme.activations,
            activation_bound=scheme.activation_bound,
            input_scale=inputs,
            uniform=scheme.scales == Scales.TENSOR and len(pieces) == 1,
            input_dtype=numbers,
        )

    def _block(self, pieces: Sequence[Piece]) -> tuple[int, int] | None:
        """Blocks of the fused weight: as high as they can be where pieces end within a block; then
        its scales are repeated."""
        if self.scheme.block is None:
            return None
        height, width = self.scheme.block
        for piece in pieces:
            for held, size, block in zip(
                (piece.rows, piece.columns), piece.shape, (height, width), strict=True
            ):
                if held.start % block or (held.stop % block and held.stop != size):
                    raise ModelError(
                        f"{piece.prefix}: a rank's part of {size} would cut blocks of {block} that "
                        "share a scale; lower tp"
                    )
        return gcd(height, *(rows.start for _, rows in placed(pieces))), width

    def parts(self, weight: Weight, pieces: Sequence[Piece]) -> Iterator[WeightPart]:
        assert weight.scales is not None
        for index, (piece, rows) in enumerate(placed(pieces)):
            yield WeightPart(
                f"{piece.prefix}.weight",
                weight.payload[rows],
                piece.shape,
                (piece.rows, piece.columns),
                types=(_TYPES[self.scheme.numbers],),
                format=self.name,
                deviation=0.02 / _DUMMY_SCALES[self.scheme.numbers],
            )
            yield self._scales(weight, piece, rows)
            if weight.input_scale is not None:
                yield self._scale(
                    f"{piece.prefix}.input_scale",
                    weight.input_scale[index],
                    (),
                    aliases=(f"{piece.prefix}.activation_scale",),
                )

    def _scales(self, weight: Weight, piece: Piece, rows: slice) -> WeightPart:
        """Of a piece's weight."""
        assert weight.scales is not None
        name = f"{piece.prefix}.{self.scale}"
        other = "weight_scale_inv" if self.scale == "weight_scale" else "weight_scale"
        aliases = (f"{piece.prefix}.{other}",)
        if self.scheme.scales == Scales.TENSOR:
            return self._scale(name, weight.scales[rows], (), aliases=aliases)
        if self.scheme.scales == Scales.CHANNEL:
            shape = piece.shape[:1]
            return self._scale(name, weight.scales[rows], shape, (piece.rows,), aliases=aliases)
        assert self.scheme.block is not None
        assert weight.block is not None
        (height, width), own = self.scheme.block, weight.block[0]
        window = _blocks(piece.rows, height), _blocks(piece.columns, width)
        shape = tuple(
            _blocks(slice(0, size), b).stop
            for size, b in zip(piece.shape, (height, width), strict=True)
        )
        target = weight.scales[rows.start // own : -(-rows.stop // own)]
        return self._scale(name, target, shape, window, aliases=aliases, repeat=height // own)

    def _scale(
        self,
        name: str,
        target: Tensor,
        shape: tuple[int, ...],
        window: tuple[slice, ...] = (),
        *,
        aliases: tuple[str, ...],
        repeat: int = 1,
    ) -> WeightPart:
        return WeightPart(
            name,
            target,
            shape,
            window,
            store=partial(store_scales, target, repeat),
            types=(*FLOATS, EXPONENTS, BYTES),  # `scale_fmt: ue8m0`, which some save as bytes
            format=self.name,
            aliases=aliases,
            loose=True,
            dummy=_DUMMY_SCALES[self.scheme.numbers] if target.ndim and "weight" in name else 1.0,
        )


@dataclass(frozen=True, slots=True)
class OnlineFloat8(Scaled):
    """Made of unquantized weights while they are read: a scale a row of what this rank holds."""

    @property
    def name(self) -> str:
        return self.method

    def parts(self, weight: Weight, pieces: Sequence[Piece]) -> Iterator[WeightPart]:
        assert weight.scales is not None
        for piece, rows in placed(pieces):
            payload, scales = weight.payload[rows], weight.scales[rows]
            yield WeightPart(
                f"{piece.prefix}.weight",
                payload,
                piece.shape,
                (piece.rows, piece.columns),
                store=partial(_store_quantized, payload, scales),
            )


def _blocks(held: slice, size: int) -> slice:
    """Blocks of `size` that hold these places."""
    return slice(held.start // size, -(-held.stop // size))


def store_scales(target: Tensor, repeat: int, window: Tensor) -> None:
    """Into `target`, each `repeat` times.

    Raises:
        ValueError: one is not finite, or not above 0.
    """
    if window.dtype == torch.uint8:
        window = window.view(torch.float8_e8m0fnu)
    scales = window.float()
    bad = ~(scales.isfinite() & (scales > 0))
    if bool(bad.any()):
        value = scales[bad].flatten()[0].item()
        raise ValueError(f"holds a scale of {value}, where all are finite and above 0")
    if repeat > 1:
        scales = scales.repeat_interleave(repeat, 0)[: len(target)]
    target.copy_(scales)


def _store_quantized(payload: Tensor, scales: Tensor, window: Tensor) -> None:
    quantize_rows(window.to(payload.device), payload, scales)

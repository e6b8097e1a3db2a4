"""A weight matrix as its format stores it, and what products with it need to know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.protocol.model.quantization import Activations

MIN_SCALE = 1e-12  # of inputs and of rows, so that zeros have one


class QuantizedRows(NamedTuple):
    """Inputs of a product, quantized.

    Attributes:
        values: [T, K] float8 or int8, contiguous.
        scales: float32, of all, of rows, or of parts of rows: as of `quantize.quantize_reference`.
            Those of parts are contiguous along T, as the tensor cores' products and the library's
            read them.
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def by_parts(cls, tokens: int, k: int, width: int, device: torch.device) -> QuantizedRows:
        """Unfilled, in float8, for scales of parts of `width` columns."""
        scales = torch.empty((cdiv(k, width), tokens), dtype=torch.float32, device=device)
        return cls(torch.empty((tokens, k), dtype=FLOAT8, device=device), scales.t())

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


@dataclass(frozen=True, slots=True)
class Weight:
    """A rank's [N, K] of a weight matrix, or a stack of such: every tensor has the stack's
    dimensions first.

    Attributes:
        payload: [..., N, K], numbers as the format stores them.
        dtype: of the inputs and outputs of products.
        scales: float32, by which the payload is multiplied: [..., N], of rows, or with `block`
            [..., ceil(N / block rows), ceil(K / block columns)]; None: by nothing.
        block: rows and columns that share a scale.
        activations: how inputs are quantized before the product.
        activation_bound: a row's largest value counts as this at most.
        input_scale: float32, of inputs where `activations` are static: [..., 1], or, before
            `settled`, of each piece of a fused weight.
        uniform: all rows have one scale.
        input_dtype: of quantized inputs, float8 or int8.
    """

    payload: Tensor
    dtype: torch.dtype
    scales: Tensor | None = None
    block: tuple[int, int] | None = None
    activations: Activations = Activations.KEPT
    activation_bound: float | None = None
    input_scale: Tensor | None = None
    uniform: bool = False
    input_dtype: torch.dtype = torch.float8_e4m3fn

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
    def quantized(self) -> bool:
        """Whether a product is more than one of the payload."""
        return self.scales is not None or self.activations != Activations.KEPT

    @property
    def scales_with_inputs(self) -> bool:
        """Whether a factor on all inputs of a token is one on its outputs: not where the inputs are
        rounded by a scale, or up to a bound, that does not follow them."""
        return self.activations != Activations.STATIC and self.activation_bound is None

    @property
    def nbytes(self) -> int:
        others = (x.nbytes for x in (self.scales, self.input_scale) if x is not None)
        return self.payload.nbytes + sum(others)

    @property
    def format(self) -> str:
        """Names all but the shape that the choice of a kernel depends on."""
        name = str(self.payload.dtype).removeprefix("torch.")
        if not self.quantized:
            return name
        scales = "x".join(map(str, self.block)) if self.block else "row"
        return f"{name} {'tensor' if self.uniform else scales} {self.activations}"

    def __getitem__(self, index: int) -> Weight:
        """One of a stack; shares its memory."""
        scales, inputs = self.scales, self.input_scale
        return replace(
            self,
            payload=self.payload[index],
            scales=None if scales is None else scales[index],
            input_scale=None if inputs is None else inputs[index],
        )

    def settled(self) -> Weight:
        """Once it is filled: pieces of a fused weight have one input, which the largest of their
        scales is for."""
        inputs = self.input_scale
        return replace(self, input_scale=None if inputs is None else inputs.amax(-1, keepdim=True))

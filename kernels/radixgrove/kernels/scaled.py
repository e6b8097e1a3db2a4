"""Products of quantized weights on CUDA, by the kernel chosen for them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from radixgrove.kernels.activation import silu_and_mul
from radixgrove.kernels.cublaslt import CublasLt, CublasLtConfig, CublasLtError
from radixgrove.kernels.float8 import FLOAT8, bits
from radixgrove.kernels.gemv import gemv
from radixgrove.kernels.int8 import int8_product, quantize_int8
from radixgrove.kernels.linear import ProductScales
from radixgrove.kernels.matmul import Choice, Scratch, multiply
from radixgrove.kernels.norm import add_rms_norm, rms_norm
from radixgrove.kernels.quantize import quantize, widened
from radixgrove.kernels.skinny import MAX_SKINNY_TOKENS, SkinnyConfig, skinny
from radixgrove.kernels.weight import QuantizedRows, Weight
from radixgrove.protocol.model.quantization import Activations

log = logging.getLogger(__name__)

# cuBLAS's float8 takes K and N in multiples of this.
_ALIGNMENT = 16
_LIBRARY_BLOCK = (128, 128)
_BLOCK_ROWS = 4  # and rows of inputs with scales of parts


def multiply_quantized(
    x: Tensor | QuantizedRows,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    choice: Choice,
    scratch: Scratch,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    added_to: Tensor | None = None,
    silu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `ops.linear`, for a weight that `settled`.

    Sums are in float32, but those of two float8 operands per tensor and row in the tensor cores'
    fast accumulation, with fewer bits: `skinny`'s and the library's. Int8 weights are widened where
    few rows are multiplied, and inputs left as they are.
    """
    if weight.payload.dtype == torch.int8:
        reads = choice.gemv is not None or choice.skinny is not None  # weights are all it waits for
        if weight.activations != Activations.KEPT and not reads:
            quantized = _inputs(x, weight, norm, eps, added_to)
            return _int8(quantized, weight, bias, silu, residual, out)
        weight = replace(weight, activations=Activations.KEPT)
    values, inputs = _inputs(x, weight, norm, eps, added_to)
    assert weight.scales is not None
    scales = ProductScales(weight.scales, weight.block, inputs)
    if choice.gemv is not None:
        return gemv(
            values,
            weight.payload,
            bias,
            silu=silu,
            residual=residual,
            config=choice.gemv,
            out=out,
            scales=scales,
            dtype=weight.dtype,
        )
    if choice.skinny is not None:
        return skinny(
            values,
            weight.payload,
            bias,
            silu=silu,
            residual=residual,
            config=choice.skinny,
            workspace=scratch.skinny,
            out=out,
            scales=scales,
            dtype=weight.dtype,
        )
    if not silu:
        return _plain(values, weight, inputs, bias, choice, scratch, residual, out)
    y = silu_and_mul(_plain(values, weight, inputs, bias, choice, scratch, None, None))
    return y if residual is None else residual.add_(y)


def feed(
    x: Tensor,
    weight: Weight,
    feeds: Weight,
    bias: Tensor | None = None,
    *,
    choice: Choice,
    scratch: Scratch,
    norm: Tensor | None = None,
    eps: float = 1e-6,
    added_to: Tensor | None = None,
) -> Tensor | QuantizedRows:
    """As `ops.feed`, for weights that `settled`."""
    if not weight.quantized:
        x, norm = _added(x, norm, eps, added_to)
        added_to = None
    before: dict[str, Any] = {"norm": norm, "eps": eps}
    if added_to is not None:
        before["added_to"] = added_to
    product = multiply_quantized if weight.quantized else multiply
    where: dict[str, Any] = {"choice": choice, "scratch": scratch}
    quantizes = takes_quantized(x.shape[0], feeds)
    if bias is None and not quantizes:
        return product(x, weight, silu=True, **where, **before)
    if bias is not None or choice.skinny is None or not ends_in_parts(choice.skinny, weight, feeds):
        halves = product(x, weight, bias, **where, **before)
        return _quantize(halves, feeds, silu=True) if quantizes else silu_and_mul(halves)
    values, inputs = _inputs(x, weight, norm, eps, added_to)
    assert weight.scales is not None
    made = QuantizedRows.by_parts(
        x.shape[0], weight.shape[0] // 2, choice.skinny.block_n, weight.device
    )
    skinny(
        values,
        weight.payload,
        silu=True,
        config=choice.skinny,
        workspace=scratch.skinny,
        scales=ProductScales(weight.scales, weight.block, inputs),
        dtype=weight.dtype,
        quantized=made,
    )
    return made


def takes_quantized(tokens: int, weight: Weight) -> bool:
    """Whether the inputs of a product of so many tokens are quantized whichever kernel multiplies,
    so that what makes them had better do it."""
    few = weight.payload.dtype == torch.int8 and tokens <= MAX_SKINNY_TOKENS
    return weight.activations != Activations.KEPT and not few


def ends_in_parts(config: SkinnyConfig, weight: Weight, feeds: Weight) -> bool:
    """Whether a tile of `skinny`, the halves of `weight` multiplied, is one part of the inputs of
    `feeds`, with a scale of its own."""
    if feeds.activations != Activations.GROUP or not weight.quantized:
        return False
    assert feeds.block is not None
    width = feeds.block[1]
    # Both halves' sums, and what they are scaled to, need the registers of eight warps.
    return config.warps >= 8 and config.block_n == width and weight.shape[0] // 2 % width == 0


def takes_heads(weight: Weight, head_dim: int) -> bool:
    """Whether a head of attention is one part of the inputs of the product with `weight`."""
    if weight.activations != Activations.GROUP:
        return False
    assert weight.block is not None
    return weight.block[1] == head_dim and weight.shape[1] % head_dim == 0


def _int8(
    quantized: tuple[Tensor, Tensor | None],
    weight: Weight,
    bias: Tensor | None,
    silu: bool,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    values, inputs = quantized
    assert inputs is not None
    if not silu:
        return int8_product(values, inputs, weight, bias, residual=residual, out=out)
    y = silu_and_mul(int8_product(values, inputs, weight, bias))
    return y if residual is None else residual.add_(y)


def _plain(
    values: Tensor,
    weight: Weight,
    inputs: Tensor | None,
    bias: Tensor | None,
    choice: Choice,
    scratch: Scratch,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    if choice.cublaslt is not None and scratch.cublaslt is not None and bias is None:
        try:
            return _by_algorithm(
                values, weight, inputs, choice.cublaslt, scratch.cublaslt, residual, out
            )
        except CublasLtError as error:  # this token count is not what the algorithm was chosen at
            log.debug("%dx%d for %d tokens: %s", *weight.shape, len(values), error)
    if choice.scaled or choice.cublaslt is not None:
        y = _library(values, weight, inputs)
    else:
        y = _widened(values, weight, inputs)
    if bias is not None:
        y += bias
    if residual is not None:
        return residual.add_(y)
    return y if out is None else out.copy_(y)


def _by_algorithm(
    values: Tensor,
    weight: Weight,
    inputs: Tensor | None,
    config: CublasLtConfig,
    library: CublasLt,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    assert weight.scales is not None
    assert inputs is not None
    tokens, rows = len(values), weight.shape[0]
    if residual is None and out is None:
        out = torch.empty((tokens, rows), dtype=weight.dtype, device=values.device)
    scales = weight.scales, inputs.expand(tokens, 1).contiguous()
    return library.matmul(values, weight.payload, config, residual=residual, out=out, scales=scales)


def _added(
    x: Tensor, norm: Tensor | None, eps: float, added_to: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """x once it has been added, and the norm that is left to do."""
    if added_to is None:
        return x, norm
    assert norm is not None
    return add_rms_norm(x, added_to, norm, eps), None


def _quantize(x: Tensor, weight: Weight, **before: Any) -> QuantizedRows:
    by = quantize_int8 if weight.payload.dtype == torch.int8 else quantize
    return by(x, weight, **before)


def _inputs(
    x: Tensor | QuantizedRows,
    weight: Weight,
    norm: Tensor | None,
    eps: float,
    added_to: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """What is multiplied, and its scales if it is quantized."""
    if isinstance(x, QuantizedRows):
        return x
    if weight.activations != Activations.KEPT:
        return _quantize(x, weight, norm=norm, eps=eps, residual=added_to)
    x, norm = _added(x, norm, eps, added_to)
    return (x if norm is None else rms_norm(x, norm, eps)), None


def library_takes(weight: Weight) -> bool:
    """Whether torch multiplies the weight in float8."""
    if weight.activations == Activations.KEPT or weight.payload.dtype != FLOAT8:
        return False
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    if any(size % _ALIGNMENT for size in weight.shape):
        return False
    if weight.block is not None:
        return weight.block == _LIBRARY_BLOCK and weight.activations == Activations.GROUP
    return weight.uniform or weight.dtype == torch.bfloat16  # all that its product by rows writes


def _library(values: Tensor, weight: Weight, inputs: Tensor | None) -> Tensor:
    """Scales of all where there is one, else of rows, else of blocks."""
    assert weight.scales is not None
    assert inputs is not None
    tokens = values.shape[0]
    if weight.block is not None:  # it wants both along columns, and those of inputs aligned
        values, inputs = _padded(values, inputs)
        of_inputs = inputs.t().contiguous().t()
        of_weight = weight.scales.t()
    elif weight.uniform and weight.activations == Activations.STATIC:
        of_inputs, of_weight = inputs.view(()), weight.scales[:1].view(())
    else:
        of_inputs = inputs.expand(tokens, 1).contiguous()
        of_weight = weight.scales[None, :]
    y = torch._scaled_mm(
        values,
        weight.payload.t(),
        of_inputs,
        of_weight,
        out_dtype=weight.dtype,
        use_fast_accum=weight.block is None,
    )
    return y[:tokens]


def _padded(values: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """With rows of zeros up to a multiple of `_BLOCK_ROWS`."""
    missing = -len(values) % _BLOCK_ROWS
    if not missing:
        return values, inputs
    padded = bits(values).new_zeros(len(values) + missing, values.shape[1])
    padded[: len(values)] = bits(values)
    return padded.view(values.dtype), torch.nn.functional.pad(inputs, (0, 0, 0, missing))


def _widened(values: Tensor, weight: Weight, inputs: Tensor | None) -> Tensor:
    """By torch in the model's dtype, whatever the device: the weight is widened at each call."""
    x = values.to(weight.dtype) if inputs is None else values.float()
    if inputs is not None:
        if weight.activations == Activations.GROUP:
            assert weight.block is not None
            inputs = inputs.repeat_interleave(weight.block[1], 1)[:, : values.shape[1]]
        x = (x * inputs).to(weight.dtype)
    return torch.mm(x, widened(weight).to(weight.dtype).t())

"""Mixtures of experts: what the experts that `routing` chose make of a token.

By the number of tokens,

- few: every pair of token and expert on its own, on CUDA cores (`ExpertPairs`). With few tokens
  hardly two share an expert, and what counts is how fast the weights arrive;
- more: pairs sorted by expert (with few tokens while routing), in tiles on tensor cores
  (`ExpertTiles`). The grid is the most that so many tokens can need, so that a CUDA graph serves
  any routing, and no host waits for counts;
- or torch's `grouped_mm` over the sorted pairs, for weights without biases and with SiLU.

A token's parts are summed in the order in which it chose its experts, by whichever program sees
the last one arrive: the same bits each time. All ways round gate, up and what they make at the same
places, and all but pairs an expert's part before it is weighted. `moe_tuning` measures which is the
fastest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd, inf

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv, next_power_of_2, pdl
from radixgrove.kernels.activation import (
    clamped_swiglu_reference,
    silu_and_mul,
    silu_and_mul_reference,
)
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.moe_pair_kernels import down_pairs_kernel, gate_up_pairs_kernel
from radixgrove.kernels.moe_tile_kernels import (
    combine_kernel,
    down_tiles_kernel,
    gate_up_tiles_kernel,
)
from radixgrove.kernels.norm import add_rms_norm, rms_norm
from radixgrove.kernels.quantize import product_reference, quantize
from radixgrove.kernels.routing import (
    Routed,
    Router,
    Routing,
    route,
    route_and_sort,
    route_reference,
)
from radixgrove.kernels.weight import QuantizedRows, Weight
from radixgrove.protocol.model.config import ClampedSwiGlu
from radixgrove.protocol.model.quantization import Activations

_LEAST_STEP = 16  # along K, of a product on tensor cores
_GROUPED_BLOCK = 16  # pairs, of blocks that `grouped_mm` does not look at
_TILE_BYTES = 256  # of weights that a thread has in registers at once
# Columns of `silu(gate) * up` that share a scale where it is quantized; float8 weights with blocks
# have them as wide, or their inputs are not.
H_WIDTH = 128


@dataclass(frozen=True, slots=True)
class PairsConfig:
    """Rows of an expert's weight that a program owns, the step along K, stages and warps."""

    rows: int = 4
    block_k: int = 512
    stages: int = 3
    warps: int = 4


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Tile of an expert's weight (block_n x block_k), blocks that share it, stages and warps."""

    block_n: int = 64
    block_k: int = 64
    group: int = 1
    stages: int = 4
    warps: int = 4


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """Every pair on its own."""

    gate_up: PairsConfig = PairsConfig()
    down: PairsConfig = PairsConfig()


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tiles of `block_m` pairs of an expert; few put its weights on the long side."""

    block_m: int = 16
    gate_up: TileConfig = TileConfig()
    down: TileConfig = TileConfig()


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """The way of one number of tokens; none is torch's `grouped_mm`: see
    `ExpertWeights.can_be_grouped`."""

    pairs: ExpertPairs | None = None
    tiles: ExpertTiles | None = None

    @property
    def block_m(self) -> int:
        """Pairs of an expert that they are sorted into blocks of; 0: they are not sorted."""
        if self.pairs is not None:
            return 0
        return _GROUPED_BLOCK if self.tiles is None else self.tiles.block_m


GROUPED = ExpertChoice()


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """This rank's experts, as stacks: gate_up [E, 2 N, K] (gate first) and down [E, K, N]; both of
    one format.

    Attributes:
        gate_up_bias: [E, 2 N], down_bias: [E, K], in the weights' dtype; None: there is none, or
            another rank adds it.
        clamped: what is between the two; None: `silu(gate) * up`.
    """

    gate_up: Weight
    down: Weight
    router: Router = field(default_factory=lambda: Router(Routing(1)))
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamped: ClampedSwiGlu | None = None

    @property
    def count(self) -> int:
        return self.gate_up.payload.shape[0]

    @property
    def nbytes(self) -> int:
        biases = (bias.nbytes for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        return self.gate_up.nbytes + self.down.nbytes + sum(biases)

    @property
    def format(self) -> str:
        """Names all but shapes that the choice of a kernel depends on."""
        biases = self.gate_up_bias is not None, self.down_bias is not None
        ending = f" {biases} {self.clamped}" if any(biases) or self.clamped else ""
        return f"{self.gate_up.dtype} {self.gate_up.format} {self.down.format}{ending}"

    @property
    def can_be_grouped(self) -> bool:
        """Whether torch's `grouped_mm` is a way: it takes neither scales nor biases."""
        biased = self.gate_up_bias is not None or self.down_bias is not None
        return not (self.gate_up.quantized or biased or self.clamped)

    @property
    def quantizes_inputs(self) -> bool:
        """Whether tiles multiply float8 by float8; see `experts`."""
        weight = self.gate_up
        if weight.payload.dtype != FLOAT8 or weight.activations == Activations.KEPT:
            return False
        return weight.block is None or weight.block[1] == H_WIDTH


def default_choice(tokens: int, weights: ExpertWeights) -> ExpertChoice:
    """A sound way for what has not been measured."""
    pairs = tokens * weights.router.routing.top_k
    if tokens <= 4:
        return ExpertChoice(pairs=ExpertPairs())
    if weights.quantizes_inputs:
        few = pairs <= 16 * weights.count
        tile = TileConfig(block_n=H_WIDTH, block_k=128, group=1 if few else 4, stages=3, warps=8)
        return ExpertChoice(tiles=ExpertTiles(16 if few else 64, tile, tile))
    if pairs <= 16 * weights.count:
        return ExpertChoice(tiles=ExpertTiles())
    wide = TileConfig(block_n=64, block_k=64, group=4, stages=4, warps=4)
    down = TileConfig(block_n=128, block_k=64, group=4, stages=4, warps=4)
    # In float32, multiplied on CUDA cores, sums of more pairs do not fit a program's registers.
    few = pairs <= 64 * weights.count or weights.gate_up.dtype == torch.float32
    block_m = 64 if few else 128
    return ExpertChoice(tiles=ExpertTiles(block_m, wide, down))


def experts_reference(
    x: Tensor, logits: Tensor, weights: ExpertWeights, residual: Tensor | None = None
) -> Tensor:
    """See `experts`. It asks how many pairs each expert has, so it is for the host."""
    routed = route_reference(logits, weights.router)
    tokens, top_k = routed.ids.shape
    ids = routed.ids.flatten().long()
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids + 1, minlength=weights.count + 1).tolist()
    parts = torch.zeros((tokens * top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    parts = parts.to(torch.promote_types(x.dtype, torch.float32))
    first = counts[0]  # those of other ranks
    for expert, count in enumerate(counts[1:]):
        if not count:
            continue
        pairs = order[first : first + count]
        first += count
        gate_up = _product(
            x[pairs // top_k], weights.gate_up[expert], _of(expert, weights.gate_up_bias)
        )
        if weights.clamped is None:
            h = silu_and_mul_reference(gate_up)
        else:
            h = clamped_swiglu_reference(gate_up, weights.clamped)
        part = _product(h, weights.down[expert], _of(expert, weights.down_bias))
        parts[pairs] = part.to(parts.dtype)
    # A part of another rank's expert is zero, whatever its weight is.
    here = (routed.ids >= 0)[..., None]
    scales = routed.weights.to(parts.dtype)[..., None]
    y = torch.where(here, parts.view(tokens, top_k, -1) * scales, 0.0).sum(1)
    return y.to(x.dtype) if residual is None else residual.add_(y)


def _of(expert: int, biases: Tensor | None) -> Tensor | None:
    return None if biases is None else biases[expert]


def _product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if weight.quantized:
        return product_reference(x, weight, bias).to(x.dtype)
    return torch.nn.functional.linear(x, weight.payload, bias)


def norm_for_experts(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weights: ExpertWeights,
    choice: ExpertChoice,
    added_to: Tensor | None = None,
) -> tuple[Tensor, QuantizedRows | None]:
    """The RMSNorm of x [T, K], or of `added_to` after x has been added in place; and that
    quantized, if `experts` multiplies it so by the way of `choice`. In one kernel."""
    if choice.tiles is not None and weights.quantizes_inputs:
        normed, inputs = torch.empty_like(x), _dynamic(weights.gate_up)
        rows = quantize(x, inputs, norm=norm, eps=eps, residual=added_to, normed=normed)
        return normed, rows
    if added_to is not None:
        return add_rms_norm(x, added_to, norm, eps), None
    return rms_norm(x, norm, eps), None


def quantize_for_experts(x: Tensor, weights: ExpertWeights) -> QuantizedRows:
    """x [T, K] as tiles take it where `weights.quantizes_inputs`; `norm_for_experts` is faster."""
    return quantize(x, _dynamic(weights.gate_up))


def experts(
    x: Tensor,
    logits: Tensor,
    weights: ExpertWeights,
    residual: Tensor | None = None,
    *,
    rows: QuantizedRows | None = None,
    choice: ExpertChoice | None = None,
) -> Tensor:
    """`residual += sum over a token's experts of weight * down(silu(gate(x)) * up(x))`, or what
    `clamped` says in place of SiLU.

    Float8 weights are widened as they are multiplied by pairs, and inputs stay as they are. In
    tiles so they are where the format keeps activations (or blocks are not `H_WIDTH` wide); else
    both operands are float8. x has scales of tokens, or of parts as wide as the weight's blocks,
    and `silu(gate) * up` one for `H_WIDTH` columns; all are dynamic, also where the checkpoint has
    static ones. Sums are in float32, but for these: products of float8 are summed in the tensor
    cores' fast accumulation (about 14 bits), by gate and up over all of K where there are no
    blocks, else over 128 columns.

    Args:
        x: [T, K] contiguous, float32, bfloat16 or float16. logits: [T, experts] float32.
        residual: [T, K] contiguous, x's dtype, updated in place and returned.
        rows: x quantized, as from `norm_for_experts`.

    Returns:
        [T, K], x's dtype; zeros, or the residual, for tokens with no expert on this rank.
    """
    tokens = x.shape[0]
    choice = choice or default_choice(tokens, weights)
    elsewhere = weights.router.places is not None
    out = residual
    if out is None:
        out = torch.zeros_like(x) if elsewhere else torch.empty_like(x)
    if not tokens:
        return out
    if choice.pairs is not None:
        routed = route(logits, weights.router)
        return _by_pairs(x, routed, weights, residual, out, choice.pairs)
    if choice.tiles is not None:
        return _by_tiles(x, rows, logits, weights, residual, out, choice.tiles)
    if not weights.can_be_grouped:
        raise ValueError(f"grouped_mm does not take {weights.format}")
    return _by_groups(x, logits, weights, residual, out)


def _by_pairs(
    x: Tensor,
    routed: Routed,
    weights: ExpertWeights,
    residual: Tensor | None,
    out: Tensor,
    config: ExpertPairs,
) -> Tensor:
    (tokens, hidden), top_k = x.shape, routed.ids.shape[1]
    inner, slots = weights.down.shape[1], next_power_of_2(top_k)
    h = torch.empty((tokens * top_k, inner), dtype=x.dtype, device=x.device)
    own = config.gate_up
    gate_up_pairs_kernel[(cdiv(inner, own.rows), tokens * top_k)](
        x,
        weights.gate_up.payload,
        _scales(weights.gate_up),
        x if weights.gate_up_bias is None else weights.gate_up_bias,
        routed.ids,
        h,
        inner,
        hidden,
        TOP_K=top_k,
        **_ending_options(weights),
        **_scale_options(weights.gate_up),
        **_pairs_options(own, weights.gate_up, inner, 2),
        **pdl(x),
    )
    own = config.down
    down_pairs_kernel[(cdiv(hidden, own.rows), tokens)](
        h,
        weights.down.payload,
        _scales(weights.down),
        x if weights.down_bias is None else weights.down_bias,
        routed.ids,
        routed.weights,
        x if residual is None else residual,
        out,
        hidden,
        inner,
        TOP_K=top_k,
        SLOTS=slots,
        RESIDUAL=residual is not None,
        PLACES=weights.router.places is not None,
        BIASED=weights.down_bias is not None,
        **_scale_options(weights.down),
        **_pairs_options(own, weights.down, hidden, slots),
        **pdl(x),
    )
    return out


def _by_tiles(
    x: Tensor,
    quantized_x: QuantizedRows | None,
    logits: Tensor,
    weights: ExpertWeights,
    residual: Tensor | None,
    out: Tensor,
    config: ExpertTiles,
) -> Tensor:
    (tokens, hidden), top_k = x.shape, weights.router.routing.top_k
    inner, pairs = weights.down.shape[1], tokens * top_k
    own = config.down
    down_tiles = cdiv(hidden, own.block_n)
    routed, made = route_and_sort(
        logits, weights.router, weights.count, config.block_m, counters=tokens * down_tiles
    )
    where = made.order, made.offsets, made.block_expert, made.block_start, made.num_blocks
    shared = {
        "TOP_K": top_k,
        "BLOCK_M": config.block_m,
        "SWAP": config.block_m < 64,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    first = config.gate_up
    gate_tiles = cdiv(inner, first.block_n)
    quantized, rows, x_scales = weights.quantizes_inputs, x, x
    h = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    h_scales = h
    if quantized:
        if first.block_n != H_WIDTH:
            raise ValueError(f"quantized inputs take tiles of {H_WIDTH}, not {first.block_n}")
        rows, x_scales = quantized_x or quantize_for_experts(x, weights)
        h = torch.empty((pairs, inner), dtype=FLOAT8, device=x.device)
        h_scales = x_scales.new_empty(gate_tiles, pairs)
    bound = weights.down.activation_bound
    gate_up_tiles_kernel[(made.most_blocks * gate_tiles,)](
        rows,
        x_scales,
        weights.gate_up.payload,
        _scales(weights.gate_up),
        x if weights.gate_up_bias is None else weights.gate_up_bias,
        *where,
        x,
        h,
        h_scales,
        inner,
        hidden,
        gate_tiles,
        pairs,
        tokens,
        inf if bound is None else bound,
        QUANTIZED=quantized,
        X_PARTS=quantized and weights.gate_up.activations == Activations.GROUP,
        **_ending_options(weights),
        **shared,
        **_scale_options(weights.gate_up),
        **_tile_options(first, weights.gate_up, inner),
        **pdl(x),
    )
    down_tiles_kernel[(made.most_blocks * down_tiles,)](
        h,
        h_scales,
        weights.down.payload,
        _scales(weights.down),
        x if weights.down_bias is None else weights.down_bias,
        *where,
        routed.ids,
        routed.weights,
        torch.empty((pairs, hidden), dtype=x.dtype, device=x.device),
        made.counters,
        x if residual is None else residual,
        out,
        hidden,
        inner,
        down_tiles,
        pairs,
        H_WIDTH=H_WIDTH if quantized else 0,
        RESIDUAL=residual is not None,
        PLACES=weights.router.places is not None,
        BIASED=weights.down_bias is not None,
        **shared,
        **_scale_options(weights.down),
        **_tile_options(own, weights.down, hidden),
        **pdl(x),
    )
    return out


def _ending_options(weights: ExpertWeights) -> dict[str, float]:
    """Of the product with gate and up."""
    clamped = weights.clamped
    return {
        "BIASED": weights.gate_up_bias is not None,
        "LIMIT": 0.0 if clamped is None else clamped.limit,
        "ALPHA": 0.0 if clamped is None else clamped.alpha,
    }


def _scales(weight: Weight) -> Tensor:
    return weight.payload if weight.scales is None else weight.scales


def _scale_options(weight: Weight) -> dict[str, int]:
    high, wide = weight.block or (0, 0)
    if wide % _LEAST_STEP:
        raise ValueError(f"blocks of {wide} columns are no multiple of {_LEAST_STEP}")
    return {"SCALED": weight.scales is not None, "HIGH": high, "WIDE": wide}


def _pairs_options(config: PairsConfig, weight: Weight, rows: int, tiles: int) -> dict[str, int]:
    """As `_tile_options`; a program may load so many tiles at once."""
    size = tiles * config.rows * config.block_k * weight.payload.element_size()
    fits = size <= 32 * config.warps * _TILE_BYTES
    return {
        "ONE_BLOCK": _in_one_block(config.rows, weight, rows),
        "ROWS": config.rows,
        "BLOCK_K": config.block_k,
        "ONE_TILE": fits and config.block_k >= weight.shape[1],
        "STAGES": config.stages,
        "num_warps": config.warps,
    }


def _tile_options(config: TileConfig, weight: Weight, rows: int) -> dict[str, int]:
    """For a tile of a weight; its parts, gate and up, have so many rows each."""
    wide = weight.block[1] if weight.block else H_WIDTH
    # A step along K is within one block, and one group of quantized inputs.
    return {
        "BLOCK_N": config.block_n,
        "BLOCK_K": gcd(config.block_k, wide, H_WIDTH),
        "ONE_BLOCK": _in_one_block(config.block_n, weight, rows),
        "GROUP": config.group,
        "STAGES": config.stages,
        "num_warps": config.warps,
    }


def _in_one_block(height: int, weight: Weight, rows: int) -> bool:
    """Whether so many rows, from a multiple of them on, are in one block of the weight's scales, in
    all of its parts, which have `rows`."""
    return (
        weight.block is not None and weight.block[0] % height == 0 and rows % weight.block[0] == 0
    )


def _dynamic(weight: Weight) -> Weight:
    """With inputs that are quantized by their own values."""
    if weight.activations != Activations.STATIC:
        return weight
    return replace(weight, activations=Activations.TOKEN)


def _by_groups(
    x: Tensor, logits: Tensor, weights: ExpertWeights, residual: Tensor | None, out: Tensor
) -> Tensor:
    router = weights.router
    routed, made = route_and_sort(
        logits, router, weights.count, _GROUPED_BLOCK, zeroed=router.places is not None
    )
    rows = x.index_select(0, made.order // router.routing.top_k)
    ends = made.offsets[1:]
    grouped_mm = torch.nn.functional.grouped_mm
    h = silu_and_mul(grouped_mm(rows, weights.gate_up.payload.transpose(1, 2), offs=ends))
    y = grouped_mm(h, weights.down.payload.transpose(1, 2), offs=ends)
    return combine(y, made.positions, routed.weights, residual, out)


def combine(
    y: Tensor, positions: Tensor, scales: Tensor, residual: Tensor | None, out: Tensor
) -> Tensor:
    """Each token's rows of `y`, which is in the order of experts, times their weights, in `out`.

    Args:
        y: [pairs, K]. positions: [pairs], as of `Sorted`. scales: [T, top_k] float32.
        residual: [T, K], added; it may be `out`.
    """
    (tokens, hidden), top_k = out.shape, scales.shape[1]
    block = min(1024, next_power_of_2(hidden))
    combine_kernel[(tokens, cdiv(hidden, block))](
        y,
        positions,
        scales,
        out if residual is None else residual,
        out,
        hidden,
        TOP_K=top_k,
        RESIDUAL=residual is not None,
        BLOCK=block,
        num_warps=4,
        **pdl(out),
    )
    return out

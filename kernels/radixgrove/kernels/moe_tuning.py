"""How experts are computed, by number of tokens: measured on the device, and kept on disk.

Beside each other stand pairs, tiles of several heights, and torch's `grouped_mm`. The times of the
two products add up, so that the tile of each is chosen with the other's left alone.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from radixgrove.kernels import moe
from radixgrove.kernels.float8 import FLOAT8
from radixgrove.kernels.moe import (
    GROUPED,
    ExpertChoice,
    ExpertPairs,
    ExpertTiles,
    ExpertWeights,
    PairsConfig,
    TileConfig,
)
from radixgrove.kernels.routing import MOST_FORMS, route, route_and_sort
from radixgrove.kernels.timing import fastest
from radixgrove.kernels.tuned_files import keep, tuned_path

# Token counts that are measured; others take the next larger one's choice.
EXPERT_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Some of them take whole rows of the usual experts at once.
PAIRS_CANDIDATES, FLOAT8_PAIRS_CANDIDATES = (
    tuple(PairsConfig(rows=rows, block_k=block_k, warps=warps) for rows, block_k, warps in options)
    for options in (
        ((4, 512, 4), (8, 256, 4), (8, 512, 4), (4, 1024, 4), (2, 1024, 4), (2, 2048, 4)),
        ((4, 1024, 4), (8, 512, 4), (8, 1024, 8), (2, 1024, 4), (2, 2048, 4), (4, 2048, 4)),
    )
)
# Few pairs: the weights' tile counts, and how much of them is on its way. Many: tensor cores do.
_LOW = (
    TileConfig(block_n=64, block_k=128, stages=4),
    TileConfig(block_n=128, block_k=64, stages=4),
    TileConfig(block_n=32, block_k=128, stages=4),
)
_HIGH = (
    TileConfig(block_n=64, block_k=64, group=4, stages=4),
    TileConfig(block_n=128, block_k=64, group=4, stages=4, warps=8),
    TileConfig(block_n=128, block_k=64, group=8, stages=3, warps=8),
)
TILE_CANDIDATES = {16: _LOW, 32: _LOW, 64: _HIGH, 128: _HIGH}
# Where inputs are quantized too: a line of memory along K, and the columns that share a scale.
_LOW_FLOAT8, _HIGH_FLOAT8 = (
    tuple(
        TileConfig(moe.H_WIDTH, block_k=128, group=group, stages=stages, warps=warps)
        for group, stages, warps in options
    )
    for options in (
        ((1, 3, 4), (1, 4, 4), (1, 3, 8), (1, 6, 8)),
        ((4, 3, 8), (8, 4, 8), (4, 3, 4)),
    )
)
FLOAT8_TILE_CANDIDATES = {
    16: _LOW_FLOAT8,
    32: _LOW_FLOAT8,
    64: _HIGH_FLOAT8,
    128: _HIGH_FLOAT8[:2],  # sums of both halves fill the registers of eight warps
}
# Past it hardly a pair has an expert of its own, and each would read all of that.
_MAX_PAIR_TOKENS = 16
# Of a block of compute capability 9.0, less some for what the compiler needs beside tiles.
_SHARED_MEMORY_BYTES = 225 << 10
_COLD_LAYERS = 4  # of weights in turn, so that the L2 cache does not hold them
_FORMAT = 3  # of the file

Pick = Callable[[Sequence[ExpertChoice]], ExpertChoice]
_Key = tuple[int, ...]  # token bucket, experts here and in all, widths, experts of a token


class ExpertTuner:
    """Chooses a way by token count and the shape of a layer's experts.

    Untuned shapes, and float32, take `moe.default_choice`.
    """

    def __init__(self) -> None:
        self._choices: dict[tuple[str, _Key], ExpertChoice] = {}

    def choose(self, tokens: int, experts: int, weights: ExpertWeights) -> ExpertChoice:
        """For `tokens` rows; `experts`: that tokens choose from, on all ranks."""
        key = weights.format, _key(bucket_of(tokens), experts, weights)
        return self._choices.get(key) or moe.default_choice(tokens, weights)

    def jobs(
        self, layers: Sequence[ExpertWeights], experts: int, residual: bool, max_tokens: int
    ) -> list[Callable[[], object]]:
        """Launches of all that `tune` has to measure, which compile it; empty off CUDA.

        Weights may be loading: they are read, and what comes out is dropped.

        Args:
            residual: as for `tune`.
        """
        if not layers or not _is_tunable(layers[0]):
            return []
        known = _read(_path(layers[0]))
        routing: dict[object, Callable[[], object]] = {}
        products: dict[object, Callable[[], object]] = {}
        for bucket in _buckets(max_tokens):
            if _key(bucket, experts, layers[0]) in known:
                continue
            trial = _Trial(layers, experts, residual, bucket)
            for choice in candidates(bucket, layers[0]):
                # Products need them, and no two threads are to compile the same.
                form = choice.block_m, min(bucket, MOST_FORMS)
                routing.setdefault(form, partial(trial.route, choice))
                products.setdefault(choice, partial(trial.run_once, choice))
        return [*routing.values(), *products.values()]

    def tune(
        self,
        layers: Sequence[ExpertWeights],
        experts: int,
        residual: bool,
        max_tokens: int,
        report: Callable[[str, float], None] = lambda message, fraction: None,
    ) -> None:
        """Measure on the model's own weights, with random routing, or read what was measured.

        Nothing off CUDA or in float32.

        Args:
            experts: that tokens choose from, on all ranks.
            residual: what the layers come to here is added to something.
            max_tokens: the most tokens of a step.
            report: called with a message and the fraction done.
        """
        if not layers or not _is_tunable(layers[0]):
            return
        path = _path(layers[0])
        known = _read(path)
        before = len(known)
        buckets = _buckets(max_tokens)
        for done, bucket in enumerate(buckets):
            key = _key(bucket, experts, layers[0])
            if key not in known:
                report(f"tuning {experts} experts for {bucket} tokens", done / len(buckets))
                trial = _Trial(layers, experts, residual, bucket)
                known[key] = search(
                    bucket, layers[0], partial(fastest, trial=trial, what=str(trial))
                )
            self._choices[layers[0].format, key] = known[key]
        if len(known) > before:
            keep(path, [{"key": list(key), **asdict(choice)} for key, choice in known.items()])


def bucket_of(tokens: int) -> int:
    """The measured token count from which `tokens` take their choice."""
    return EXPERT_BUCKETS[min(bisect_left(EXPERT_BUCKETS, tokens), len(EXPERT_BUCKETS) - 1)]


def search(tokens: int, weights: ExpertWeights, pick: Pick) -> ExpertChoice:
    """The fastest way for so many tokens.

    Args:
        pick: the fastest of some, of which the first is known to work.
    """
    found = [moe.default_choice(tokens, weights)]
    if tokens <= _MAX_PAIR_TOKENS:
        pairs = ExpertPairs()
        for product in ("gate_up", "down"):
            tried = [_with_pairs(pairs, product, config) for config in _pairs(weights)]
            pairs = pick(tried).pairs or pairs
        found.append(ExpertChoice(pairs=pairs))
    for block_m in _heights(tokens, weights):
        ups, downs = _fitting(block_m, 2, weights), _fitting(block_m, 1, weights)
        tiles = ExpertTiles(block_m, ups[0], downs[0])
        for product, configs in (("gate_up", ups), ("down", downs)):
            tiles = pick([_with_tiles(tiles, product, config) for config in configs]).tiles or tiles
        found.append(ExpertChoice(tiles=tiles))
    return pick([*found, GROUPED] if weights.can_be_grouped else found)


def candidates(tokens: int, weights: ExpertWeights) -> Iterator[ExpertChoice]:
    """Every kernel that `search` may time, in few choices."""
    yield moe.default_choice(tokens, weights)
    if tokens <= _MAX_PAIR_TOKENS:
        for config in _pairs(weights):
            yield ExpertChoice(pairs=ExpertPairs(config, config))
    for block_m in _heights(tokens, weights):
        ups, downs = _fitting(block_m, 2, weights), _fitting(block_m, 1, weights)
        for index in range(max(len(ups), len(downs))):
            pair = ups[index % len(ups)], downs[index % len(downs)]
            yield ExpertChoice(tiles=ExpertTiles(block_m, *pair))
    if weights.can_be_grouped:
        yield GROUPED


def _pairs(weights: ExpertWeights) -> tuple[PairsConfig, ...]:
    """A step along K has about as many bytes whatever the weights are."""
    float8 = weights.gate_up.payload.dtype == FLOAT8
    return FLOAT8_PAIRS_CANDIDATES if float8 else PAIRS_CANDIDATES


def _with_pairs(pairs: ExpertPairs, product: str, config: PairsConfig) -> ExpertChoice:
    return ExpertChoice(pairs=replace(pairs, **{product: config}))


def _with_tiles(tiles: ExpertTiles, product: str, config: TileConfig) -> ExpertChoice:
    if product == "gate_up":
        return ExpertChoice(tiles=replace(tiles, gate_up=config))
    return ExpertChoice(tiles=replace(tiles, down=config))


def _heights(tokens: int, weights: ExpertWeights) -> list[int]:
    """Pairs of a block that are worth timing: about what an expert gets."""
    each = tokens * weights.router.routing.top_k / weights.count
    if each <= 8:
        return [16]
    if each <= 32:
        return [16, 32, 64]
    return [64, 128] if each > 48 else [32, 64]


def _fitting(block_m: int, halves: int, weights: ExpertWeights) -> list[TileConfig]:
    """Tiles that a block's shared memory holds with `halves` of a fused weight."""
    float8 = weights.quantizes_inputs
    itemsize = 1 if float8 else 2

    def fits(config: TileConfig) -> bool:
        rows = block_m + halves * config.block_n
        return config.stages * rows * config.block_k * itemsize <= _SHARED_MEMORY_BYTES

    return list(filter(fits, (FLOAT8_TILE_CANDIDATES if float8 else TILE_CANDIDATES)[block_m]))


def _buckets(max_tokens: int) -> list[int]:
    last = bucket_of(max_tokens)
    return [bucket for bucket in EXPERT_BUCKETS if bucket <= last]


def _is_tunable(weights: ExpertWeights) -> bool:
    weight = weights.gate_up
    return weight.device.type == "cuda" and weight.dtype != torch.float32


def _key(bucket: int, experts: int, weights: ExpertWeights) -> _Key:
    hidden, inner = weights.down.shape
    top_k = weights.router.routing.top_k
    return bucket, experts, weights.count, hidden, inner, top_k


def _path(weights: ExpertWeights) -> Path:
    tiles = FLOAT8_TILE_CANDIDATES if weights.quantizes_inputs else TILE_CANDIDATES
    what = (_FORMAT, EXPERT_BUCKETS, _pairs(weights), tiles)
    return tuned_path("experts", weights.gate_up.device, weights.format, repr(what))


def _read(path: Path) -> dict[_Key, ExpertChoice]:
    """Nothing of a file that is not as `tune` leaves it."""
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text())
        return {tuple(map(int, entry.pop("key"))): _choice(**entry) for entry in entries}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _choice(pairs: dict[str, Any] | None, tiles: dict[str, Any] | None) -> ExpertChoice:
    if pairs is not None:
        return ExpertChoice(
            pairs=ExpertPairs(PairsConfig(**pairs["gate_up"]), PairsConfig(**pairs["down"]))
        )
    if tiles is None:
        return GROUPED
    return ExpertChoice(
        tiles=ExpertTiles(
            int(tiles["block_m"]), TileConfig(**tiles["gate_up"]), TileConfig(**tiles["down"])
        )
    )


class _Trial:
    """Experts of a few layers for so many tokens, routed at random as new models do: evenly.

    They are called as a decoder does, behind a norm and with a count of tokens, and with a residual
    stream where the decoder has one for them: nothing is compiled anew for these.
    """

    def __init__(
        self, layers: Sequence[ExpertWeights], experts: int, residual: bool, tokens: int
    ) -> None:
        self.device = layers[0].gate_up.device
        self._tokens, self._experts = tokens, experts
        self._has_residual = residual
        self._layers = [_uncounted(layer) for layer in layers[:_COLD_LAYERS]]
        self._operands: _Operands | None = None

    def __str__(self) -> str:
        return f"{self._experts} experts for {self._tokens} tokens"

    def _given(self) -> _Operands:
        if self._operands is None:
            weight, shape = self._layers[0].gate_up, (self._tokens, self._experts)
            x = torch.randn(self._tokens, weight.shape[1], device=self.device).to(weight.dtype)
            logits = [torch.randn(*shape, device=self.device) for _ in self._layers]
            self._operands = _Operands(x, torch.zeros_like(x), torch.ones_like(x[0]), logits)
        return self._operands

    def run(self, choice: ExpertChoice) -> None:
        for layer, logits in zip(self._layers, self._given().logits, strict=True):
            self._run(choice, layer, logits)

    def run_once(self, choice: ExpertChoice) -> None:
        self._run(choice, self._layers[0], self._given().logits[0])

    def _run(self, choice: ExpertChoice, layer: ExpertWeights, logits: torch.Tensor) -> None:
        given = self._given()
        residual = given.residual if self._has_residual else None
        x, rows = moe.norm_for_experts(given.x, given.norm, 1e-6, layer, choice)
        moe.experts(x, logits, layer, residual, rows=rows, choice=choice)

    def route(self, choice: ExpertChoice) -> None:
        """What comes before the products; the norm also as it is where it adds to the stream."""
        given, layer = self._given(), self._layers[0]
        for added_to in (None, given.residual):
            moe.norm_for_experts(given.x, given.norm, 1e-6, layer, choice, added_to)
        if choice.tiles and layer.quantizes_inputs:  # behind a sum over ranks, without the norm
            moe.quantize_for_experts(given.x, layer)
        if choice.block_m:
            route_and_sort(given.logits[0], layer.router, layer.count, choice.block_m)
        else:
            route(given.logits[0], layer.router)


@dataclass(frozen=True, slots=True)
class _Operands:
    """x and the residual stream [T, K], a norm's weight [K], and logits [T, experts] by layer."""

    x: torch.Tensor
    residual: torch.Tensor
    norm: torch.Tensor
    logits: list[torch.Tensor]


def _uncounted(layer: ExpertWeights) -> ExpertWeights:
    """Counting the tokens of its experts, if it does, where that is not read."""
    load = layer.router.load
    if load is None:
        return layer
    return replace(layer, router=replace(layer.router, load=torch.zeros_like(load)))

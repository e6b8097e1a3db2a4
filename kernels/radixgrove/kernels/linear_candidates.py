"""The kernels that a product of the model is measured with, by token count and shape."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from radixgrove.kernels._triton import cdiv, next_power_of_2
from radixgrove.kernels.cublaslt import CublasLtError
from radixgrove.kernels.gemv import GemvConfig
from radixgrove.kernels.matmul import CUBLAS, SCALED, Choice, Scratch
from radixgrove.kernels.scaled import ends_in_parts, library_takes, takes_quantized
from radixgrove.kernels.skinny import MAX_SKINNY_TOKENS, SkinnyConfig, within
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.quantization import Activations

log = logging.getLogger(__name__)

# Token counts that are measured; others take the next larger one's choice.
BUCKETS = (1, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
# Past this many tokens an addition to the residual costs enough to ask who should do it.
MANY_TOKENS = 256
# Up to 4,096 columns a step measured on an H200 for each product of two models: the best, or within
# 2 % of it. Rows of 4,096 columns are fastest whole, without a pipeline; so longer ones are tried.
GEMV_CANDIDATES = tuple(
    Choice(gemv=GemvConfig(rows=rows, block_k=block_k, warps=warps))
    for rows, block_k, warps in (
        (8, 512, 2),
        (8, 512, 4),
        (4, 1024, 4),
        (4, 2048, 4),
        (8, 1024, 4),
        (2, 4096, 4),
        (1, 16384, 8),
        (2, 16384, 8),
    )
)
# Every one is compiled for every ending and several token counts, so only what has won is here.
SKINNY_CANDIDATES = tuple(
    Choice(skinny=SkinnyConfig(block_n=64, block_k=block_k, splits=splits, stages=stages))
    for block_k, stages in ((128, 4), (64, 6))
    for splits in (4, 2, 1)
)
# Of weights in float8: steps of as many bytes, or more of them on their way. High tiles read x half
# as often, and may be a part of the next product's inputs, which is quantized at their end.
FLOAT8_CANDIDATES = tuple(
    Choice(
        skinny=SkinnyConfig(
            block_n=block_n, block_k=block_k, splits=splits, stages=stages, warps=warps
        )
    )
    for block_n, block_k, stages, warps in (
        (64, 256, 3, 4),
        (64, 256, 4, 4),
        (64, 128, 6, 4),
        (128, 128, 3, 8),
        (128, 128, 4, 4),
    )
    for splits in (4, 2, 1)
)
_HIGH_TILE_TOKENS = 64  # a tile of 128 rows has registers for the sums of so many
# What a block of compute capability 9.0 has, less some for what the compiler needs beside tiles.
_SHARED_MEMORY_BYTES = 225 << 10
# Up to this many tokens `skinny` may win with any ending, past it with SiLU-and-multiply only.
_SKINNY_WITHOUT_SILU = 64
_SKINNY_ONE_TILE = 32  # up to here the first tile that fits has always won
Key = tuple[str, int, int, int, bool]  # the weight's format, token bucket, N, K, silu


@dataclass(frozen=True, slots=True)
class Projection:
    """A kind of product of the model, as `ops.linear` is asked for it.

    `weights`: of several layers, the same shape. `every_token`: it multiplies all tokens of a
    prefill step, not only those that are sampled from. `wide`: its output is float32. `normed`: a
    norm precedes it, without `residual`. `feeds`: with `silu`, the weight that takes the result.
    """

    weights: Sequence[Weight]
    silu: bool = False
    residual: bool = False
    biased: bool = False
    every_token: bool = True
    wide: bool = False
    normed: bool = True
    feeds: Weight | None = None

    @property
    def endings(self) -> tuple[bool, ...]:
        """What kernels for it differ by, beside the weight's format."""
        return self.silu, self.residual, self.biased, self.wide, self.normed

    @property
    def result_dtype(self) -> torch.dtype:
        return torch.float32 if self.wide else self.weights[0].dtype

    @property
    def outputs(self) -> int:
        rows = self.weights[0].shape[0]
        return rows // 2 if self.silu else rows

    def key(self, bucket: int) -> Key:
        weight = self.weights[0]
        return (weight.format, bucket, *weight.shape, self.silu)


def bucket_of(tokens: int) -> int:
    """The measured token count from which `tokens` take their choice."""
    return BUCKETS[min(bisect_left(BUCKETS, tokens), len(BUCKETS) - 1)]


def own_candidates(bucket: int, projection: Projection, scratch: Scratch) -> list[Choice]:
    """Of our kernels, those worth timing for a shape."""
    if bucket == 1:
        widest = max(2048, next_power_of_2(projection.weights[0].shape[1]))
        return [one for one in GEMV_CANDIDATES if one.gemv and one.gemv.block_k <= widest]
    if bucket > MAX_SKINNY_TOKENS:
        return []
    fitting = partial(_fits, bucket=bucket, projection=projection, scratch=scratch)
    if projection.weights[0].quantized:
        return list(filter(fitting, FLOAT8_CANDIDATES))
    own = list(filter(fitting, SKINNY_CANDIDATES))
    if not projection.silu:
        return own[: bucket <= _SKINNY_WITHOUT_SILU]
    return own[:1] if bucket <= _SKINNY_ONE_TILE else own


def _fits(choice: Choice, bucket: int, projection: Projection, scratch: Scratch) -> bool:
    """Whether a `skinny` kernel has the memory that it needs, and the chip enough programs."""
    config = choice.skinny
    if config is None:
        return False
    if (block := projection.weights[0].block) and not within(config.block_k, block):
        return False
    if config.block_n > 64 and bucket > _HIGH_TILE_TOKENS:
        return False
    weight, feeds = projection.weights[0], projection.feeds
    silu, n = projection.silu, projection.outputs
    if feeds is not None and takes_quantized(bucket, feeds):
        silu = ends_in_parts(config, weight, feeds)
        n = n if silu else weight.shape[0]
    chip = torch.cuda.get_device_properties(weight.device)
    kept = weight.activations == Activations.KEPT or weight.payload.dtype == torch.int8
    item_bytes = weight.dtype.itemsize if kept else weight.payload.itemsize
    shared = config.shared_memory_bytes(bucket, item_bytes, silu=silu)
    splits = _splits(cdiv(n, config.block_n), chip.multi_processor_count)
    tried = (1, splits) if projection.silu or weight.quantized else (splits,)
    if weight.quantized:  # a multiprocessor has room for two programs of few stages
        tried = (*tried, 2 * splits)
    return (
        config.splits in tried
        and shared <= _SHARED_MEMORY_BYTES
        and scratch.skinny.fits(config, bucket, n, silu)
    )


def _splits(tiles: int, multiprocessors: int) -> int:
    """Of 1, 2 and 4 the largest with which every program has a multiprocessor of its own."""
    return next((ways for ways in (4, 2) if tiles * ways <= multiprocessors), 1)


def candidates(bucket: int, projection: Projection, scratch: Scratch) -> list[Choice]:
    """cuBLAS first, then all that may beat it."""
    weight, library = projection.weights[0], [CUBLAS]
    if weight.quantized and library_takes(weight):
        library.append(SCALED)
    by_algorithm = not weight.quantized or (SCALED in library and weight.block is None)
    if bucket > 1 and by_algorithm and not projection.biased and scratch.cublaslt is not None:
        try:
            found = scratch.cublaslt.candidates(bucket, weight.payload, projection.result_dtype)
            library += [Choice(cublaslt=config) for config in found]
        except CublasLtError as error:
            log.debug("no algorithms of cuBLASLt: %s", error)
    deferred = []
    if bucket > MANY_TOKENS and projection.residual and not projection.biased:
        deferred = [replace(choice, deferred=True) for choice in library]
    return library + deferred + own_candidates(bucket, projection, scratch)

"""Rotary position embeddings (Su et al., RoFormer, 2021) and their published scalings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from radixgrove.protocol.model.config import RopeConfig


def rotary_table(rope: RopeConfig, head_dim: int, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of positions 0 .. length - 1, for heads in the order of `rotary_order`.

    Returns:
        [length, head_dim] float32: head_dim / 2 cosines, then as many sines; those of pairs that do
        not rotate are 1 and 0. Computed in float64, so that long positions stay exact.
    """
    frequencies, magnitude = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    table = identity_table(head_dim, length, device)
    for half, values in zip(table.chunk(2, dim=1), (angles.cos(), angles.sin()), strict=True):
        half[:, : len(frequencies)] = values * magnitude
    return table


def rotary_order(rope: RopeConfig, head_dim: int) -> list[int] | None:
    """Which of a checkpoint's dimensions of a head stands where, so that dimension i and
    i + head_dim / 2 are a pair: those that rotate first. None: each where it is.

    Products of queries and keys do not depend on the order, as long as both have the same.
    """
    rotated = rope.rotated(head_dim)
    if rotated == head_dim and not rope.interleaved:
        return None
    turned, rest = range(rotated), range(rotated, head_dim)
    low, high = turned[: rotated // 2], turned[rotated // 2 :]
    if rope.interleaved:
        low, high = turned[::2], turned[1::2]
    middle = len(rest) // 2
    return [*low, *rest[:middle], *high, *rest[middle:]]


def identity_table(head_dim: int, length: int, device: torch.device) -> Tensor:
    """As `rotary_table`, of layers that do not rotate."""
    table = torch.zeros((length, head_dim), device=device)
    table[:, : head_dim // 2] = 1.0
    return table


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians a position of pairs that rotate, [P] float64, and the factor on cosines and sines."""
    rotated = rope.rotated(head_dim)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
    return _SCALINGS[rope.kind](1.0 / rope.theta**exponents, rope)


def _default(base: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    return base, 1.0


def _linear(base: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    return base / float(rope.parameters["factor"]), 1.0


def _llama3(base: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, blended between."""
    parameters = rope.parameters
    factor = float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    original = float(parameters["original_max_position_embeddings"])
    turns = original * base / (2 * math.pi)  # rotations within the original context
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * base / factor + blend * base, 1.0


def _yarn(base: Tensor, rope: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): interpolate by parts, and sharpen attention by a magnitude."""
    parameters = rope.parameters
    original = float(parameters["original_max_position_embeddings"])
    factor = float(parameters["factor"])
    size = base.numel()

    def dimension(rotations: float) -> float:
        """Index of the pair that turns `rotations` times within the original context."""
        return size * math.log(original / (rotations * 2 * math.pi)) / math.log(rope.theta)

    low = dimension(float(parameters.get("beta_fast", 32)))
    high = dimension(float(parameters.get("beta_slow", 1)))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * size - 1)
    ramp = (torch.arange(size, dtype=torch.float64) - low) / ((high - low) or 1e-3)
    stretched = ramp.clamp(0, 1)
    frequencies = stretched * base / factor + (1 - stretched) * base
    return frequencies, _yarn_magnitude(parameters, factor)


def _yarn_magnitude(parameters: Mapping[str, Any], factor: float) -> float:
    """The factor given, or the paper's; DeepSeek's `mscale`s make it a ratio of two of them."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])
    if "mscale" in parameters and "mscale_all_dim" in parameters:
        return magnitude(parameters["mscale"]) / magnitude(parameters["mscale_all_dim"])
    return magnitude(1.0)


_SCALINGS: dict[str, Callable[[Tensor, RopeConfig], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}

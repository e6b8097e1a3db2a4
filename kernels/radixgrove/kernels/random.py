"""Counter-based random numbers for sampling: a pure function of (seed, position, index).

The random number that decides token `index` at `position` of a sequence depends on nothing else,
so a request draws the same tokens whatever batch, step, rank or device computes them. The Triton
sampler (`race.py`) computes the same bits.

A 64-bit key is mixed from (seed, position) by `mix`, the 32-bit finalizer "lowbias32" of Chris
Wellons' hash prospector (multiplications and xor-shifts). Each index then goes through one such
finalizer, with a word of the key before each of its multiplications: streams with close first
words do not share numbers, since their second words differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: separates consecutive positions
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B
KEY_SALT = 0x85EBCA6B  # makes the two words of a key differ

_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 under 1


def mix(x: Tensor) -> Tensor:
    """Bijective 32-bit mixer. `x`: int64 holding values in [0, 2^32); same on return."""
    x = x ^ (x >> 16)
    x = (x * MIX_1) & MASK
    x = x ^ (x >> 15)
    x = (x * MIX_2) & MASK
    return x ^ (x >> 16)


def keys(seed: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit words, as int64 [B], of each (seed, position).

    Args:
        seed: int64 [B], any value; all 64 bits count.
        position: int64 [B], non-negative: the position the sampled token will have.
    """
    low, high = seed & MASK, (seed >> 32) & MASK
    step = (position * GOLDEN) & MASK
    first = mix(mix(low ^ step) ^ high)
    second = mix(first ^ mix(((high ^ KEY_SALT) + step) & MASK) ^ low)
    return first, second


def bits(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """32 random bits per (sequence, index): int64 [B, V] in [0, 2^32).

    Args:
        seed, position: int64 [B], as in `keys`.
        index: int64 [V] (shared) or [B, V], in [0, 2^32): token ids.
    """
    first, second = keys(seed, position)
    x = index ^ first[:, None]
    x = x ^ (x >> 16)
    x = (x * MIX_1 + second[:, None]) & MASK
    x = x ^ (x >> 15)
    x = (x * MIX_2) & MASK
    return x ^ (x >> 16)


def uniform(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Uniform numbers in the open interval (0, 1): float32 [B, V]; arguments as in `bits`.

    Fine near 0 (steps of 2^-32) and capped at the largest float32 under 1.
    """
    x = bits(seed, position, index).to(torch.float32)
    return ((x + 0.5) * 2.0**-32).clamp_(max=_BELOW_ONE)


def exponential(seed: Tensor, position: Tensor, index: Tensor) -> Tensor:
    """Exponential(1) numbers, float32 [B, V], always positive; arguments as in `bits`.

    The exponential race: `argmax(p / exponential)` draws index i with probability p[i]. `log1p`
    keeps the small values, which are the ones that win, at full precision.
    """
    return -torch.log1p(-uniform(seed, position, index))

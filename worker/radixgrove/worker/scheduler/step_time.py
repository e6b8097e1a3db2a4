"""What the time of a step is made of, so that prefill can be dealt out by time.

A step reads the weights once, multiplies each of its tokens with them, attends from each token of a
chunk to its context, and reads the KV of each decoding row. Its time is taken as linear in these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes."""

    tokens: int = 0  # of chunks, and of decodes
    pairs: int = 0  # of a chunk's token and one of its context
    kv_tokens: int = 0  # of the context that decoding rows read


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and of each unit of its work. None is negative."""

    fixed: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    kv_token: float = 0.0

    def of(self, work: StepWork) -> float:
        return (
            self.fixed
            + self.token * work.tokens
            + self.pair * work.pairs
            + self.kv_token * work.kv_tokens
        )

    def of_chunk(self, start: int, length: int) -> float:
        """What a chunk adds to a step."""
        return self.token * length + self.pair * pairs(start, length)

    def longest_chunk(self, start: int, seconds: float) -> int:
        """Tokens of the longest chunk from `start` on that adds at most so much.

        `of_chunk` is a square of its length. Raises ValueError where a token takes no time.
        """
        if seconds <= 0:
            return 0
        half, linear = self.pair / 2, self.token + self.pair * (start + 0.5)
        if linear <= 0:
            raise ValueError("a chunk of any length takes no time")
        root = math.sqrt(linear * linear + 4 * half * seconds)
        return int(2 * seconds / (linear + root))


def pairs(start: int, length: int) -> int:
    """Pairs of attention: each token of [start, start + length) with all up to and with itself."""
    return length * start + length * (length + 1) // 2

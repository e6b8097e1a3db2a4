"""Two things the scheduler must guess: how long outputs get, and how fast the queue moves."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

# Requests often ask for far more tokens than they use; beyond this the guess does not grow.
_LONGEST_ESTIMATE = 4096
_PRIOR_SHARE = 0.5
_MEMORY = 0.05  # weight of the newest observation
_AFTER_PREEMPTION = 1.25

_SHORTEST_RETRY = 1.0
_LONGEST_RETRY = 60.0


class OutputEstimator:
    """Expected output as a share of what a request may generate, learned from finished ones.

    A preemption shows that the guess was too low and raises it at once.
    """

    def __init__(self) -> None:
        self.share = _PRIOR_SHARE

    def observe(self, generated: int, limit: int) -> None:
        bounded = max(1, min(limit, _LONGEST_ESTIMATE))
        self.share += _MEMORY * (min(1.0, generated / bounded) - self.share)

    def preempted(self) -> None:
        self.share = min(1.0, self.share * _AFTER_PREEMPTION)

    def remaining(self, generated: int, limit: int) -> int:
        """Tokens that a request with `generated` tokens is expected to add, at least one."""
        expected = math.ceil(self.share * min(limit, _LONGEST_ESTIMATE))
        return max(1, min(expected, limit) - generated)

    def remaining_of_all(
        self, generated: NDArray[np.int64], limits: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`remaining` of many requests at once."""
        bounded = np.minimum(limits, _LONGEST_ESTIMATE)
        expected = np.ceil(self.share * bounded).astype(np.int64)
        remaining: NDArray[np.int64] = np.maximum(1, np.minimum(expected, limits) - generated)
        return remaining


class QueuePace:
    """How long a full queue takes to make room, from the times between admissions."""

    def __init__(self) -> None:
        self._interval = 0.0  # seconds per admitted request
        self._last: float | None = None

    def admitted(self, count: int, now: float) -> None:
        if self._last is not None and now > self._last:
            self._interval += 0.2 * ((now - self._last) / count - self._interval)
        self._last = now

    def idle(self) -> None:
        """The queue ran empty: the time until the next admission says nothing of the pace."""
        self._last = None

    def retry_after(self, waiting: int) -> float:
        """Seconds until half of `waiting` requests have left the queue, in 1 .. 60."""
        return min(_LONGEST_RETRY, max(_SHORTEST_RETRY, math.ceil(self._interval * waiting / 2)))

"""How long steps take, as the engine runs: the constants of `StepTime`, from steps."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from radixgrove.worker.scheduler.step_time import StepTime, StepWork

_MEMORY = 0.995  # weight of all steps before, beside a new one
# What makes each term about as large as the others, so that the equations are well conditioned.
_UNITS = np.array([1.0, 1e3, 1e6, 1e5])
_PRIOR = 1e-3  # weight of what is believed at the start, beside one step
_EVERY = 8  # steps between solutions
# A step counts as at most so many times what was expected: something else held it up.
_OUTLIER = 4.0


class StepTimeFit:
    """Least squares over the latest steps, none of the constants negative."""

    def __init__(self, prefill_rate: float = 0.0) -> None:
        """
        Args:
            prefill_rate: tokens a second, as a guess; 0: none.
        """
        self.time = StepTime(token=1 / prefill_rate if prefill_rate > 0 else 0.0)
        prior = np.array([0.0, self.time.token, 0.0, 0.0]) * _UNITS
        self._products = _PRIOR * np.eye(4)
        self._sums = _PRIOR * prior
        self._observed = 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        if seconds <= 0 or not work.tokens:
            return
        if self._observed >= _EVERY:
            seconds = min(seconds, _OUTLIER * self.time.of(work))
        terms = np.array([1, work.tokens, work.pairs, work.kv_tokens]) / _UNITS
        self._products = _MEMORY * self._products + np.outer(terms, terms)
        self._sums = _MEMORY * self._sums + seconds * terms
        self._observed += 1
        if self._observed % _EVERY == 0:
            self.time = StepTime(*(_solve(self._products, self._sums) / _UNITS).tolist())


def _solve(products: NDArray[np.float64], sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least squares with no negative term: of four terms, all subsets can be tried."""
    best, least = np.zeros(len(sums)), 0.0
    for size in range(1, len(sums) + 1):
        for chosen in itertools.combinations(range(len(sums)), size):
            index = np.array(chosen)
            part = np.linalg.lstsq(products[np.ix_(index, index)], sums[index], rcond=None)[0]
            if (part < 0).any():
                continue
            # The error, but for what is the same for all.
            error = float(part @ products[np.ix_(index, index)] @ part - 2 * part @ sums[index])
            if error < least:
                best, least = np.zeros(len(sums)), error
                best[index] = part
    return best

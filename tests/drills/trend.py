"""A line through measurements that depend on those before them, and how sure its slope is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression

_BLOCKS = 15  # means of so many stretches of time are taken as independent
_NORMAL = 1.959964  # 97.5 % of a normal distribution lie below


@dataclass(frozen=True)
class Trend:
    """A slope in units an hour, and the interval that holds it with 95 % confidence."""

    slope: float
    low: float
    high: float

    @property
    def flat(self) -> bool:
        return self.low <= 0.0 <= self.high


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """Of (seconds, value) in the order of time, at least 30 of them."""
    size = len(points) / _BLOCKS
    blocks = [points[round(i * size) : round((i + 1) * size)] for i in range(_BLOCKS)]
    hours = [fmean(seconds for seconds, _ in block) / 3600 for block in blocks]
    values = [fmean(value for _, value in block) for block in blocks]
    slope, intercept = linear_regression(hours, values)
    free = _BLOCKS - 2
    rest = sum((y - slope * x - intercept) ** 2 for x, y in zip(hours, values, strict=True))
    spread = sum((x - fmean(hours)) ** 2 for x in hours)
    margin = _student(free) * (rest / free / spread) ** 0.5
    return Trend(slope, slope - margin, slope + margin)


def _student(free: int) -> float:
    """97.5 % of Student's distribution lie below; exact to 0.001 from 8 degrees of freedom on."""
    z = _NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / free + second / free**2 + third / free**3

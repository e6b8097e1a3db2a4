"""Durations and quantities, as they are written and as numbers."""

from __future__ import annotations

import pytest

from radixgrove.operator.api.values import duration, quantity, seconds


@pytest.mark.parametrize(
    ("text", "value"), [("90m", 5400), ("1h30m5s", 5405), ("10s", 10), ("", 0)]
)
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(
    ("length", "text"), [(0, "0s"), (90, "1m30s"), (5400, "1h30m"), (1800.4, "30m"), (7, "7s")]
)
def test_durations_are_written_as_they_are_read(length: float, text: str) -> None:
    assert duration(length) == text
    assert seconds(text) == round(length)


@pytest.mark.parametrize(("text", "value"), [("64Gi", 64 * 2**30), ("500m", 0.5), ("2", 2)])
def test_quantities(text: str, value: float) -> None:
    assert quantity(text) == value

"""Which cases of a test the interpreter runs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernels.conftest import covering


@dataclass(eq=False)
class Case:
    callspec: Any


def cases() -> list[Case]:
    axes = {"dtype": ["a", "b", "c"], "tokens": [1, 2, 3, 4], "norm": [False, True], "n": [7, 8]}
    return [
        Case(SimpleNamespace(params=dict(zip(axes, chosen, strict=True))))
        for chosen in product(*axes.values())
    ]


def met(chosen: list[Any], values: int) -> set[object]:
    return {
        together
        for case in chosen
        for together in combinations(sorted(case.callspec.params.items()), values)
    }


@pytest.mark.parametrize(("values", "most"), [(1, 4), (2, 16), (3, 30), (4, 48)])
def test_any_values_meet_in_few_cases(values: int, most: int) -> None:
    everything: list[Any] = cases()
    chosen = covering(everything, values)
    assert met(chosen, values) == met(everything, values)
    assert len(set(chosen)) == len(chosen) <= most

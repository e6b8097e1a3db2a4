"""Kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere.

Triton chooses the interpreter while it is imported. Should another test have imported it before, it
is imported again, so that these tests do not depend on the order of collection.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import profiles  # noqa: F401

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    loaded = sys.modules.get("triton")
    if loaded is not None and not loaded.knobs.runtime.interpret:
        stale = (
            "triton",
            "radixgrove.kernels",
            "radixgrove.worker.attention.triton",
            "radixgrove.worker.execution.sampling.draw",
        )
        for name in [n for n in sys.modules if n.startswith(stale)]:
            del sys.modules[name]


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `covering(n)` the interpreter runs as many cases as bring any n values of
    different parameters together once: a case takes it up to seconds. Those that no value needs,
    but a pair of them, are slow tests. Compiled kernels run all."""
    if ON_GPU:
        return
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = {case for group in cases.values() for case in group}
    for group in cases.values():
        mark = group[0].get_closest_marker("covering")
        assert mark is not None
        chosen = covering(group, *mark.args)
        for case in set(chosen) - set(covering(chosen, 1)):
            case.add_marker(pytest.mark.slow)
        left_out.difference_update(chosen)
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def covering(cases: list[pytest.Function], count: int) -> list[pytest.Function]:
    """Each time the first of the cases that bring most that is new together, of `count` values."""
    brings = {}
    for case in cases:
        values = [(name, repr(value)) for name, value in sorted(case.callspec.params.items())]
        brings[case] = set(combinations(values, count))
    missing = set[object]().union(*brings.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(brings[case] & missing))
        chosen.append(best)
        missing -= brings[best]
    return chosen


@pytest.fixture(scope="session", autouse=True)
def _repaired_interpreter() -> None:
    if not ON_GPU:
        from tests.kernels.interpreter import repair

        repair()


@pytest.fixture
def hopper_cache(request: pytest.FixtureRequest) -> Path:
    """What an earlier run has compiled; Triton knows it by source, options and its own version."""
    return Path(request.config.cache.mkdir("triton-sm90"))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor allocated without a value starts as NaN (or an absurd integer), so that an
    element that a kernel forgets cannot pass."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _poisoning(getattr(torch, name)))


def _poisoning(allocate: Any) -> Any:
    def poisoned(*args: Any, **options: Any) -> Tensor:
        tensor: Tensor = allocate(*args, **options)
        if tensor.dtype.is_floating_point:
            return tensor.fill_(float("nan"))
        if tensor.dtype in (torch.int32, torch.int64):
            return tensor.fill_(0x55555555)
        return tensor

    return poisoned

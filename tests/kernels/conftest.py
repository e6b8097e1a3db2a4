"""Kernels run compiled where there is a GPU, and in Triton's interpreter elsewhere.

Triton chooses the interpreter while it is imported. Should another test have imported it before, it
is imported again, so that these tests do not depend on the order of collection.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    loaded = sys.modules.get("triton")
    if loaded is not None and not loaded.knobs.runtime.interpret:
        execution = "radixgrove.worker.execution"
        stale = (
            "triton",
            "radixgrove.kernels",
            f"{execution}.attention.triton",
            f"{execution}.sampling.draw",
        )
        for name in [n for n in sys.modules if n.startswith(stale)]:
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def _repaired_interpreter() -> None:
    if not ON_GPU:
        from tests.kernels.interpreter import repair

        repair()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=True)
def _seeded_and_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor allocated without a value starts as NaN (or an absurd integer), so that an
    element that a kernel forgets cannot pass."""
    torch.manual_seed(0)
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

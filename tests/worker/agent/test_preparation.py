"""What a worker settles before its processes start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.service import exit_codes
from radixgrove.worker.agent.preparation import (
    AgentError,
    onednn_caches,
    openmp_waiting,
    resolve_model,
)
from radixgrove.worker.execution.openmp_waits import can_follow_load
from tests.conftest import CORES

ONE_THREAD = WorkerSettings(cpu_threads=1)  # which cannot follow the load, on any machine


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_user_may_say_how_threads_wait(name: str) -> None:
    assert openmp_waiting(ONE_THREAD, {"PATH": "/bin", name: "x"}) == {}


def test_threads_that_wait_spin_for_microseconds_not_for_a_scheduling_turn() -> None:
    """As GNU's OpenMP, which torch brings, understands it."""
    shown = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env={**os.environ, **openmp_waiting(ONE_THREAD, {}), "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stderr
    (spins,) = [line.split("'")[1] for line in shown.splitlines() if "GOMP_SPINCOUNT" in line]
    assert 0 < int(spins) <= 10_000


@pytest.mark.skipif(not can_follow_load(CORES), reason="an engine cannot tell")
def test_an_engine_that_follows_the_load_is_left_alone() -> None:
    assert openmp_waiting(WorkerSettings(cpu_threads=CORES), {"OMP_NUM_THREADS": "1"}) == {}
    assert openmp_waiting(WorkerSettings(), {"OMP_NUM_THREADS": "1"}), "of one thread"


def test_the_user_may_say_how_many_products_stay_prepared() -> None:
    assert "LRU_CACHE_CAPACITY" not in onednn_caches({"LRU_CACHE_CAPACITY": "9"})


def test_memory_of_prepared_products_ends_at_a_bound() -> None:
    """Each count of tokens is another product to oneDNN."""
    program = """
import ctypes
import torch
from radixgrove.worker.models.ops import CpuOps

class Mallinfo(ctypes.Structure):
    _fields_ = [(str(i), ctypes.c_size_t) for i in range(7)] + [("used", ctypes.c_size_t)]
    _fields_ += [("free", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]

mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Mallinfo
torch.set_num_threads(1)
weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64), None)
with torch.inference_mode():
    for most in (400, 800):
        for tokens in range(most - 400, most):
            CpuOps()._multiply(torch.ones(tokens + 1, 64), weight, None)
        print(mallinfo().used)
"""
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **onednn_caches({})},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    before, after = map(int, shown.split())
    assert after - before < 1 << 20


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ((), "has no config.json"),
        (("adapter_config.json", "tokenizer.json"), "adapter"),
        (("snapshots",), "below snapshots/"),
        (("config.json", "tokenizer.model"), "save_pretrained"),
    ],
    ids=str,
)
def test_a_directory_that_is_no_models_is_called_what_it_is(
    there: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).touch()
    with pytest.raises(AgentError, match=words) as refused:
        resolve_model(str(tmp_path))
    assert refused.value.code == exit_codes.MODEL

"""What a worker settles before its processes start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from radixgrove.protocol.settings import Device, WorkerSettings
from radixgrove.service import exit_codes
from radixgrove.service.supervisor import Supervised
from radixgrove.worker.agent.preparation import (
    AgentError,
    engine_part,
    frontend_part,
    onednn_caches,
    openmp_waiting,
    resolve_model,
)
from radixgrove.worker.execution.openmp_waits import SAID_BY, can_follow_load
from radixgrove.worker.runtime import Runtime
from tests.conftest import CORES


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_user_may_say_how_threads_wait(name: str) -> None:
    assert openmp_waiting({"PATH": "/bin", name: "x"}, follows_load=False) == {}


def test_threads_that_wait_spin_for_microseconds_not_for_a_scheduling_turn() -> None:
    """As GNU's OpenMP, which torch brings, understands it."""
    shown = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env={**os.environ, **openmp_waiting({}, follows_load=False), "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stderr
    (spins,) = [line.split("'")[1] for line in shown.splitlines() if "GOMP_SPINCOUNT" in line]
    assert 0 < int(spins) <= 10_000


SHOWS_SPINS = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "spins").write_text(os.environ.get("GOMP_SPINCOUNT", "long"))
"""


@pytest.mark.skipif(not can_follow_load(CORES), reason="an engine cannot tell")
async def test_only_an_engine_that_follows_the_load_may_spin_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in SAID_BY:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "shows_spins.py").write_text(SHOWS_SPINS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def spins(part: Callable[[str, Runtime, int], Supervised], **settings: Any) -> str:
        runtime = Runtime(tmp_path, WorkerSettings(**settings), tmp_path)
        started = part("shows_spins", runtime, 0)
        await started.start()
        await started.child.process.wait()
        await started.stop(1)
        return (tmp_path / "spins").read_text()

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert await spins(engine_part, cpu_threads=CORES) == "long"
    assert await spins(engine_part) == "1000", "of one thread"
    assert await spins(engine_part, cpu_threads=CORES, device=Device.CUDA) == "1000"
    assert await spins(frontend_part, cpu_threads=CORES) == "1000"


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
        (("config.json", "vocab.json", "merges.txt"), "save_pretrained"),
        (("params.json", "tekken.json"), "in transformers' form"),
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


@pytest.mark.parametrize(
    ("model", "helps"), [("org/a-model.v2", True), ("/org/model", False), ("./model.gguf", False)]
)
def test_a_name_of_the_hub_is_answered_with_how_to_have_it(
    model: str, helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AgentError, match="is not a directory") as refused:
        resolve_model(model)
    assert (f"hf download {model} " in str(refused.value)) == helps

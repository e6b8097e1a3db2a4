"""Compiling in processes: they fill the cache that launches look into, and are not needed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from radixgrove.kernels import compilers
from radixgrove.kernels.compilers import Compilers, compiling_apart, threads_for

pytest.importorskip("triton")


def launched_by(name: str, cache: Path) -> list[list[str]]:
    """Words of each line that a script beside this file prints."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_every_kernel_can_be_handed_over(tmp_path: Path) -> None:
    launched = launched_by("handed_over.py", tmp_path)
    assert len({name for name, _ in launched}) > 30
    assert [name for name, same in launched if same != "True"] == []


@pytest.mark.slow
def test_what_a_process_compiles_is_what_the_launch_asks_for(tmp_path: Path) -> None:
    launched = launched_by("compile_apart.py", tmp_path)
    # The first is compiled where it is launched.
    assert launched[0] == ["_silu_and_mul_kernel", "False"]
    assert sorted(name for name, _ in launched[1:]) == ["_rms_norm_kernel"] * 2 + ["route_kernel"]
    assert {hit for _, hit in launched[1:]} == {"True"}


_KILLED = """
import os
from radixgrove.kernels.compilers import Compilers
print(Compilers(2, 90)._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them() -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    state = Path("/proc", killed.stdout.strip(), "stat")
    deadline = time.monotonic() + 60
    while state.exists() and ") Z" not in state.read_text():  # which waits for all others
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processes_that_cannot_start_leave_the_work_to_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = SimpleNamespace(wait=lambda seconds=None: 1, kill=lambda: None)
    monkeypatch.setattr(compilers.subprocess, "Popen", lambda *_, **__: ended)
    event: dict[str, Any] = {
        "fn": SimpleNamespace(module="absent", name="_kernel"),
        "compile": {"specialization_data": "{}"},
    }
    with Compilers(2, 90) as apart:
        for _ in range(3):  # one more than there are
            assert apart.before_compiling(**event) is False
            event["compile"]["specialization_data"] += " "


def test_few_cores_have_threads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "Compilers", None)
    with compiling_apart(7):
        pass
    assert [threads_for(cores) for cores in (1, 2, 7, 8, 64)] == [1, 2, 7, 8, 16]

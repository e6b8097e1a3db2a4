"""What a worker settles before its processes start."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from radixgrove.worker.agent.preparation import openmp_waiting


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_the_user_may_say_how_threads_wait(name: str) -> None:
    assert openmp_waiting({"PATH": "/bin", name: "x"}) == {}


def test_threads_that_wait_spin_for_microseconds_not_for_a_scheduling_turn() -> None:
    """As GNU's OpenMP, which torch brings, understands it."""
    shown = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env={**os.environ, **openmp_waiting({}), "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stderr
    (spins,) = [line.split("'")[1] for line in shown.splitlines() if "GOMP_SPINCOUNT" in line]
    assert 0 < int(spins) <= 10_000

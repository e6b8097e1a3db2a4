"""Kernels compiled for Hopper, without a GPU, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SHARED_MEMORY_BYTES = 232_448  # a block's limit on compute capability 9.0
# Minutes of CPU, of which eight processes of tests on two cores may leave it a fifth.
_COMPILE_SECONDS = 1700
WITHIN_SECONDS = _COMPILE_SECONDS + 100  # of a whole test


def compiled(cache: Path, *arguments: str) -> list[tuple[str, int, int, int]]:
    """Name, registers, bytes of stack and of shared memory of what `compile_sm90.py` compiles."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_sm90.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_COMPILE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (line.split() for line in done.stdout.splitlines())
    return [(name, *map(int, numbers)) for name, *numbers in lines]  # type: ignore[misc]

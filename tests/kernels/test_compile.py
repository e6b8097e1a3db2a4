"""Every kernel compiles for Hopper: what the interpreter accepts, the compiler may not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = {
    "_all_reduce_kernel",
    "_append_samples_kernel",
    "_copy_pages_kernel",
    "_decode_kernel",
    "_extend_kernel",
    "_gather_kernel",
    "_gather_rows_kernel",
    "_gemv_kernel",
    "_kv_indices_kernel",
    "_penalize_kernel",
    "_race_kernel",
    "_race_winner_kernel",
    "_rms_norm_kernel",
    "_rope_store_kernel",
    "_shared_decode_kernel",
    "_silu_and_mul_kernel",
    "_skinny_kernel",
    "_thresholds_kernel",
}
SHARED_MEMORY_BYTES = 232_448  # a block's limit on compute capability 9.0


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_sm90.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in compiled} == KERNELS
    for name, _registers, _stack, shared in compiled:
        assert int(shared) <= SHARED_MEMORY_BYTES, f"{name} needs {shared} bytes of shared memory"

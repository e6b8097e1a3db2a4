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
    "_all_reduce_norm_kernel",
    "combine_kernel",
    "_copy_pages_kernel",
    "decode_kernel",
    "down_pairs_kernel",
    "down_tiles_kernel",
    "_extend_kernel",
    "_gather_kernel",
    "_gather_rows_kernel",
    "gate_up_pairs_kernel",
    "gate_up_tiles_kernel",
    "_gemv_kernel",
    "_int8_kernel",
    "_kv_indices_kernel",
    "_mask_tokens_kernel",
    "_penalize_kernel",
    "_post_kernel",
    "prefix_kernel",
    "_quantize_int8_kernel",
    "_quantize_kernel",
    "_race_kernel",
    "_race_winner_kernel",
    "_rms_norm_kernel",
    "_rope_store_kernel",
    "route_and_sort_kernel",
    "route_kernel",
    "shared_decode_kernel",
    "_silu_and_mul_kernel",
    "_skinny_kernel",
    "sort_kernel",
    "_take_kernel",
    "_thresholds_kernel",
}
# Sampling reads float32 whatever the model's dtype; the others are of bfloat16 alone.
NOT_OF_FLOAT32 = {
    "_int8_kernel",
    "_mask_tokens_kernel",
    "_penalize_kernel",
    "_post_kernel",
    "_quantize_int8_kernel",
    "_quantize_kernel",
    "_race_kernel",
    "_race_winner_kernel",
    "_skinny_kernel",
    "_take_kernel",
    "_thresholds_kernel",
}
SHARED_MEMORY_BYTES = 232_448  # a block's limit on compute capability 9.0


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> Path:
    """What an earlier run has compiled; Triton knows it by source, options and its own version."""
    return Path(request.config.cache.mkdir("triton-sm90"))


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
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (line.split() for line in done.stdout.splitlines())
    return [(name, *map(int, numbers)) for name, *numbers in lines]  # type: ignore[misc]


def test_a_form_of_every_kernel_compiles_for_hopper(cache: Path) -> None:
    kernels = compiled(cache)
    assert {name for name, *_ in kernels} == KERNELS
    assert_they_fit(kernels)


@pytest.mark.slow
def test_kernels_compile_for_hopper_in_every_form(cache: Path) -> None:
    kernels = compiled(cache, "bfloat16")
    assert {name for name, *_ in kernels} == KERNELS
    assert_they_fit(kernels)


@pytest.mark.slow
def test_kernels_compile_for_hopper_in_float32(cache: Path) -> None:
    kernels = compiled(cache, "float32")
    assert {name for name, *_ in kernels} == KERNELS - NOT_OF_FLOAT32
    assert_they_fit(kernels)


def assert_they_fit(kernels: list[tuple[str, int, int, int]]) -> None:
    for name, _registers, _stack, shared in kernels:
        assert shared <= SHARED_MEMORY_BYTES, f"{name} needs {shared} bytes of shared memory"


@pytest.mark.slow
def test_products_for_hopper_keep_their_sums_in_registers(cache: Path) -> None:
    """At the shapes of Qwen3-0.6B and Llama-3.1-8B, in every form that the tuner asks about."""
    kernels = compiled(cache, "products")
    others = {"_rms_norm_kernel", "_quantize_kernel"}
    assert {name for name, *_ in kernels} == {"_gemv_kernel", "_skinny_kernel"} | others
    assert len(kernels) > 40
    for name, registers, stack, shared in kernels:
        assert stack == 0, f"{name} spills {stack} bytes at {registers} registers"
        assert shared <= SHARED_MEMORY_BYTES, f"{name} needs {shared} bytes of shared memory"


@pytest.mark.slow
def test_experts_for_hopper_keep_their_sums_in_registers(cache: Path) -> None:
    """At the shapes of Qwen3-30B-A3B and Mixtral-8x7B, in every form that the tuner asks about."""
    kernels = compiled(cache, "experts")
    products = {
        f"{half}_{way}_kernel" for half in ("gate_up", "down") for way in ("pairs", "tiles")
    }
    others = {"route_kernel", "sort_kernel", "route_and_sort_kernel", "_quantize_kernel"}
    assert {name for name, *_ in kernels} == products | others
    for name, registers, stack, shared in kernels:
        # What is needed again after the loop may wait in memory; the sums may not.
        assert stack <= 32, f"{name} spills {stack} bytes at {registers} registers"
        assert shared <= SHARED_MEMORY_BYTES, f"{name} needs {shared} bytes of shared memory"


@pytest.mark.slow
def test_decode_from_a_projection_keeps_to_its_registers(cache: Path) -> None:
    """At the shapes of Qwen3-0.6B and Llama-3.1-8B: as many blocks fit as without RoPE and norm."""
    kernels = compiled(cache, "decode")
    fitting = {"decode_kernel": 3, "shared_decode_kernel": 4, "prefix_kernel": 2}
    assert {name for name, *_ in kernels} == set(fitting)
    for name, registers, stack, shared in kernels:
        # Four registers at most: more would be part of the sums, in every block of KV.
        assert stack <= 16, f"{name} spills {stack} bytes at {registers} registers"
        most = SHARED_MEMORY_BYTES // fitting[name] - 1024  # the system takes some of each block's
        assert shared <= most, f"{name}: {fitting[name]} blocks do not fit beside each other"

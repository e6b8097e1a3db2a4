"""Kernels for Hopper keep in registers what their speed depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.hopper import SHARED_MEMORY_BYTES, WITHIN_SECONDS, compiled

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(WITHIN_SECONDS)


@pytest.mark.hopper
@pytest.mark.slow
def test_products_for_hopper_keep_their_sums_in_registers(hopper_cache: Path) -> None:
    """At the shapes of Qwen3-0.6B and Llama-3.1-8B, in every form that the tuner asks about."""
    kernels = compiled(hopper_cache, "products")
    others = {"_rms_norm_kernel", "_quantize_kernel"}
    assert {name for name, *_ in kernels} == {"_gemv_kernel", "_skinny_kernel"} | others
    assert len(kernels) > 40
    for name, registers, stack, shared in kernels:
        assert stack == 0, f"{name} spills {stack} bytes at {registers} registers"
        assert shared <= SHARED_MEMORY_BYTES, f"{name} needs {shared} bytes of shared memory"


@pytest.mark.hopper
@pytest.mark.slow
def test_experts_for_hopper_keep_their_sums_in_registers(hopper_cache: Path) -> None:
    """At the shapes of Qwen3-30B-A3B and Mixtral-8x7B, in every form that the tuner asks about."""
    kernels = compiled(hopper_cache, "experts")
    products = {
        f"{half}_{way}_kernel" for half in ("gate_up", "down") for way in ("pairs", "tiles")
    }
    others = {"route_kernel", "sort_kernel", "route_and_sort_kernel", "_quantize_kernel"}
    assert {name for name, *_ in kernels} == products | others
    for name, registers, stack, shared in kernels:
        # What is needed again after the loop may wait in memory; the sums may not.
        assert stack <= 32, f"{name} spills {stack} bytes at {registers} registers"
        assert shared <= SHARED_MEMORY_BYTES, f"{name} needs {shared} bytes of shared memory"


@pytest.mark.hopper
@pytest.mark.slow
def test_decode_from_a_projection_keeps_to_its_registers(hopper_cache: Path) -> None:
    """At the shapes of Qwen3-0.6B and Llama-3.1-8B: as many blocks fit as without RoPE and norm."""
    kernels = compiled(hopper_cache, "decode")
    fitting = {"decode_kernel": 3, "shared_decode_kernel": 4, "prefix_kernel": 2}
    assert {name for name, *_ in kernels} == set(fitting)
    for name, registers, stack, shared in kernels:
        # Four registers at most: more would be part of the sums, in every block of KV.
        assert stack <= 16, f"{name} spills {stack} bytes at {registers} registers"
        most = SHARED_MEMORY_BYTES // fitting[name] - 1024  # the system takes some of each block's
        assert shared <= most, f"{name}: {fitting[name]} blocks do not fit beside each other"

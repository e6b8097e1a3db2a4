"""Every kernel compiles for Hopper: what the interpreter accepts, the compiler may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.hopper import SHARED_MEMORY_BYTES, WITHIN_SECONDS, compiled

pytest.importorskip("triton")

pytestmark = pytest.mark.timeout(WITHIN_SECONDS)

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


def test_a_form_of_every_kernel_compiles_for_hopper(hopper_cache: Path) -> None:
    kernels = compiled(hopper_cache)
    assert {name for name, *_ in kernels} == KERNELS
    assert_they_fit(kernels)


@pytest.mark.hopper
@pytest.mark.slow
def test_kernels_compile_for_hopper_in_every_form(hopper_cache: Path) -> None:
    kernels = compiled(hopper_cache, "bfloat16")
    assert {name for name, *_ in kernels} == KERNELS
    assert_they_fit(kernels)


@pytest.mark.hopper
@pytest.mark.slow
def test_kernels_compile_for_hopper_in_float32(hopper_cache: Path) -> None:
    kernels = compiled(hopper_cache, "float32")
    assert {name for name, *_ in kernels} == KERNELS - NOT_OF_FLOAT32
    assert_they_fit(kernels)


def assert_they_fit(kernels: list[tuple[str, int, int, int]]) -> None:
    for name, _registers, _stack, shared in kernels:
        assert shared <= SHARED_MEMORY_BYTES, f"{name} needs {shared} bytes of shared memory"

"""The offline workloads are the same everywhere, and their limits are those of the card."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def workloads() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workloads", BENCHMARKS / "workloads.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "requests", "input_tokens", "output_tokens"),
    [
        ("nano256", 256, 142_827, 133_966),
        ("bs1_decode", 1, 128, 512),
        ("bs64_decode", 64, 8_192, 32_768),
        ("bs256_decode", 256, 32_768, 65_536),
        ("prefill_32x8k", 32, 262_144, 32),
        ("shared_prefix", 512, 1_114_112, 65_536),
    ],
)
def test_workloads_are_deterministic(
    workloads: ModuleType, name: str, requests: int, input_tokens: int, output_tokens: int
) -> None:
    first, second = (workloads.WORKLOADS[name]() for _ in range(2))
    assert first == second
    sizes = (len(first.items), first.input_tokens, first.output_tokens)
    assert sizes == (requests, input_tokens, output_tokens)


def test_a_shared_prefix_is_shared_by_sixteen(workloads: ModuleType) -> None:
    items = workloads.shared_prefix().items
    prefixes = [tuple(item.token_ids[: item.shared]) for item in items]
    assert {prefixes.count(prefix) for prefix in prefixes} == {16}
    assert len({tuple(item.token_ids) for item in items}) == 512
    assert prefixes[:16] != sorted(prefixes)[:16], "groups are shuffled"


@pytest.mark.parametrize(
    ("name", "limit"),
    [("nano256", 10_014), ("bs1_decode", 195), ("prefill_32x8k", 45_261)],
)
def test_limits_of_an_8b_model(workloads: ModuleType, name: str, limit: int) -> None:
    """Llama-3.1-8B on an H100: 15 GB of weights a step, 131,072 bytes of KV a token."""
    shape = workloads.ModelShape(
        matrix_parameters=6_979_321_856,
        head_parameters=525_336_576,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
    )
    assert shape.kv_bytes_per_token == 131_072
    workload = workloads.WORKLOADS[name]()
    seconds = workloads.least_seconds(workload, shape, workloads.H100)
    assert workload.counted_tokens / seconds == pytest.approx(limit, rel=0.01)
    halved = dataclasses.replace(shape, kv_item_bytes=1)
    assert halved.kv_bytes_per_token == 65_536
    saved = seconds - workloads.least_seconds(workload, halved, workloads.H100)
    contexts = sum(
        (item.max_tokens - 1) * (len(item.token_ids) + item.max_tokens / 2)
        for item in workload.items
    )
    assert saved == pytest.approx(contexts * 65_536 / 2.94e12, rel=1e-6)

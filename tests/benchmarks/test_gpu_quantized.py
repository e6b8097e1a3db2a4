"""The check of float8 models, on a CPU with small ones: the engine's arithmetic there is what its
kernels are measured against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks.correctness import gpu_correctness, gpu_quantized
from benchmarks.correctness import models as checked_models
from benchmarks.correctness.judge import Report
from radixgrove.kernels.weight import Weight
from radixgrove.worker.models.ops import TorchOps

SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where figures go; models and texts are small."""
    models = {
        "qwen3": {"kind": "Qwen3Config", **SMALL},
        "qwen3-moe": {"kind": "Qwen3MoeConfig", **SMALL, **EXPERTS},
    }
    monkeypatch.setattr(checked_models, "MODELS", models)
    monkeypatch.setattr(checked_models, "PROMPTS", 4)
    monkeypatch.setattr(gpu_correctness, "NEW_TOKENS", 6)
    monkeypatch.setitem(gpu_correctness.GREEDY, "max_tokens", 6)
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / "results"))
    return tmp_path / "results" / "correctness.jsonl"


def check(model: str, kind: str, recorded: Path, scratch: Path) -> dict[str, Any]:
    """What was judged, without the model's name, and whether it passed."""
    model_dir = checked_models.make_random_model(model, scratch)
    gpu_quantized.check(model, model_dir, kind, "torch", Report())
    entries = [json.loads(line) for line in recorded.read_text().splitlines()]
    return {e["workload"].partition("torch: ")[2]: (e["value"], e["detail"]) for e in entries}


@pytest.mark.parametrize("kind", ["rows", "blocks"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe"])
def test_the_reference_is_what_the_engine_computes(
    model: str, kind: str, recorded: Path, tmp_path: Path
) -> None:
    found = check(model, kind, recorded, tmp_path)
    assert len(found) == (6 if model == "qwen3-moe" else 5)
    assert all(passed for passed, _ in found.values()), found


def test_other_experts_are_noticed(
    monkeypatch: pytest.MonkeyPatch, recorded: Path, tmp_path: Path
) -> None:
    wide_linear = TorchOps.wide_linear

    def shifted(self: TorchOps, x: Tensor, weight: Weight) -> Tensor:
        return wide_linear(self, x, weight).roll(1, -1)

    monkeypatch.setattr(TorchOps, "wide_linear", shifted)
    found = check("qwen3-moe", "rows", recorded, tmp_path)
    passed, _ = found["experts are chosen alike"]
    assert not passed

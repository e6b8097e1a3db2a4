"""Scales of a checkpoint for KV in float8: values that its range would cut off are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.settings import KVDType
from tests.worker.execution import reference, tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy
from tests.worker.models import quantized
from tests.worker.parallel.ranks import generate

WEIGHTS = "model.safetensors"
PROMPT = tiny.prompts()[-1]
LARGE = 2048.0


def logprobs(directory: Path, kv_dtype: KVDType = KVDType.FP8_E4M3) -> torch.Tensor:
    runner = cpu_runner(directory, kv_dtype=kv_dtype)
    (result,) = Driver(runner).generate([PROMPT], greedy(1, prompt_logprobs=0), chunk=50)
    runner.close()
    return torch.tensor([entry.logprob for entry in result.prompt_logprobs])


def enlarge(directory: Path, kind: str) -> None:
    """The same model with keys and values beyond float8's range."""
    tensors = load_file(directory / WEIGHTS)
    for layer in range(3):
        own = f"model.layers.{layer}.self_attn."
        by = {f"{own}v_proj": LARGE, f"{own}o_proj": 1 / LARGE}
        normed = kind in ("qwen3", "olmo2")
        q, k = ("q_norm", "k_norm") if normed else ("q_proj", "k_proj")
        by |= {f"{own}{k}": LARGE, f"{own}{q}": 1 / LARGE}
        for name, factor in by.items():
            tensors[f"{name}.weight"] *= factor
            if f"{name}.bias" in tensors and not name.endswith("o_proj"):
                tensors[f"{name}.bias"] *= factor
    save_file(tensors, directory / WEIGHTS)


def add_scales(directory: Path, scale: float, names: tuple[str, str]) -> None:
    tensors = load_file(directory / WEIGHTS)
    for layer in range(3):
        for name in names:
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize("kind", ["llama-biased", "qwen3", "olmo2"])
def test_large_keys_and_values_are_kept_by_their_scales(kind: str, tmp_path: Path) -> None:
    model = tiny.save(kind, tmp_path)
    targets = torch.tensor(PROMPT[1:])[:, None]
    exact = reference.logprobs(model, PROMPT)[:-1].gather(1, targets).squeeze(1)
    small = (logprobs(tmp_path) - exact).abs().mean()
    enlarge(tmp_path, kind)
    assert (logprobs(tmp_path) - exact).abs().mean() > 3 * small, "cut off"
    add_scales(tmp_path, 1900.0, ("k_scale", "v_scale"))
    # 1,900 counts as 2,048: pages hold what they did before.
    torch.testing.assert_close((logprobs(tmp_path) - exact).abs().mean(), small, rtol=0.02, atol=0)


@pytest.mark.parametrize(
    "name", ["fp8, blocks", "fp8, tensor, static", "compressed, channel", "int8, channel"]
)
def test_scales_of_kv_in_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    tiny.save("llama-biased", tmp_path)
    quantized.quantize(tmp_path, quantized.kinds(16)[name])
    expected = logprobs(tmp_path, KVDType.AUTO)
    unscaled = (logprobs(tmp_path) - expected).abs().mean()
    add_scales(tmp_path, 0.25, ("k_proj.output_scale", "v_proj.output_scale"))
    scaled = (logprobs(tmp_path) - expected).abs().mean()
    assert 0 < scaled < 2 * unscaled
    assert torch.equal(logprobs(tmp_path, KVDType.AUTO), expected)


def test_two_ranks_divide_alike(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    tiny.save("llama", model_dir)
    enlarge(model_dir, "llama")
    add_scales(model_dir, 2048.0, ("k_scale", "v_scale"))
    texts = [
        generate(tmp_path / f"tp{tp}", model_dir, tp, [PROMPT], 12, kv_dtype="fp8_e4m3")
        for tp in (1, 2)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(scale: float, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    add_scales(tmp_path, scale, ("k_scale", "v_scale"))
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.k_scale holds a scale of"):
        logprobs(tmp_path)


def test_scales_that_the_config_promises_are_required(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    kind = quantized.kinds(16)["compressed, channel"]
    kind.config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    quantized.quantize(tmp_path, kind)
    assert (
        "kv_cache_scheme"
        in json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    )
    logprobs(tmp_path, KVDType.AUTO)
    with pytest.raises(ModelError, match=r"lacks model\.layers\.0\.self_attn\.k_scale or .*kv_"):
        logprobs(tmp_path)

"""gpt-oss in four bits computes what transformers computes with the same weights widened; what
contradicts a checkpoint is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.settings import Device, DType, LoadFormat, Quantize, WorkerSettings
from radixgrove.worker.execution.build import build_rank
from radixgrove.worker.models.formats.mxfp4 import Mxfp4
from radixgrove.worker.models.parts import Piece
from radixgrove.worker.models.weights import fill_random, load_safetensors
from tests.worker.execution import reference, tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy
from tests.worker.models import mxfp4

CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
EXPERTS = "model.layers.2.mlp.experts"


def saved(directory: Path) -> Any:
    """In four bits."""
    model = tiny.save("gpt-oss", directory)
    mxfp4.quantize(directory, model)
    return model


def test_texts_and_logits_are_transformers(tmp_path: Path) -> None:
    """Cold, behind cached prefixes, in chunks, several at once."""
    model, prompts = saved(tmp_path), tiny.prompts()
    texts = reference.greedy(model, prompts, 12)
    targets = torch.tensor(prompts[-1][1:])[:, None]
    expected = reference.logprobs(model, prompts[-1])[:-1].gather(1, targets).squeeze(1)
    runner = cpu_runner(tmp_path)
    driver = Driver(runner)
    (result,) = driver.generate(prompts[-1:], greedy(1, prompt_logprobs=0))
    got = torch.tensor([entry.logprob for entry in result.prompt_logprobs])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    for chunk in (7, 1 << 30):
        results = driver.generate(prompts, greedy(12), chunk=chunk, reuse=True)
        assert [result.tokens for result in results] == texts
    assert sum(result.cached for result in results) > 0
    runner.close()


def test_sinks_and_the_clamp_change_what_is_said(tmp_path: Path) -> None:
    """So that equality with transformers shows them."""
    model, prompt = tiny.save("gpt-oss", tmp_path), tiny.prompts()[-1]
    exact = reference.logprobs(model, prompt)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.limit = 1e9
    assert (reference.logprobs(model, prompt) - exact).abs().mean() > 1e-2
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.limit = 1.5
            layer.self_attn.sinks.fill_(-1e9)
    assert (reference.logprobs(model, prompt) - exact).abs().mean() > 1e-2


def test_the_start_counts_widened_experts(tmp_path: Path) -> None:
    saved(tmp_path)
    said: list[str] = []
    settings = WorkerSettings(device=Device.CPU, max_running=2, kv_tokens=64, dtype=DType.FLOAT32)
    runner, _ = build_rank(settings, tmp_path, lambda phase: said.append(phase.message))
    runner.close()
    (line,) = (text for text in said if text.startswith("memory"))
    experts = 3 * 4 * (3 * 64 * 96 + 2 * 96 + 64) * 4  # of three layers, with biases, in float32
    assert f"experts {experts / (1 << 30):.2f} GiB of that" in line


@pytest.mark.parametrize("four_bits", [False, True], ids=["plain", "mxfp4"])
def test_dummy_weights(four_bits: bool, tmp_path: Path) -> None:
    (saved if four_bits else lambda path: tiny.save("gpt-oss", path))(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    runners = [cpu_runner(tmp_path, load_format=LoadFormat.DUMMY) for _ in range(2)]
    answers = [Driver(runner).generate([[5, 6, 7]], greedy(16))[0].tokens for runner in runners]
    for runner in runners:
        runner.close()
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def test_experts_are_quantized_while_they_are_read(tmp_path: Path) -> None:
    tiny.save("gpt-oss", tmp_path)
    prompt = tiny.prompts()[-1]

    def said(**settings: Any) -> Tensor:
        runner = cpu_runner(tmp_path, **settings)
        (result,) = Driver(runner).generate([prompt], greedy(1, prompt_logprobs=0))
        runner.close()
        return torch.tensor([entry.logprob for entry in result.prompt_logprobs])

    assert 0 < (said(quantize=Quantize.FP8) - said()).abs().mean() < 0.5


# ---- the format ------------------------------------------------------------------------------


def read(directory: Path, tensors: dict[str, Tensor], piece: Piece, dtype: torch.dtype) -> Tensor:
    save_file({name: x.contiguous() for name, x in tensors.items()}, directory / WEIGHTS)
    weight = Mxfp4().allocate([piece], dtype, CPU)
    load_safetensors(Mxfp4().parts(weight, [piece]), directory, lambda done: None)
    assert not weight.quantized
    return weight.payload


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_byte_and_exponent_is_what_transformers_makes_of_it(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """But for exponents with which the largest numbers overflow."""
    exponents = torch.arange(252).to(torch.uint8)
    blocks = torch.arange(256).to(torch.uint8).view(1, 16, 16).expand(252, -1, -1)
    scales = exponents[:, None].expand(-1, 16)
    tensors = {"a.weight_blocks": blocks, "a.weight_scales": scales}
    piece = Piece("a", (252, 512), slice(0, 252), slice(0, 512))
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].t()
    assert torch.equal(read(tmp_path, tensors, piece, dtype), expected)


def test_a_rank_reads_its_part(tmp_path: Path) -> None:
    blocks, scales = mxfp4.pack(torch.randn(1, 128, 40))
    tensors = {"a.weight_blocks": blocks[0], "a.weight_scales": scales[0]}
    piece = Piece("a", (40, 128), slice(10, 40), slice(32, 96))
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].t()
    assert torch.equal(read(tmp_path, tensors, piece, torch.float32), expected[10:, 32:96])


def test_dummy_weights_stand_for_the_usual_numbers() -> None:
    piece = Piece("a", (256, 512), slice(0, 256), slice(0, 512))
    weight = Mxfp4().allocate([piece], torch.float32, CPU)
    fill_random(Mxfp4().parts(weight, [piece]), seed=0)
    assert weight.payload.std().item() == pytest.approx(0.02, rel=0.05)
    assert weight.payload.abs().max().item() > 0.06
    assert set((weight.payload.abs() * 64).unique().tolist()) == set(mxfp4._NUMBERS.tolist())


def test_a_part_that_cuts_a_block() -> None:
    piece = Piece("a", (8, 96), slice(0, 8), slice(0, 48))
    with pytest.raises(ModelError, match="a: a rank's part of 96 would cut blocks of 32"):
        Mxfp4().allocate([piece], torch.float32, CPU)


# ---- bad input -------------------------------------------------------------------------------


def edit(directory: Path, **config: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "gate_up_proj_scales",
            None,
            r"lacks .*experts\.gate_up_proj_scales.*, which its format mxfp4 expects",
        ),
        ("gate_up_proj_blocks", None, r"lacks .*experts\.gate_up_proj_blocks"),
        ("down_proj_bias", None, r"lacks .*experts\.down_proj_bias"),
        (
            "gate_up_proj_scales",
            lambda x: x[..., :1],
            r"gate_up_proj_scales has shape \(4, 192, 1\), its format mxfp4 asks for \(4, 192, 2\)",
        ),
        (
            "down_proj_blocks",
            lambda x: x[:3],
            r"down_proj_blocks has shape \(3, 64, 3, 16\), .* asks for \(4, 64, 3, 16\)",
        ),
        (
            "gate_up_proj_bias",
            lambda x: x[:, :191],
            r"gate_up_proj_bias has shape \(4, 191\), the config asks for \(4, 192\)",
        ),
        (
            "down_proj_scales",
            lambda x: torch.full_like(x, 255),
            r"down_proj_scales holds a scale of nan, where all are finite and above 0",
        ),
        (
            "down_proj_blocks",
            lambda x: x.float(),
            r"down_proj_blocks is of type F32, its format mxfp4 asks for one of U8",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_tensors_that_contradict_the_config(
    name: str, change: Any, said: str, tmp_path: Path
) -> None:
    saved(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    found = tensors.pop(f"{EXPERTS}.{name}")
    if change is not None:
        tensors[f"{EXPERTS}.{name}"] = change(found).contiguous()
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=said):
        cpu_runner(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.layers.1.self_attn.sinks", (3,), r"sinks has shape \(3,\), .* asks for \(4,\)"),
        ("model.layers.1.mlp.router.bias", (5,), r"router\.bias has shape \(5,\)"),
        (f"{EXPERTS}.gate_up_proj", (4, 192, 64), r"has shape \(4, 192, 64\), .* \(4, 64, 192\)"),
        (f"{EXPERTS}.down_proj", (4, 95, 64), r"down_proj has shape \(4, 95, 64\)"),
    ],
)
def test_unquantized_tensors_of_another_shape(
    name: str, shape: tuple[int, ...], said: str, tmp_path: Path
) -> None:
    tiny.save("gpt-oss", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    assert name in tensors
    save_file(tensors | {name: torch.zeros(shape)}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=said):
        cpu_runner(tmp_path)


def test_experts_that_one_layer_lacks(tmp_path: Path) -> None:
    tiny.save("gpt-oss", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    kept = {name: x for name, x in tensors.items() if EXPERTS not in name}
    save_file(kept, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=r"lacks model\.layers\.2\.mlp\.experts\.gate_up_proj, "):
        cpu_runner(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (
            "gpt-oss",
            {"quantization_config": {"quant_method": "fp8"}},
            r"quant_method 'fp8' is not supported for this architecture, only mxfp4 or none",
        ),
        (
            "qwen3-moe",
            {"quantization_config": mxfp4.CONFIG},
            r"'mxfp4' is not supported for this architecture, only for experts of gpt-oss",
        ),
        ("gpt-oss", {"experts_per_token": 3}, r"num_experts_per_tok 2 and experts_per_token 3"),
        ("gpt-oss", {"swiglu_limit": -7.0}, r"swiglu_limit must be a positive number"),
        ("gpt-oss", {"layer_types": ["full_attention"]}, r"layer_types must be"),
        ("gpt-oss", {"hidden_act": "gelu_pytorch_tanh"}, r"is not supported for experts"),
    ],
)
def test_configs_that_are_refused(
    kind: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    tiny.save(kind, tmp_path)
    edit(tmp_path, **change)
    with pytest.raises(ModelError, match=said):
        cpu_runner(tmp_path)


def test_four_bits_are_not_quantized_anew(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ModelError, match=r"quantize fp8 is for .* this one is \(mxfp4\)"):
        cpu_runner(tmp_path, quantize=Quantize.FP8)

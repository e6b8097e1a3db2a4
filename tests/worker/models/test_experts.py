"""Mixtures of experts compute what transformers computes, whatever their checkpoint looks like."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.settings import Device, DType, LoadFormat, Quantize, WorkerSettings
from radixgrove.worker.execution import memory
from radixgrove.worker.execution.build import build_rank
from radixgrove.worker.models.ops import CpuOps
from tests.worker.execution import reference, tiny
from tests.worker.execution.driver import Driver, cpu_runner, greedy
from tests.worker.models import quantized

WEIGHTS = "model.safetensors"


def texts(directory: Path, prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
    runner = cpu_runner(directory)
    try:
        results = Driver(runner).generate(prompts, greedy(tokens))
    finally:
        runner.close()
    return [result.tokens for result in results]


@pytest.mark.parametrize("kind", tiny.MIXTURES)
def test_experts_stacked_in_one_tensor_a_layer(kind: str, tmp_path: Path) -> None:
    model, prompts = tiny.save(kind, tmp_path), tiny.prompts()
    expected = reference.greedy(model, prompts, 12)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / WEIGHTS))
    assert texts(tmp_path, prompts) == expected


def test_all_tokens_on_the_same_experts_and_none_on_the_others(tmp_path: Path) -> None:
    """Every embedding is large where the router looks, so that all rank the experts alike."""
    model = tiny.save("mixtral", tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 30.0
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight[0] = 1.0
            layer.mlp.gate.weight.zero_()
            layer.mlp.gate.weight[:, 0] = torch.tensor([1.0, -1.0, 1.5, -2.0])
    model.save_pretrained(tmp_path)
    prompts = tiny.prompts()
    assert texts(tmp_path, prompts) == reference.greedy(model, prompts, 12)


@pytest.mark.parametrize("path", ["the processor's", "plain"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe", "gpt-oss"])
def test_bfloat16_is_as_close_to_float32_as_transformers_own(
    kind: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "plain":
        monkeypatch.setattr(CpuOps, "supports", lambda dtype: False)
    exact, prompt = tiny.save(kind, tmp_path), tiny.prompts()[-1]
    runner = cpu_runner(tmp_path, dtype=DType.BFLOAT16)
    (result,) = Driver(runner).generate([prompt], greedy(1, prompt_logprobs=0))
    runner.close()
    rough = reference.load(tmp_path, torch.bfloat16)
    targets = torch.tensor(prompt[1:])[:, None]
    wide, theirs = (
        reference.logprobs(model, prompt)[:-1].gather(1, targets).squeeze(1)
        for model in (exact, rough)
    )
    ours = torch.tensor([entry.logprob for entry in result.prompt_logprobs])
    assert 0 < (ours - wide).abs().mean() < 2 * (theirs - wide).abs().mean()


@pytest.mark.parametrize("quantize", Quantize)
@pytest.mark.parametrize("kind", tiny.MIXTURES)
def test_the_start_says_how_much_of_the_weights_are_experts(
    kind: str, quantize: Quantize, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU float8 is widened, so that each number takes the four bytes of float32."""
    model = tiny.save(kind, tmp_path)
    numbers = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = 4 * sum(count for name, count in numbers.items() if ".experts." in name)
    monkeypatch.setattr(memory, "_gib", lambda size: f"{size} bytes")
    said: list[str] = []
    settings = WorkerSettings(device=Device.CPU, max_running=2, kv_tokens=64, quantize=quantize)
    runner, info = build_rank(settings, tmp_path, lambda phase: said.append(phase.message))
    runner.close()
    (line,) = (text for text in said if text.startswith("memory"))
    assert f"weights {4 * sum(numbers.values())} bytes, experts {experts} bytes of that; KV" in line
    assert info.weights_bytes == 4 * sum(numbers.values())


def test_dummy_weights_fill_experts(tmp_path: Path) -> None:
    tiny.save("qwen2-moe", tmp_path)
    (tmp_path / WEIGHTS).unlink()
    runners = [cpu_runner(tmp_path, load_format=LoadFormat.DUMMY) for _ in range(2)]
    answers = [Driver(runner).generate([[5, 6, 7]], greedy(16))[0].tokens for runner in runners]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


def imitate(model: Any, kind: quantized.Kind, matrices: quantized.Tensors) -> Any:
    """A transformers model whose projections, those of experts too, multiply as the format does."""

    def expert(name: str, x: torch.Tensor) -> torch.Tensor:
        rows = kind.inputs(x)
        gate, up = (rows @ matrices[f"{name}.{half}_proj"].t() for half in ("gate", "up"))
        h = torch.nn.functional.silu(gate) * up
        return kind.inputs(h) @ matrices[f"{name}.down_proj"].t()

    def forward(
        name: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index in ids.unique().tolist():
            tokens, slots = (ids == index).nonzero(as_tuple=True)
            y = expert(f"{name}.{index}", x[tokens]) * weights[tokens, slots, None]
            out.index_add_(0, tokens, y)
        return out

    quantized.imitate(model, kind, matrices)
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.forward = partial(forward, name)
    return model


def prompt_logprobs(directory: Path, **settings: Any) -> torch.Tensor:
    runner = cpu_runner(directory, **settings)
    (result,) = Driver(runner).generate([tiny.prompts()[-1]], greedy(1, prompt_logprobs=0))
    runner.close()
    return torch.tensor([entry.logprob for entry in result.prompt_logprobs])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3-moe", "fp8, blocks"),
        ("qwen3-moe", "fp8, tensor, static"),
        ("qwen3-moe", "compressed, channel"),
        ("qwen3-moe", "compressed, weights alone"),
        # With a shared expert, whose inputs are rounded before its gate scales what they come to.
        ("qwen2-moe", "fp8, tensor, static"),
        ("qwen2-moe", "fbgemm"),
    ],
)
def test_float8_experts_are_those_of_the_format(family: str, name: str, tmp_path: Path) -> None:
    kind, model = quantized.kinds(16)[name], tiny.save(family, tmp_path)
    prompt = tiny.prompts()[-1]
    targets = torch.tensor(prompt[1:])[:, None]

    def said() -> torch.Tensor:
        return reference.logprobs(model, prompt)[:-1].gather(1, targets).squeeze(1)

    plain = said()
    matrices = quantized.quantize(tmp_path, kind)
    assert sum(".experts." in projection for projection in matrices) in (2 * 8 * 3, 1 * 6 * 3)
    imitate(model, kind, matrices)
    error = (prompt_logprobs(tmp_path) - said()).abs().mean()
    # A sum that rounds otherwise may round an input to the next float8: rare, and small.
    assert error < 0.05 * (said() - plain).abs().mean()


def test_experts_are_quantized_while_they_are_read_from_either_form(tmp_path: Path) -> None:
    model = tiny.save("qwen3-moe", tmp_path)
    plain = prompt_logprobs(tmp_path)
    single = prompt_logprobs(tmp_path, quantize=Quantize.FP8)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert torch.equal(prompt_logprobs(tmp_path, quantize=Quantize.FP8), single)
    assert 0 < (single - plain).abs().mean() < 0.5


def edit(directory: Path, **config: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_experts_that_one_layer_lacks_are_named_with_both_forms(tmp_path: Path) -> None:
    tiny.save("qwen3-moe", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    kept = {name: x for name, x in tensors.items() if "layers.2.mlp.experts" not in name}
    save_file(kept, tmp_path / WEIGHTS)
    with pytest.raises(
        ModelError,
        match=r"lacks model\.layers\.2\.mlp\.experts\.0\.gate_proj\.weight, .* and 21 more; it "
        r"has no model\.layers\.2\.mlp\.experts\.gate_up_proj either",
    ):
        cpu_runner(tmp_path)


@pytest.mark.parametrize(
    ("name", "cut", "shapes"),
    [
        ("gate_up_proj", slice(7), r"\(7, 96, 64\), the config asks for \(8, 96, 64\)"),
        ("down_proj", slice(3), r"\(3, 64, 48\), the config asks for \(8, 64, 48\)"),
    ],
)
def test_a_stack_that_is_cut_short_is_named(
    name: str, cut: slice, shapes: str, tmp_path: Path
) -> None:
    tiny.save("qwen3-moe", tmp_path).save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / WEIGHTS)
    full = f"model.layers.2.mlp.experts.{name}"
    tensors[full] = tensors[full][cut].contiguous()
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match=rf"{full} has shape {shapes}"):
        cpu_runner(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_local_experts": 4}, r"mlp\.gate\.weight has shape \(8, 64\), the config asks for"),
        ({"num_local_experts": 16}, r"experts\.8\.gate_proj\.weight"),
        ({"moe_intermediate_size": 32}, r"gate_proj\.weight has shape \(48, 64\), the config asks"),
        (
            {"moe_intermediate_size": 1 << 30},
            r"asks for [\d,]+ numbers .* checkpoint has [\d,]+: one",
        ),
        ({"vocab_size": 1 << 30}, r"asks for 1[\d,]+ numbers .* vocab_size 1073741824, 8 experts"),
    ],
    ids=str,
)
def test_a_config_that_contradicts_the_tensors_is_refused(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    tiny.save("qwen3-moe", tmp_path)
    edit(tmp_path, **change)
    with pytest.raises(ModelError, match=named):
        cpu_runner(tmp_path)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_the_tokens_of_each_expert_are_counted_from_the_start_on(kind: str, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path)
    config = load_config(tmp_path)
    assert config.experts is not None
    runner = cpu_runner(tmp_path)
    loads = runner.expert_tokens()
    assert loads is not None
    assert loads.shape == (config.expert_layers, config.experts.count)
    assert not loads.any(), "what the start computes does not count"
    prompts = tiny.prompts()
    Driver(runner).generate(prompts, greedy(4))
    loads = runner.expert_tokens()
    runner.close()
    assert loads is not None
    tokens = sum(map(len, prompts)) + 3 * len(prompts)
    # The last layer computes those positions alone that a token is sampled from.
    assert loads[0].sum() == config.experts.per_token * tokens
    assert loads[-1].sum() == config.experts.per_token * 4 * len(prompts)


def test_a_model_without_experts_counts_none(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    runner = cpu_runner(tmp_path)
    assert runner.expert_tokens() is None
    runner.close()

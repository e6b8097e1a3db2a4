"""Each supported architecture computes what transformers computes; others are refused clearly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixgrove.kernels.norm import rms_norm_reference
from radixgrove.kernels.weight import Weight
from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.model.parse import parse_config
from radixgrove.protocol.settings import Device, DType, LoadFormat, WorkerSettings
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.models.ops import CpuOps, KernelOps, TorchOps
from radixgrove.worker.plan import Executor
from tests.worker.execution import reference, tiny
from tests.worker.execution.driver import Driver, greedy


def build(directory: Path, **changes: Any) -> Executor:
    settings = WorkerSettings(
        **{"device": Device.CPU, "dtype": DType.FLOAT32, "max_running": 8, "kv_tokens": 2048}
        | changes
    )
    return build_executor(settings, directory, lambda phase: None)[0]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_greedy_text_and_logprobs_equal_transformers(kind: str, tmp_path: Path) -> None:
    model = tiny.save(kind, tmp_path)
    prompts = tiny.prompts()
    results = Driver(build(tmp_path)).generate(prompts, greedy(24, logprobs=0), chunk=50)
    assert max(result.chunks for result in results) == 3
    for prompt, result in zip(prompts, results, strict=True):
        rows = reference.logprobs(model, prompt + result.tokens)[len(prompt) - 1 : -1]
        assert len(result.tokens) == 24
        assert result.tokens == rows.argmax(-1).tolist()
        expected = rows.amax(-1)
        got = torch.tensor([entry.logprob for entry in result.logprobs])
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", [*tiny.PARTS, *tiny.WINDOWED, *tiny.MIXTURES])
def test_logits_are_transformers_cold_and_behind_cached_prefixes(kind: str, tmp_path: Path) -> None:
    model, prompts = tiny.save(kind, tmp_path), tiny.prompts()
    targets = torch.tensor(prompts[-1][1:])[:, None]
    expected = reference.logprobs(model, prompts[-1])[:-1].gather(1, targets).squeeze(1)
    texts = reference.greedy(model, prompts, 12)
    driver = Driver(build(tmp_path))
    (result,) = driver.generate(prompts[-1:], greedy(1, prompt_logprobs=0))
    got = torch.tensor([entry.logprob for entry in result.prompt_logprobs])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    driver.generate(prompts, greedy(1), reuse=True)
    for chunk in (7, 1 << 30):
        results = driver.generate(prompts, greedy(12), chunk=chunk, reuse=True)
        assert [result.tokens for result in results] == texts
        assert sum(result.cached for result in results) > 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_additions_left_to_the_next_norm_change_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save(kind, tmp_path)
    prompts = tiny.prompts()
    asked = greedy(4, prompt_logprobs=0)
    expected = Driver(build(tmp_path)).generate(prompts, asked)
    deferred: list[int] = []

    def defers(ops: TorchOps, tokens: int, weight: Weight) -> bool:
        deferred.append(tokens)
        return True

    monkeypatch.setattr(TorchOps, "defers_residual", defers)
    got = Driver(build(tmp_path)).generate(prompts, asked)
    assert deferred
    for one, other in zip(got, expected, strict=True):
        assert one.tokens == other.tokens
        logprobs = (
            torch.tensor([entry.logprob for entry in result.prompt_logprobs])
            for result in (one, other)
        )
        torch.testing.assert_close(*logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("path", ["the processor's", "plain"])
def test_bfloat16_is_as_close_to_float32_as_transformers_own(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "plain":
        monkeypatch.setattr(CpuOps, "supports", lambda dtype: False)
    exact = tiny.save("qwen3", tmp_path)
    prompts = tiny.prompts()[-3:]
    results = Driver(build(tmp_path, dtype=DType.BFLOAT16)).generate(
        prompts, greedy(1, prompt_logprobs=0)
    )
    rough = reference.load(tmp_path, torch.bfloat16)
    ours = theirs = 0.0
    for prompt, result in zip(prompts, results, strict=True):
        targets = torch.tensor(prompt[1:])[:, None]
        expected = reference.logprobs(exact, prompt)[:-1].gather(1, targets).squeeze(1)
        got = torch.tensor([entry.logprob for entry in result.prompt_logprobs])
        ours += (got - expected).abs().mean().item()
        hf = reference.logprobs(rough, prompt)[:-1].gather(1, targets).squeeze(1)
        theirs += (hf - expected).abs().mean().item()
    assert 0 < ours < 2 * theirs


def test_old_spelling_of_rope_settings() -> None:
    old = parse_config(
        {
            **tiny._SIZES,
            "architectures": ["LlamaForCausalLM"],
            "rope_theta": 500000.0,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "torch_dtype": "bfloat16",
        }
    )
    assert (old.attention.rope.theta, old.attention.rope.kind) == (500000.0, "linear")
    assert old.dtype == "bfloat16"


def test_a_window_that_all_of_a_text_is_within_is_none() -> None:
    for window, windowed in ((100, 3), (256, 0), (None, 0)):
        config = parse_config(
            {**tiny._SIZES, "architectures": ["MistralForCausalLM"], "sliding_window": window}
        )
        assert config.max_position_embeddings == 256
        assert len(config.attention.windowed) == windowed
        assert config.attention.window_of(0) == (100 if windowed else 0)


def test_layers_rotate_as_their_kind_does_where_the_window_hides_nothing(tmp_path: Path) -> None:
    """Of Gemma, whose layers with a window have a rotary embedding of their own."""
    assert_same_texts(tmp_path, tiny.save("gemma3", tmp_path, sliding_window=256))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "supported are Gemma3ForCausalLM, Glm4ForCausalLM, GlmForCausalLM, GptOss",
        ),
        ({"architectures": None}, "none named"),
        ({"hidden_act": "gelu"}, "only silu, gelu_pytorch_tanh"),
        ({"hidden_size": None}, "hidden_size must be a positive integer"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"quantization": {"bits": 4}}, "quantization is not supported, only quantization_config"),
        ({"torch_dtype": "float8"}, "dtype 'float8' is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers 1073741824 is more than 1024"),
        ({"max_position_embeddings": 1 << 30}, "length of 1073741824 tokens; possible are 1 to"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 1e12,
                    "original_max_position_embeddings": 64,
                }
            },
            "length of 64000000000000 tokens",
        ),
    ],
)
def test_refused_configs(change: dict[str, Any], complaint: str) -> None:
    raw = {**tiny._SIZES, "architectures": ["LlamaForCausalLM"], **change}
    with pytest.raises(ModelError, match=complaint):
        parse_config(raw)


def test_unknown_rope_is_refused(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    _edit_config(tmp_path, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    with pytest.raises(ModelError, match="'spiral' is not supported; supported are default"):
        build(tmp_path)


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        load_config(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        build(tmp_path)


def test_unexpected_shape_is_named(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(65,\)"):
        build(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "gpt-oss"])
def test_layers_that_the_config_does_not_count_are_named(kind: str, tmp_path: Path) -> None:
    tiny.save(kind, tmp_path)
    _edit_config(tmp_path, num_hidden_layers=2)
    found = r"num_hidden_layers is 2, and the checkpoint has model\.layers\.2\."
    with pytest.raises(ModelError, match=found):
        build(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "bias"),
    [
        ("llama-biased", {"attention_bias": False}, "self_attn"),
        ("llama-biased", {"mlp_bias": False}, "mlp"),
        ("gpt-oss", {"attention_bias": False}, "self_attn"),
        ("stablelm", {"use_qkv_bias": False}, "self_attn"),
    ],
)
def test_a_bias_that_the_config_denies_is_named(
    kind: str, change: dict[str, Any], bias: str, tmp_path: Path
) -> None:
    tiny.save(kind, tmp_path)
    _edit_config(tmp_path, **change)
    named = rf"checkpoint has model\.layers\.[0-2]\.{bias}\.[a-z]+_proj\.bias, and by config.json"
    with pytest.raises(ModelError, match=named):
        build(tmp_path)


def test_a_bias_that_the_config_denies_may_have_any_type(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = torch.ones(96).to(torch.float8_e4m3fn)
    tensors["model.layers.1.mlp.up_proj.bias"] = bias
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"checkpoint has model\.layers\.1\.mlp\.up_proj\.bias"):
        build(tmp_path)


def test_biases_of_zeros_change_nothing(tmp_path: Path) -> None:
    model = tiny.save("llama-biased", tmp_path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    model.save_pretrained(tmp_path)
    _edit_config(tmp_path, attention_bias=False, mlp_bias=False)
    assert_same_texts(tmp_path, model)


def test_no_weights(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot read"):
        build(tmp_path)


def split(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Two files and an index in place of one; all tensors, and the index's map."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for i in range(2):
        part = {name: tensors[name] for name in names[i::2]}
        save_file(part, directory / f"part-{i}.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return tensors, weight_map


def assert_same_texts(directory: Path, model: Any) -> None:
    prompts = tiny.prompts()[:4]
    results = Driver(build(directory)).generate(prompts, greedy(8))
    assert [result.tokens for result in results] == reference.greedy(model, prompts, 8)


def test_weights_in_several_files(tmp_path: Path) -> None:
    model = tiny.save("llama", tmp_path)
    tensors, _ = split(tmp_path)
    assert_same_texts(tmp_path, model)

    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "../model.safetensors")}))
    with pytest.raises(ModelError, match="outside its directory"):
        build(tmp_path)


def test_a_file_that_the_index_names_and_is_not_there(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    split(tmp_path)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"index\.json names part-1\.safetensors, which is missing"
    ):
        build(tmp_path)


def test_of_two_copies_of_a_tensor_the_index_names_the_one_that_counts(tmp_path: Path) -> None:
    model = tiny.save("llama", tmp_path)
    _, weight_map = split(tmp_path)
    for number in range(2):
        path = tmp_path / f"part-{number}.safetensors"
        own = load_file(path)
        stale = {name: torch.zeros(3) for name, file in weight_map.items() if file != path.name}
        save_file(own | stale, path)
    assert_same_texts(tmp_path, model)


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    model = tiny.save("llama", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("damaged, and not needed")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("as well")
    assert_same_texts(tmp_path, model)


def test_a_model_saved_without_its_head(tmp_path: Path) -> None:
    """As embedding models are published: the body's own names, and a head that is tied to it."""
    model = tiny.save("llama3-rope", tmp_path)
    model.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    assert_same_texts(tmp_path, model)


def test_a_tied_table_saved_as_head_alone(tmp_path: Path) -> None:
    model = tiny.save("llama3-rope", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_texts(tmp_path, model)


def test_a_tied_table_saved_under_both_names(tmp_path: Path) -> None:
    model = tiny.save("llama3-rope", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_texts(tmp_path, model)

    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="set tie_word_embeddings to false"):
        build(tmp_path)
    for head, said in (
        (tensors["lm_head.weight"].to(torch.float8_e4m3fn), "is of type F8_E4M3, the config asks"),
        (torch.zeros(()), r"has shape \(\), the config asks for \(512, 64\)"),
    ):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=rf"lm_head\.weight {said}"):
            build(tmp_path)


def test_a_head_that_is_missing_may_be_the_embedding(tmp_path: Path) -> None:
    tiny.save("llama3-rope", tmp_path)
    _edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight; set tie_word_embeddings to true"):
        build(tmp_path)


@pytest.mark.parametrize(
    "rope",
    [
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"attention_factor": 0.8, "truncate": False},
    ],
)
def test_texts_with_a_yarn_of_deepseeks_kind(rope: dict[str, Any], tmp_path: Path) -> None:
    tiny.save("qwen2-yarn", tmp_path)
    _edit_config(
        tmp_path, rope_parameters=dict(tiny.KINDS["qwen2-yarn"][1]["rope_parameters"], **rope)
    )
    assert_same_texts(tmp_path, reference.load(tmp_path, torch.float32))


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    executors = [build(tmp_path, load_format=LoadFormat.DUMMY) for _ in range(2)]
    texts = [Driver(executor).generate([[5, 6, 7]], greedy(16))[0].tokens for executor in executors]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def _edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_logits_on_cuda_are_float32() -> None:
    """In bfloat16 the logits' last rounding alone would set decoding apart from scoring."""
    torch.manual_seed(0)
    ops = KernelOps()
    x, weight, norm = (torch.randn(*shape).bfloat16() for shape in ((5, 96), (40, 96), (96,)))
    logits = ops.head(x, Weight.plain(weight), norm, 1e-5, None)
    assert logits.dtype == ops.logits_dtype(torch.bfloat16) == torch.float32
    exact = rms_norm_reference(x, norm, 1e-5).double() @ weight.double().t()
    torch.testing.assert_close(logits.double(), exact, rtol=1e-4, atol=1e-4)

"""Whole models from quantized checkpoints: what transformers' own modules compute once each
projection multiplies as the format says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.settings import Device, DType, LoadFormat, Quantize, WorkerSettings
from radixgrove.worker.cache.identity import cache_namespace
from radixgrove.worker.engine.executor import build_executor
from radixgrove.worker.execution.choices import choose_quantization
from radixgrove.worker.messages import EngineInfo
from radixgrove.worker.models.context import TensorPlacement
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.models.formats.choose import choose_formats
from radixgrove.worker.models.ops import KernelOps
from radixgrove.worker.parallel.group import Shard, TensorParallel
from radixgrove.worker.plan import Executor
from tests.worker.execution import reference, tiny
from tests.worker.execution.driver import Driver, greedy
from tests.worker.models import quantized
from tests.worker.parallel.ranks import generate

BLOCK = 16
KINDS = quantized.kinds(BLOCK)
PROMPTS = tiny.prompts()[-3:]


def build(directory: Path, **changes: Any) -> tuple[Executor, EngineInfo]:
    options = {"device": Device.CPU, "dtype": DType.FLOAT32, "max_running": 8, "kv_tokens": 2048}
    return build_executor(WorkerSettings(**options | changes), directory, lambda phase: None)


def prompt_logprobs(directory: Path, **changes: Any) -> torch.Tensor:
    executor, _ = build(directory, **changes)
    results = Driver(executor).generate(PROMPTS, greedy(1, prompt_logprobs=0), chunk=50)
    return torch.cat(
        [torch.tensor([entry.logprob for entry in one.prompt_logprobs]) for one in results]
    )


def expected_logprobs(model: Any) -> torch.Tensor:
    rows = []
    for prompt in PROMPTS:
        targets = torch.tensor(prompt[1:])[:, None]
        rows.append(reference.logprobs(model, prompt)[:-1].gather(1, targets).squeeze(1))
    return torch.cat(rows)


# One for each way in which a config names what is not quantized.
IGNORING = ("fp8, blocks", "fp8, tensor, static", "compressed, channel", "int8, channel")


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        *(pytest.param(name, (), id=f"{name}-all") for name in KINDS),
        *(
            pytest.param(
                name,
                ("o_proj", "1.mlp.down_proj"),
                id=f"{name}-some ignored",
                marks=[] if name in IGNORING else [pytest.mark.slow],
            )
            for name in KINDS
        ),
    ],
)
def test_probabilities_are_those_of_the_format(
    name: str, keep: tuple[str, ...], tmp_path: Path
) -> None:
    kind = quantized.kinds(BLOCK)[name]
    if keep and kind.config["quant_method"] == "compressed-tensors":
        kind.config["ignore"] = ["lm_head", "re:.*o_proj$", "model.layers.1.mlp.down_proj"]
    elif keep:
        key = "ignored_layers" if "ignored_layers" in kind.config else "modules_to_not_convert"
        kind.config[key] = ["lm_head", *keep]
    model = tiny.save("llama-biased", tmp_path)
    plain = expected_logprobs(model)
    stands_for = quantized.quantize(tmp_path, kind, keep)
    assert len(stands_for) == 3 * (6 if keep else 7) - bool(keep)
    expected = expected_logprobs(quantized.imitate(model, kind, stands_for))
    got = prompt_logprobs(tmp_path)
    # A sum that rounds otherwise may round an input to the next number: rare, and small. Int8 has
    # more of those to each side, so that its error is smaller, but for that.
    error = (got - expected).abs().mean().item()
    assert error < (0.1 if kind.integers else 0.05) * (expected - plain).abs().mean().item()


@pytest.mark.parametrize(
    ("family", "fused", "name"),
    [
        ("phi3", "self_attn.qkv_proj", "fp8, tensor, static"),
        ("phi3", "self_attn.qkv_proj", "fp8, blocks"),
        ("phi3", "self_attn.qkv_proj", "compressed, channel"),
        ("glm", "mlp.gate_up_proj", "fp8, blocks"),
        ("glm", "mlp.gate_up_proj", "compressed, channel"),
    ],
)
def test_tensors_that_have_several_projections(
    family: str, fused: str, name: str, tmp_path: Path
) -> None:
    """Of GLM dimensions of heads change places, and the scales of their rows with them."""
    kind, model = KINDS[name], tiny.save(family, tmp_path)
    plain = expected_logprobs(model)
    stands_for = quantized.quantize(tmp_path, kind)
    assert f"model.layers.2.{fused}" in stands_for
    expected = expected_logprobs(quantized.imitate(model, kind, stands_for))
    error = (prompt_logprobs(tmp_path) - expected).abs().mean().item()
    assert error < 0.05 * (expected - plain).abs().mean().item()


@pytest.mark.parametrize("block", [None, (BLOCK, BLOCK)], ids=["tensor", "blocks"])
def test_checkpoints_of_transformers_quantizer(block: Any, tmp_path: Path) -> None:
    """Read as transformers reads them, which widens them where there is no GPU."""
    tiny.save("qwen3", tmp_path)
    quantized.by_transformers(tmp_path, weight_block_size=block)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    theirs = expected_logprobs(reference.load(tmp_path))
    ours = prompt_logprobs(tmp_path)
    # They leave inputs as they are; ours are rounded, as on a GPU.
    assert (ours - theirs).abs().mean().item() < 0.2


def test_online_rounds_each_row_and_token(tmp_path: Path) -> None:
    model = tiny.save("qwen2", tmp_path)
    expected = expected_logprobs(model)
    online = prompt_logprobs(tmp_path, quantize=Quantize.FP8)
    kind = quantized.kinds(BLOCK)["compressed, channel"]
    quantized.quantize(tmp_path, kind)
    written = prompt_logprobs(tmp_path)
    assert 0 < (online - expected).abs().mean().item() < 0.5
    assert (online - written).abs().mean().item() < 1e-3


def test_two_ranks_write_the_same_text(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    tiny.save("llama", model_dir)
    quantized.quantize(model_dir, KINDS["fp8, blocks"])
    prompts = PROMPTS[:2]
    alone = generate(tmp_path / "alone", model_dir, 1, prompts)
    assert generate(tmp_path / "two", model_dir, 2, prompts) == alone


@pytest.mark.parametrize("quantize", [Quantize.NONE, Quantize.FP8])
def test_dummy_weights_need_no_checkpoint(quantize: Quantize, tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path)
    if quantize is Quantize.NONE:
        quantized.quantize(tmp_path, KINDS["fp8, blocks"])
    (tmp_path / "model.safetensors").unlink()
    executor, _ = build(tmp_path, load_format=LoadFormat.DUMMY, quantize=quantize)
    text = Driver(executor).generate([[5, 6, 7]], greedy(16))[0].tokens
    assert len(set(text)) > 1


def test_an_ignore_that_matches_nothing_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As the head of a model that has none of its own."""
    tiny.save("qwen2", tmp_path)
    quantized.quantize(tmp_path, quantized.kinds(BLOCK)["compressed, channel"])
    with caplog.at_level(logging.WARNING):
        build(tmp_path)
    assert "quantization_config: ignore lm_head matches no projection" in caplog.text


def test_a_target_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    kind = quantized.kinds(BLOCK)["compressed, channel"]
    kind.config["config_groups"]["group_0"]["targets"] = ["Linear", "re:.*expert.*"]
    quantized.quantize(tmp_path, kind)
    with pytest.raises(ModelError, match=r"targets re:\.\*expert\.\* match no projection"):
        build(tmp_path)


def test_a_quantized_head_is_refused(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    kind = quantized.kinds(BLOCK)["compressed, channel"]
    kind.config["ignore"] = []
    quantized.quantize(tmp_path, kind)
    with pytest.raises(ModelError, match=r"lm_head is quantized .* among the ignored layers"):
        build(tmp_path)


def test_a_checkpoint_is_not_quantized_twice(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    quantized.quantize(tmp_path, KINDS["fp8, blocks"])
    with pytest.raises(ModelError, match="set quantize to none"):
        build(tmp_path, quantize=Quantize.FP8)


def test_weights_that_have_no_scale_are_named_while_they_are_quantized(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds values that are"):
        build(tmp_path, quantize=Quantize.FP8)


def test_layers_of_several_formats_are_tuned_apart(tmp_path: Path) -> None:
    """As checkpoints are whose first and last layers are not quantized."""
    tiny.save("llama", tmp_path)
    kind = quantized.kinds(BLOCK)["compressed, channel"]
    kind.config["ignore"] = ["lm_head", "re:.*0.self_attn.o_proj$", "model.layers.1.mlp.down_proj"]
    quantized.quantize(tmp_path, kind, ("0.self_attn.o_proj", "1.mlp.down_proj"))
    config = load_config(tmp_path)
    formats = choose_formats(config.quantization)
    group = TensorParallel(Shard())
    place = TensorPlacement(group, torch.bfloat16, torch.device("cpu"), formats)
    decoder = Decoder(config, place, KernelOps())
    found = decoder.projections()
    for projection in found:
        assert len({weight.format for weight in projection.weights}) == 1
    kinds = {(p.weights[0].quantized, p.residual, p.silu, len(p.weights)) for p in found}
    layers = config.num_layers
    assert kinds == {
        (True, False, False, layers),  # query, key and value
        (False, True, False, 1),  # outputs and downs
        (True, True, False, layers - 1),
        (True, False, True, 1),  # gate and up, before an unquantized product
        (True, False, True, layers - 1),
        (False, False, False, 1),  # the head
    }


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    config = load_config(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    device = torch.device("cuda", 0)
    assert choose_quantization(Quantize.NONE, config, device) is None
    with pytest.raises(ModelError, match=r"8\.9 or later, .* 8\.6; set quantize to none"):
        choose_quantization(Quantize.FP8, config, device)


def test_names_of_cached_blocks_tell_quantized_weights_apart() -> None:
    plain = WorkerSettings(served_model_name=["m"])
    names = {
        cache_namespace(settings, "bfloat16", "bfloat16")
        for settings in (plain, plain.model_copy(update={"quantize": Quantize.FP8}))
    }
    assert len(names) == 2

"""Whether a model can run as it is meant to, known from its `config.json` alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.model.fit import Intended, check_fit, count_parameters
from radixgrove.protocol.model.parse import parse_config

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_bytes())


def one_of_each_kind() -> list[dict[str, Any]]:
    """Of what changes which weights there are: architecture, biases, tied embeddings."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in PUBLISHED:
        if "refused" not in entry:
            config = parse_config(entry["config"])
            attention = config.attention
            biases = (attention.qkv_bias, attention.output_bias, config.mlp.bias, attention.qk_norm)
            (architecture,) = entry["config"]["architectures"]
            found.setdefault((architecture, config.tied_embeddings, *biases), entry)
    return list(found.values())


@pytest.mark.parametrize("entry", one_of_each_kind(), ids=lambda entry: entry["model"])
def test_weights_are_counted_as_transformers_makes_them(
    entry: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]))
    config = AutoConfig.from_pretrained(tmp_path)
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    own = replace(parse_config(entry["config"]), num_layers=2)
    assert count_parameters(own) == sum(p.numel() for p in model.parameters())


EIGHT_BILLION = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
)


@pytest.mark.parametrize(
    ("intended", "named"),
    [
        (Intended(tp=3), "possible: 1, 2, 4, 8"),
        (Intended(pp=33), "pp 33 exceeds the model's 32 layers"),
        (Intended(max_model_len=8193), "8193 exceeds the model's 8192"),
        (Intended(tp=2, memory=14 << 30), r"15.0 GiB in bfloat16, and its 2 ranks have 14"),
        (Intended(dtype="float32", memory=16 << 30), "29.9 GiB in float32"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_with_what_would(intended: Intended, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        check_fit(EIGHT_BILLION, intended)


MIXTURE = parse_config(
    next(entry["config"] for entry in PUBLISHED if entry["model"] == "Qwen/Qwen3-30B-A3B")
)


@pytest.mark.parametrize(
    ("intended", "named"),
    [
        (Intended(tp=3), "expert width 768; possible: 1, 2, 4$"),
        (Intended(tp=8, ep=4), "expert width 768 over ep 4; possible: 4$"),
        (Intended(tp=4, ep=3), "tp 4 and the model's 128 experts; possible: 1, 2, 4$"),
        (Intended(memory=56 << 30), "56.9 GiB in bfloat16"),
    ],
    ids=str,
)
def test_experts_that_cannot_run_are_refused_with_what_would(
    intended: Intended, named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        check_fit(MIXTURE, intended)


GPT_OSS = parse_config(
    next(entry["config"] for entry in PUBLISHED if entry["model"] == "openai/gpt-oss-20b")
)


@pytest.mark.parametrize(
    ("intended", "named"),
    [
        (Intended(memory=38 << 30), "39.0 GiB in bfloat16, to which mxfp4 is widened"),
        (Intended(tp=4), "tp 4 would cut blocks of 1x32 .* the largest that works is 2$"),
        (Intended(tp=8, ep=2), "tp 8 would cut blocks of 1x32"),
        (Intended(tp=4, ep=3), "tp 4 and the model's 32 experts; possible: 1, 2, 4$"),
        (Intended(quantize="fp8"), r"quantized already|this one is \(mxfp4\)"),
    ],
    ids=str,
)
def test_experts_in_four_bits(intended: Intended, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        check_fit(GPT_OSS, intended)


def test_experts_in_four_bits_that_can_run() -> None:
    for intended in (Intended(tp=2), Intended(tp=4, ep=2), Intended(tp=8, ep=8)):
        check_fit(GPT_OSS, replace(intended, memory=40 << 30))


def test_experts_of_which_there_are_none_are_not_spread() -> None:
    with pytest.raises(ModelError, match="ep 2 is for models with experts"):
        check_fit(EIGHT_BILLION, Intended(tp=2, ep=2))
    check_fit(MIXTURE, Intended(tp=4, ep=4))


def test_what_can_run_or_is_not_known_is_let_through() -> None:
    check_fit(EIGHT_BILLION, Intended(tp=8, max_model_len=8192, memory=16 << 30))
    check_fit(EIGHT_BILLION, Intended(tp=2, pp=2, memory=16 << 30))
    check_fit(EIGHT_BILLION, Intended(dtype="float32"))

"""Configurations of published models read as transformers reads them; `published.json` has facts of
their files. What cannot be served is refused, in words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from radixgrove.protocol.model.config import ModelConfig, ModelError, RopeConfig
from radixgrove.protocol.model.directory import ModelDirectory
from radixgrove.protocol.model.parse import parse_config
from radixgrove.worker.models.rope import inverse_frequencies
from tests.protocol.model.small_tokenizer import write_tokenizer

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_bytes())
SERVED = [entry for entry in PUBLISHED if "refused" not in entry]
REFUSED = [entry for entry in PUBLISHED if "refused" in entry]


def names(entries: list[dict[str, Any]]) -> list[str]:
    return [entry["model"] for entry in entries]


def write(directory: Path, entry: dict[str, Any]) -> None:
    (directory / "config.json").write_text(json.dumps(entry["config"]))
    if "generation" in entry:
        (directory / "generation_config.json").write_text(json.dumps(entry["generation"]))


def reference_frequencies(config: Any) -> tuple[torch.Tensor, float]:
    """As transformers' rotary embedding of the model initialises them."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        rotated = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float64) / rotated
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.double(), magnitude


def frequencies_of(
    config: ModelConfig, rope: RopeConfig | None = None
) -> tuple[torch.Tensor, float]:
    return inverse_frequencies(rope or config.attention.rope, config.attention.head_dim)


def reference_length(config: Any) -> int:
    """What a card means: YaRN's factor counts."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "yarn":
        return int(rope["factor"] * rope["original_max_position_embeddings"])
    return int(config.max_position_embeddings)


def reference_windowed(config: Any) -> set[int]:
    """Layers that see less than the whole of the longest text."""
    window = getattr(config, "sliding_window", None)
    if not window or window >= reference_length(config):
        return set()
    kinds = getattr(config, "layer_types", None)
    if config.model_type in ("mistral", "mixtral", "phi3", "starcoder2", "qwen3_moe"):
        kinds = ["sliding_attention"] * config.num_hidden_layers
    elif config.model_type not in (
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "smollm3",
        "gemma3_text",
        "gpt_oss",
    ):
        kinds = []
    return {layer for layer, kind in enumerate(kinds or ()) if kind == "sliding_attention"}


def test_there_are_enough_of_them() -> None:
    assert len(SERVED) >= 60
    assert {entry["config"]["architectures"][0] for entry in SERVED} == {
        "Gemma3ForCausalLM",
        "Glm4ForCausalLM",
        "GlmForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Olmo2ForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SmolLM3ForCausalLM",
        "StableLmForCausalLM",
        "Starcoder2ForCausalLM",
    }


@pytest.mark.parametrize("entry", SERVED, ids=names(SERVED))
def test_published_configuration(entry: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, entry)
    write_tokenizer(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path)
    directory = ModelDirectory.load(tmp_path)
    ours = directory.config

    assert sizes(ours) == {
        "hidden": theirs.hidden_size,
        "inner": theirs.intermediate_size,
        "layers": theirs.num_hidden_layers,
        "heads": theirs.num_attention_heads,
        "kv_heads": theirs.num_key_value_heads,
        "head_dim": getattr(theirs, "head_dim", None)
        or theirs.hidden_size // theirs.num_attention_heads,
        "vocabulary": theirs.vocab_size,
        "eps": next(
            value
            for name in ("norm_epsilon", "layer_norm_eps", "rms_norm_eps")
            if (value := getattr(theirs, name, None)) is not None
        ),
        "tied": theirs.tie_word_embeddings,
        # gpt-oss says none, and transformers widens its experts to this.
        "dtype": str(theirs.dtype or torch.bfloat16).removeprefix("torch."),
    }
    assert experts(ours) == reference_experts(theirs)
    assert ours.attention.unrotated == unrotated(theirs)
    assert ours.max_position_embeddings == reference_length(theirs)
    assert ours.attention.windowed == reference_windowed(theirs)
    if windowed := ours.attention.windowed:
        assert ours.attention.window_of(min(windowed)) == theirs.sliding_window
    theirs.head_dim = ours.attention.head_dim
    if ours.attention.local_rope is not None:
        own = theirs.rope_parameters["sliding_attention"]
        assert ours.attention.local_rope.theta == own["rope_theta"]
        assert ours.attention.local == reference_windowed(theirs)
        theirs.rope_parameters = theirs.rope_parameters["full_attention"]
    frequencies, magnitude = frequencies_of(ours)
    expected, expected_magnitude = reference_frequencies(theirs)
    torch.testing.assert_close(frequencies, expected, rtol=1e-5, atol=0)
    assert magnitude == pytest.approx(expected_magnitude)

    if "generation" in entry:
        eos = GenerationConfig.from_pretrained(tmp_path).eos_token_id
    else:
        eos = GenerationConfig.from_model_config(theirs).eos_token_id
    assert set(directory.eos_ids) == set(eos if isinstance(eos, list) else [eos])


def sizes(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden": config.hidden_size,
        "inner": config.mlp.width,
        "layers": config.num_layers,
        "heads": config.attention.heads,
        "kv_heads": config.attention.kv_heads,
        "head_dim": config.attention.head_dim,
        "vocabulary": config.vocab_size,
        "eps": config.norms.eps,
        "tied": config.tied_embeddings,
        "dtype": config.dtype,
    }


def unrotated(config: Any) -> set[int]:
    rotate = getattr(config, "no_rope_layers", [])
    return {layer for layer, rotates in enumerate(rotate) if not rotates}


def experts(config: ModelConfig) -> dict[str, Any] | None:
    if config.experts is None:
        return None
    return {
        "count": config.experts.count,
        "per_token": config.experts.per_token,
        "inner": config.experts.intermediate_size,
        "renormalize": config.experts.renormalize,
        "shared": config.experts.shared_size,
        "layers": config.expert_layers,
    }


def reference_experts(config: Any) -> dict[str, Any] | None:
    if not hasattr(config, "num_experts_per_tok"):
        return None
    return {
        "count": config.num_experts,
        "per_token": config.num_experts_per_tok,
        "inner": getattr(config, "moe_intermediate_size", config.intermediate_size),
        "renormalize": config.model_type in ("mixtral", "gpt_oss") or config.norm_topk_prob,
        "shared": getattr(config, "shared_expert_intermediate_size", 0),
        "layers": config.num_hidden_layers,  # of published ones all
    }


MIXTURE = next(entry["config"] for entry in SERVED if "A3B" in entry["model"])


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"mlp_only_layers": [0, 3]}, [1, 2, 4, 5]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [3, 5]),
        ({"num_experts": 0}, []),
    ],
    ids=str,
)
def test_layers_with_experts(change: dict[str, Any], layers: list[int]) -> None:
    config = parse_config(MIXTURE | {"num_hidden_layers": 6} | change)
    assert [layer for layer in range(6) if config.experts_of(layer)] == layers


def test_an_absent_key_of_experts_has_the_familys_default(tmp_path: Path) -> None:
    for kind in ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe"):
        entry = next(entry for entry in SERVED if entry["config"]["model_type"] == kind)
        keys = "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"
        keys += "moe_intermediate_size", "shared_expert_intermediate_size", "rope_theta"
        keys += "decoder_sparse_step", "mlp_only_layers", "rms_norm_eps"
        bare = {key: value for key, value in entry["config"].items() if key not in keys}
        write(tmp_path, {"config": bare})
        theirs = AutoConfig.from_pretrained(tmp_path)
        ours = parse_config(bare)
        assert experts(ours) == reference_experts(theirs)
        assert ours.norms.eps == theirs.rms_norm_eps
        assert ours.attention.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("kind", ["smollm3", "starcoder2", "granite", "olmo2"])
def test_an_absent_key_has_the_familys_default(kind: str, tmp_path: Path) -> None:
    entry = next(entry for entry in SERVED if entry["config"]["model_type"] == kind)
    keys = "rms_norm_eps", "norm_epsilon", "rope_theta", "tie_word_embeddings", "no_rope_layers"
    keys += "num_key_value_heads", "max_position_embeddings", "hidden_act", "residual_multiplier"
    bare = {key: value for key, value in entry["config"].items() if key not in keys}
    write(tmp_path, {"config": bare})
    theirs = AutoConfig.from_pretrained(tmp_path)
    ours = parse_config(bare)
    assert ours.norms.eps == (getattr(theirs, "norm_epsilon", None) or theirs.rms_norm_eps)
    assert ours.attention.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.attention.kv_heads == theirs.num_key_value_heads
    assert ours.attention.unrotated == unrotated(theirs)
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    assert ours.mlp.activation == theirs.hidden_act
    assert ours.multipliers.residual == getattr(theirs, "residual_multiplier", 1.0)
    assert ours.max_position_embeddings == reference_length(theirs)


def test_a_list_of_layers_that_rotate_has_one_entry_for_each() -> None:
    entry = next(entry for entry in SERVED if entry["config"]["model_type"] == "smollm3")
    with pytest.raises(ModelError, match="no_rope_layers must have an entry for each of 36 layers"):
        parse_config(entry["config"] | {"no_rope_layers": [1, 0]})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"hidden_act": "gelu_pytorch_tanh"}, "'gelu_pytorch_tanh' is not supported for experts"),
        ({"num_experts": 513}, "num_experts 513 is more than 512"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok 129 of 128 experts"),
        ({"num_local_experts": 64}, "num_experts and num_local_experts differ"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer"),
        ({"mlp_only_layers": "first"}, "mlp_only_layers must be a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive integer"),
        ({"num_expert_group": 4}, "num_expert_group 4 is not supported"),
        ({"moe_router_scale": 2.5}, "moe_router_scale 2.5 is not supported"),
    ],
    ids=str,
)
def test_experts_that_are_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        parse_config(MIXTURE | change)


@pytest.mark.parametrize("entry", REFUSED, ids=names(REFUSED))
def test_published_configuration_that_is_not_served(entry: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=entry["refused"]):
        parse_config(entry["config"])


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.0, "beta_fast": 16},
        {"rope_type": "yarn", "factor": 8.0, "truncate": False, "beta_slow": 2},
        {"rope_type": "yarn", "factor": None},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"type": "default"},
    ],
    ids=str,
)
def test_rope_parameters(rope: dict[str, Any], spelling: str, tmp_path: Path) -> None:
    rope = dict(rope)
    if rope.get("rope_type") in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = 4096
    config = dict(SERVED[0]["config"], max_position_embeddings=16384, rope_theta=30000.0)
    write(tmp_path, {"config": config | {spelling: rope}})
    theirs = AutoConfig.from_pretrained(tmp_path)
    ours = parse_config(config | {spelling: rope})
    frequencies, magnitude = frequencies_of(ours)
    expected, expected_magnitude = reference_frequencies(theirs)
    torch.testing.assert_close(frequencies, expected, rtol=1e-5, atol=0)
    assert magnitude == pytest.approx(expected_magnitude)


def test_a_length_beside_the_ropes_parameters_wins() -> None:
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    config = SERVED[0]["config"] | {
        "rope_scaling": rope,
        "original_max_position_embeddings": 2048,
    }
    assert parse_config(config).max_position_embeddings == 8192


def test_null_is_absent() -> None:
    for entry in SERVED:
        bare = entry["config"]
        keys = "quantization_config", "partial_rotary_factor", "rms_norm_eps", "hidden_act", "dtype"
        keys += "rope_scaling", "rope_parameters", "use_sliding_window", "max_window_layers"
        keys += "attention_bias", "mlp_bias", "tie_word_embeddings", "num_experts"
        absent = {key for key in keys if key not in bare}
        assert parse_config(bare | dict.fromkeys(absent)) == parse_config(bare)


WINDOW = {"sliding_window": 100}
USED = WINDOW | {"use_sliding_window": True}


@pytest.mark.parametrize(
    ("architecture", "change", "windowed"),
    [
        ("Llama", WINDOW, []),
        ("Llama", USED, []),
        ("Mistral", WINDOW, range(32)),
        ("Mistral", {"sliding_window": None}, []),
        ("Mistral", {"sliding_window": 1000}, []),
        ("Qwen2", WINDOW, []),
        ("Qwen2", USED, range(28, 32)),
        ("Qwen3", USED | {"max_window_layers": 32}, []),
        ("Qwen3", USED | {"layer_types": ["full_attention"] * 32}, []),
        (
            "Qwen3",
            USED | {"layer_types": ["sliding_attention", "full_attention"] * 16},
            range(0, 32, 2),
        ),
        ("Qwen3Moe", USED | {"max_window_layers": 32}, range(32)),
        ("Qwen2Moe", USED | {"max_window_layers": 9}, range(0, 9, 2)),
        ("Mixtral", {}, []),
        ("Mixtral", WINDOW, range(32)),
        ("SmolLM3", USED, range(3, 32, 4)),
        ("Gemma3", WINDOW, sorted(set(range(32)) - {5, 11, 17, 23, 29})),
        ("Gemma3", WINDOW | {"sliding_window_pattern": 2}, range(0, 32, 2)),
    ],
)
def test_layers_have_the_windows_that_they_have_in_transformers(
    architecture: str, change: dict[str, Any], windowed: Sequence[int], tmp_path: Path
) -> None:
    config = SERVED[0]["config"] | {"max_position_embeddings": 1000} | change
    config |= {"architectures": [f"{architecture}ForCausalLM"]}
    ours = parse_config(config)
    assert sorted(ours.attention.windowed) == list(windowed)
    assert ours.max_position_embeddings == 1000
    types = {"Qwen3Moe": "qwen3_moe", "Qwen2Moe": "qwen2_moe", "Gemma3": "gemma3_text"}
    config["model_type"] = types.get(architecture, architecture.lower())
    write(tmp_path, {"config": config})
    assert ours.attention.windowed == reference_windowed(AutoConfig.from_pretrained(tmp_path))


def test_kinds_of_layers_that_are_not_known_are_refused() -> None:
    config = SERVED[0]["config"] | USED | {"architectures": ["Qwen3ForCausalLM"]}
    with pytest.raises(ModelError, match="layer_types must be full_attention or sliding_attention"):
        parse_config(config | {"layer_types": ["chunked_attention"] * 32})


@pytest.mark.parametrize("name", ["torch.float32", "float32", "float", "torch.float", None])
def test_spellings_of_a_dtype(name: str | None) -> None:
    config = dict(SERVED[0]["config"], torch_dtype=name)
    assert parse_config(config).dtype == "float32"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"rope_interleaved": True}, "rope_interleaved True"),
        ({"rope_local_base_freq": 10000.0}, "rope_local_base_freq"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"logits_scaling": 16.0}, "logits_scaling"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"rope_scaling": {"type": "spiral"}}, "'spiral' is not supported; supported are default"),
        ({"rope_scaling": {"type": "linear"}}, "needs 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor must be a positive number"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"compression_config": {"bits": 8}}, "compression_config is not supported"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused(
    change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        parse_config(SERVED[0]["config"] | change)


def test_the_model_type_names_an_architecture_where_nothing_else_does() -> None:
    config = {key: value for key, value in SERVED[0]["config"].items() if key != "architectures"}
    assert parse_config(config) == parse_config(SERVED[0]["config"])

"""Whatever stands in a `config.json`: a decoder, or a refusal that names what is wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from radixgrove.protocol.model.config import MAX_HEADS, ModelError
from radixgrove.protocol.model.parse import parse_config
from tests.protocol.model.test_published import SERVED

_VALUES = (
    *(None, True, 0, -1, 2.5, math.nan, math.inf, 1 << 31, 10**400),
    *("", "x", [], [1], [[]], {}, {"a": 1}),
)
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"factor": 4.0, "beta_fast": 32, "beta_slow": 1, "truncate": False, "mscale": 1.0}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "sparsity_config": {"format": "dense"},
    "transform_config": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT8}},
}
_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
_LLAMA = next(
    entry["config"] for entry in SERVED if entry["config"]["architectures"] == ["LlamaForCausalLM"]
)


def configs() -> dict[str, dict[str, Any]]:
    """One of each family, the one that says most, and the parts that those lack."""
    of_families: dict[str, dict[str, Any]] = {}
    for entry in sorted(SERVED, key=lambda entry: len(entry["config"])):
        of_families[entry["config"]["architectures"][0]] = entry["config"]
    return of_families | {
        "llama3": _LLAMA | {"rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
        "yarn": _LLAMA | {"rope_scaling": {"rope_type": "yarn", **_YARN}},
        "compressed": _LLAMA | {"quantization_config": _COMPRESSED},
        "fp8": _LLAMA | {"quantization_config": _FP8},
    }


def paths(found: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in found.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from paths(value, (*above, key))


def put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


@pytest.mark.parametrize("config", configs().values(), ids=configs())
def test_any_value_of_any_key_is_read_or_refused(config: dict[str, Any]) -> None:
    refused = 0
    for path in paths(config):
        for value in _VALUES:
            try:
                parse_config(put(config, path, value))
            except ModelError:
                refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": 5}, "architecture not supported: 5; supported are"),
        ({"architectures": [["Llama"]]}, "architecture not supported: .*; supported are"),
        ({"hidden_act": ["silu"]}, r"activation \['silu'\] is not supported, only silu"),
        (
            {"tie_word_embeddings": "false"},
            "tie_word_embeddings must be true or false, got 'false'",
        ),
        ({"attention_bias": [True]}, "attention_bias must be true or false"),
        (
            {"num_attention_heads": MAX_HEADS + 1, "num_key_value_heads": MAX_HEADS + 1},
            "num_attention_heads 1025 is more than 1024",
        ),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope type \['yarn'\] is not supported"),
        (
            {"rope_scaling": {"rope_type": "yarn", **_YARN, "truncate": "false"}},
            "truncate must be true or false, got 'false'",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", **_YARN}, "rope_theta": 1},
            "rope_theta must be above 1 with yarn, got 1",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", **_YARN, "beta_fast": "32"}},
            "beta_fast must be a positive number, got '32'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **_LLAMA3, "low_freq_factor": 4.0}},
            "high_freq_factor 4 must be above low_freq_factor 4",
        ),
    ],
    ids=str,
)
def test_what_is_said_of_it(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        parse_config(_LLAMA | change)


def mistral_config() -> dict[str, Any]:
    config = next(entry["config"] for entry in SERVED if entry["config"].get("sliding_window"))
    return config | {"architectures": ["MistralForCausalLM"]}


@pytest.mark.parametrize("value", ["4096", 4096.5, True, -2])
def test_a_window_is_a_number_of_tokens(value: Any) -> None:
    mistral = mistral_config()
    with pytest.raises(ModelError, match="sliding_window must be a positive integer, got"):
        parse_config(mistral | {"sliding_window": value})


@pytest.mark.parametrize("value", [None, 0, -1, False])
def test_without_a_window_all_is_attended_to(value: Any) -> None:
    mistral = mistral_config()
    without, some = (parse_config(mistral | {"sliding_window": window}) for window in (None, 100))
    assert parse_config(mistral | {"sliding_window": value}) == without != some


@pytest.mark.parametrize("value", ["4", 2.5, [4]])
def test_layers_without_a_window_are_a_number(value: Any) -> None:
    changes = {"use_sliding_window": True, "layer_types": None, "max_window_layers": value}
    config = next(entry["config"] for entry in SERVED if "max_window_layers" in entry["config"])
    with pytest.raises(ModelError, match="max_window_layers must be a positive integer, got"):
        parse_config(config | changes)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("sparsity_config",), "2:4", "sparsity_config '2:4' is not supported, only an object"),
        (
            ("sparsity_config", "format"),
            "sparse-24-bitmask",
            "sparsity_config.format 'sparse-24-bitmask' is not supported, only dense",
        ),
        (("kv_cache_scheme",), ["fp8"], "kv_cache_scheme .* is not supported, only an object"),
        (("config_groups",), {}, "config_groups {} is not supported, only an object with at least"),
        (("config_groups", "group_0", "weights", "type"), [], "num_bits and type '8 ..' is not"),
        (
            ("config_groups", "group_0", "weights", "symmetric"),
            "false",
            "weights.symmetric 'false' is not supported, only true or false",
        ),
        (("ignore",), ["re:" + "(" * 20_000], "ignore .* is not supported, only patterns that"),
        (("ignore",), ["re:a{99999999999}"], "ignore .* is not supported, only patterns that can"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_said_of_a_quantization(path: tuple[str, ...], value: Any, complaint: str) -> None:
    with pytest.raises(ModelError, match=f"quantization_config: .*{complaint}"):
        parse_config(_LLAMA | {"quantization_config": put(_COMPRESSED, path, value)})


def test_a_block_of_endless_digits() -> None:
    config = _LLAMA | {"quantization_config": copy.deepcopy(_COMPRESSED)}
    weights = {"num_bits": 8, "type": "float", "strategy": "block"}
    weights["block_structure"] = "9" * 5000 + "x128"
    config["quantization_config"]["config_groups"]["group_0"]["weights"] = weights
    with pytest.raises(ModelError, match=r"block_structure '999.* is not supported, only a number"):
        parse_config(config)

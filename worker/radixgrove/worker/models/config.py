"""A decoder's shape, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MAX_CONFIG_BYTES = 1 << 20


class ModelError(ValueError):
    """A model directory that cannot be served; the message is for the person who named it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base and, for scaled variants, their parameters."""

    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder's code depends on; sizes are of the whole model, not of one rank."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype  # the checkpoint's own


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture name implies and its config does not say."""

    qkv_bias: bool | None = False  # None: the config's `attention_bias` decides, for all four
    qk_norm: bool = False
    sliding_window: bool = False  # whether `sliding_window` counts when the config sets it


_FAMILIES = {
    "LlamaForCausalLM": _Family(qkv_bias=None),
    "MistralForCausalLM": _Family(sliding_window=True),
    "Qwen2ForCausalLM": _Family(qkv_bias=True),
    "Qwen3ForCausalLM": _Family(qkv_bias=None, qk_norm=True),
}
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_config(model_dir: Path) -> ModelConfig:
    """Read `model_dir/config.json`.

    Raises:
        ModelError: the file is missing or broken, or describes a model that is not supported.
    """
    path = model_dir / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ModelError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object")
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The decoder that a `config.json` describes.

    Both spellings of transformers are read: `rope_theta` + `rope_scaling` + `torch_dtype` (4.x) and
    `rope_parameters` + `dtype` (5.x).

    Raises:
        ModelError: unsupported architecture, activation or rope, or a missing or senseless size.
    """
    architecture, family = _family(raw)
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"activation {activation!r} is not supported, only silu")
    if "quantization_config" in raw:
        raise ModelError("quantized checkpoints are not supported; use the unquantized weights")
    attention_bias = bool(raw.get("attention_bias", False))
    hidden_size = _size(raw, "hidden_size")
    num_heads = _size(raw, "num_attention_heads")
    num_kv_heads = _size(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
    head_dim = _size(raw, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"head_dim {head_dim} is odd: rotary embeddings need pairs")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_size(raw, "vocab_size"),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=_longest(raw, family),
        rope=_rope(raw),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=family.qk_norm,
        dtype=_dtype(raw),
    )


def _family(raw: Mapping[str, Any]) -> tuple[str, _Family]:
    names = raw.get("architectures") or []
    for name in names:
        if name in _FAMILIES:
            return name, _FAMILIES[name]
    found = ", ".join(map(str, names)) or "none named"
    supported = ", ".join(sorted(_FAMILIES))
    raise ModelError(f"architecture not supported: {found}; supported are {supported}")


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _longest(raw: Mapping[str, Any], family: _Family) -> int:
    """Attention here is over the whole context, so a sliding window bounds the length instead."""
    longest = _size(raw, "max_position_embeddings")
    window = raw.get("sliding_window")
    windowed = family.sliding_window or bool(raw.get("use_sliding_window", False))
    if windowed and isinstance(window, int) and window > 0:
        return min(longest, window)
    return longest


def _dtype(raw: Mapping[str, Any]) -> torch.dtype:
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise ModelError(f"dtype {name!r} is not supported, only {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _rope(raw: Mapping[str, Any]) -> RopeConfig:
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    if parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial rotary embeddings are not supported")
    # YaRN and dynamic scaling fall back on the model's own length.
    parameters.setdefault("max_position_embeddings", raw.get("max_position_embeddings"))
    return RopeConfig(theta=float(theta), kind=str(kind), parameters=parameters)


def check_divides(config: ModelConfig, tp: int) -> None:
    """Refuse a `tp` that cannot split the model.

    Raises:
        ModelError: names the values that do.
    """
    sizes = (config.num_heads, config.num_kv_heads, config.intermediate_size)
    possible = [n for n in range(1, sizes[1] + 1) if all(size % n == 0 for size in sizes)]
    if tp not in possible:
        raise ModelError(
            f"tp {tp} does not divide the model's {sizes[0]} query heads, {sizes[1]} KV heads and "
            f"MLP width {sizes[2]}; possible: {', '.join(map(str, possible))}"
        )

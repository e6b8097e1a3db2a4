"""Gemma 3 (text): most layers attend within a window, with a rotary embedding of their own; norms
stand before and after, and their weights count from one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixgrove.protocol.model.config import (
    Activation,
    ModelConfig,
    ModelError,
    Multipliers,
    NormKind,
    Norms,
    QkNorm,
)
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.rope import read_rope
from radixgrove.protocol.model.source import Source

_THETA, _WINDOWED_THETA = 1e6, 1e4


def _read(source: Source) -> ModelConfig:
    if source.flag("use_bidirectional_attention"):
        raise ModelError("config.json: use_bidirectional_attention is not supported")
    bias = source.flag("attention_bias")
    of_all, of_windowed = _ropes(source)
    return source.decoder(
        attention=source.attention(
            kv_heads=4,
            head_dim=256,
            scale=source.number("query_pre_attn_scalar", 256) ** -0.5,
            rope=read_rope(of_all, source.longest, _THETA),
            window=source.window(4096),
            windowed=source.windowed_layers(_windowed(source)),
            local_rope=read_rope(of_windowed, source.longest, _WINDOWED_THETA),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=QkNorm.HEAD,
        ),
        mlp=source.mlp(activation=Activation.GELU_TANH),
        norms=Norms(
            kind=NormKind.RMS_OF_ONE,
            eps=source.number("rms_norm_eps", 1e-6),
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
        multipliers=Multipliers(
            embedding=source.hidden_size**0.5,
            embedding_in_dtype=True,
        ),
        tied=True,
    )


def _windowed(source: Source) -> list[int]:
    """All layers but one in `sliding_window_pattern`."""
    pattern = source.size("sliding_window_pattern", 6)
    return [layer for layer in range(source.num_layers) if (layer + 1) % pattern]


def _ropes(source: Source) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What the config says of the rotary embeddings of full and of windowed layers, in either
    spelling of transformers."""
    found, local = source.get("rope_parameters"), source.get("rope_local_base_freq")
    if found is None:
        full = {key: source.get(key) for key in ("rope_theta", "rope_scaling")}
        full = {key: value for key, value in full.items() if value is not None}
        return full, {} if local is None else {"rope_theta": local}
    if not isinstance(found, Mapping):
        raise ModelError("config.json: rope_parameters is not an object")
    kinds = (found.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    full, windowed = ({"rope_parameters": kind} for kind in kinds)
    return full, windowed


GEMMA3 = Family("Gemma3ForCausalLM", "gemma3_text", 131072, _read)

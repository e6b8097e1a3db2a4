"""Qwen 1.5 and 2 with experts, and one that all tokens go through."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    return source.decoder(
        attention=source.attention(
            kv_heads=16,
            window=source.window_if_used(4096),
            windowed=_windowed(source),
            qkv_bias=source.flag("qkv_bias", True),
        ),
        mlp=source.mlp(),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-6)),
        experts=source.experts(
            count=60,
            per_token=4,
            size_key="moe_intermediate_size",
            size=1408,
            shared=5632,
            by_layer=True,
        ),
    )


def _windowed(source: Source) -> frozenset[int]:
    """Every other layer before `max_window_layers` has a window, with `use_sliding_window`."""
    last = min(source.full_layers(), source.num_layers)
    return source.windowed_layers(range(0, last, 2))


QWEN2_MOE = Family("Qwen2MoeForCausalLM", "qwen2_moe", 32768, _read)

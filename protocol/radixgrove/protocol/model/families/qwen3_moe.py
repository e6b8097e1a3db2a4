"""Qwen 3 with experts."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, Norms, QkNorm
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    bias = source.flag("attention_bias")
    return source.decoder(
        attention=source.attention(
            kv_heads=4,
            window=source.window_if_used(4096),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=QkNorm.HEAD,
        ),
        mlp=source.mlp(),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-6)),
        experts=source.experts(
            count=128,
            per_token=8,
            size_key="moe_intermediate_size",
            size=768,
            by_layer=True,
        ),
    )


QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", 32768, _read)

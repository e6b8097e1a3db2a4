"""Qwen 3: norms of queries and keys of each head."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, Norms, QkNorm
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.families.qwen2 import later_layers
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    bias = source.flag("attention_bias")
    return source.decoder(
        attention=source.attention(
            kv_heads=32,
            head_dim=128,
            window=source.window_if_used(4096),
            windowed=later_layers(source),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=QkNorm.HEAD,
        ),
        mlp=source.mlp(),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-6)),
    )


QWEN3 = Family("Qwen3ForCausalLM", "qwen3", 32768, _read)

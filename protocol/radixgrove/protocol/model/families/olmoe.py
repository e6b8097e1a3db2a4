"""OLMoE: experts in every layer, norms of queries and keys over all heads."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, Norms, QkNorm
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    bias = source.flag("attention_bias")
    return source.decoder(
        attention=source.attention(qkv_bias=bias, output_bias=bias, qk_norm=QkNorm.WIDTH),
        mlp=source.mlp(),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-5)),
        experts=source.experts(count=64, per_token=8),
    )


OLMOE = Family("OlmoeForCausalLM", "olmoe", 4096, _read)

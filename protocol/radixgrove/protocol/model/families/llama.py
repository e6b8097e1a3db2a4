"""Llama 2 and 3, and what shares their architecture."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    bias = source.flag("attention_bias")
    return source.decoder(
        attention=source.attention(qkv_bias=bias, output_bias=bias),
        mlp=source.mlp(bias=source.flag("mlp_bias")),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-6)),
    )


LLAMA = Family("LlamaForCausalLM", "llama", 2048, _read)

"""Granite 3: Llama with constant factors."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, Multipliers, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    bias = source.flag("attention_bias")
    return source.decoder(
        attention=source.attention(
            scale=source.number("attention_multiplier", 1.0), qkv_bias=bias, output_bias=bias
        ),
        mlp=source.mlp(bias=source.flag("mlp_bias")),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-6)),
        multipliers=Multipliers(
            embedding=source.number("embedding_multiplier", 1.0),
            residual=source.number("residual_multiplier", 1.0),
            logits=1.0 / source.number("logits_scaling", 1.0),
        ),
    )


GRANITE = Family("GraniteForCausalLM", "granite", 2048, _read)

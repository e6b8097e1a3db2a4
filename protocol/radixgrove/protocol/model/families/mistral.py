"""Mistral: Llama with fewer KV heads, and in its first version a window."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    return source.decoder(
        attention=source.attention(kv_heads=8, window=source.window(4096)),
        mlp=source.mlp(),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-6)),
    )


MISTRAL = Family("MistralForCausalLM", "mistral", 131072, _read)

"""Mixtral: Mistral with experts."""

from __future__ import annotations

from radixgrove.protocol.model.config import ExpertNames, ModelConfig, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source

_NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def _read(source: Source) -> ModelConfig:
    return source.decoder(
        attention=source.attention(kv_heads=8, theta=1e6, window=source.window(None)),
        mlp=source.mlp(),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-5)),
        experts=source.experts(count=8, per_token=2, renormalizes=True, names=_NAMES),
    )


MIXTRAL = Family("MixtralForCausalLM", "mixtral", 131072, _read)

"""StableLM 3B and 2: LayerNorms, and a quarter of each head rotates."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, ModelError, NormKind, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    if source.flag("use_parallel_residual"):
        raise ModelError("config.json: use_parallel_residual is not supported")
    return source.decoder(
        attention=source.attention(
            kv_heads=32,
            rope=source.rope(10000.0, share=0.25),
            qkv_bias=source.flag("use_qkv_bias"),
        ),
        mlp=source.mlp(),
        norms=Norms(kind=NormKind.LAYER, eps=source.number("layer_norm_eps", 1e-5)),
    )


STABLELM = Family("StableLmForCausalLM", "stablelm", 4096, _read)

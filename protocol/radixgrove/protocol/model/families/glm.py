"""GLM 4: neighbouring dimensions of the first half of each head rotate."""

from __future__ import annotations

from radixgrove.protocol.model.config import Attention, Mlp, ModelConfig, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source

_EPS = 1.5625e-7


def _read(source: Source) -> ModelConfig:
    return source.decoder(
        attention=_attention(source),
        mlp=_mlp(source),
        norms=Norms(eps=source.number("rms_norm_eps", _EPS)),
    )


def _read_0414(source: Source) -> ModelConfig:
    """With norms of results, too."""
    return source.decoder(
        attention=_attention(source),
        mlp=_mlp(source),
        norms=Norms(
            eps=source.number("rms_norm_eps", _EPS),
            after_attention="post_self_attn_layernorm",
            before_mlp="post_attention_layernorm",
            after_mlp="post_mlp_layernorm",
        ),
    )


def _attention(source: Source) -> Attention:
    return source.attention(
        kv_heads=2,
        head_dim=128,
        rope=source.rope(10000.0, share=0.5, interleaved=True),
        qkv_bias=source.flag("attention_bias", True),
    )


def _mlp(source: Source) -> Mlp:
    return source.mlp(gate="gate_up_proj", up="gate_up_proj")


GLM = Family("GlmForCausalLM", "glm", 131072, _read)
GLM4 = Family("Glm4ForCausalLM", "glm4", 131072, _read_0414)

"""gpt-oss: experts with biases and a clamped SwiGLU, a sink in each head's softmax, and a window in
every other layer."""

from __future__ import annotations

from radixgrove.protocol.model.config import (
    ClampedSwiGlu,
    ExpertNames,
    ModelConfig,
    ModelError,
    Norms,
)
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source

_NAMES = ExpertNames(router="router", alternate=True)
_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(source: Source) -> ModelConfig:
    bias = source.flag("attention_bias", True)
    return source.decoder(
        attention=source.attention(
            kv_heads=8,
            head_dim=64,
            rope=source.rope(150000.0, scaling=_SCALING),
            window=source.window(128),
            windowed=source.windowed_layers(range(0, source.num_layers, 2)),
            qkv_bias=bias,
            output_bias=bias,
            sinks=True,
        ),
        mlp=source.mlp(),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-5)),
        experts=source.experts(
            count=128,
            per_token=_per_token(source),
            renormalizes=True,
            names=_NAMES,
            bias=True,
            router_bias=True,
            clamped=ClampedSwiGlu(
                alpha=source.number("swiglu_alpha", 1.702),
                limit=source.number("swiglu_limit", 7.0),
            ),
        ),
        dtype="bfloat16",
    )


def _per_token(source: Source) -> int:
    """Published configs say it by two names."""
    per_token = source.size("num_experts_per_tok", 4)
    other = source.size("experts_per_token", per_token)
    if other != per_token:
        raise ModelError(
            f"config.json: num_experts_per_tok {per_token} and experts_per_token {other} differ"
        )
    return per_token


GPT_OSS = Family("GptOssForCausalLM", "gpt_oss", 131072, _read)

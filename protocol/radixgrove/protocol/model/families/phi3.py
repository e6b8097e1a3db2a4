"""Phi 3 and 4: Llama with one tensor for q, k and v, and one for gate and up."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    return source.decoder(
        attention=source.attention(fused="qkv_proj", window=source.window(None)),
        mlp=source.mlp(gate="gate_up_proj", up="gate_up_proj"),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-5)),
    )


PHI3 = Family("Phi3ForCausalLM", "phi3", 4096, _read)

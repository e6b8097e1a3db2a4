"""StarCoder 2: LayerNorms, an MLP without a gate, biases."""

from __future__ import annotations

from radixgrove.protocol.model.config import Activation, ModelConfig, NormKind, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    bias = source.flag("use_bias", True)
    return source.decoder(
        attention=source.attention(
            kv_heads=2, window=source.window(None), qkv_bias=bias, output_bias=bias
        ),
        mlp=source.mlp(
            activation=Activation.GELU_TANH, bias=bias, gate="", up="c_fc", down="c_proj"
        ),
        norms=Norms(kind=NormKind.LAYER, eps=source.number("norm_epsilon", 1e-5)),
        tied=True,
    )


STARCODER2 = Family("Starcoder2ForCausalLM", "starcoder2", 4096, _read)

"""SmolLM 3: Llama, of which some layers do not rotate."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, ModelError, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    bias, unrotated = source.flag("attention_bias"), _unrotated(source)
    return source.decoder(
        attention=source.attention(
            kv_heads=4,
            theta=2e6,
            unrotated=unrotated,
            window=source.window_if_used(None),
            windowed=source.windowed_layers(unrotated),
            qkv_bias=bias,
            output_bias=bias,
        ),
        mlp=source.mlp(bias=source.flag("mlp_bias")),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-6)),
        tied=True,
    )


def _unrotated(source: Source) -> frozenset[int]:
    """Layers with a 0 in `no_rope_layers`; without that list one in `no_rope_layer_interval`."""
    layers = range(source.num_layers)
    interval = source.size("no_rope_layer_interval", 4)
    rotate = source.get("no_rope_layers", [(layer + 1) % interval for layer in layers])
    if not isinstance(rotate, list) or len(rotate) < len(layers):
        raise ModelError(
            f"config.json: no_rope_layers must have an entry for each of {len(layers)} layers, "
            f"got {rotate!r}"
        )
    return frozenset(layer for layer in layers if not rotate[layer])


SMOLLM3 = Family("SmolLM3ForCausalLM", "smollm3", 32768, _read)

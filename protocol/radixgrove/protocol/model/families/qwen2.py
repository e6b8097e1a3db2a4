"""Qwen 1.5, 2 and 2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from radixgrove.protocol.model.config import ModelConfig, Norms
from radixgrove.protocol.model.families.base import Family
from radixgrove.protocol.model.source import Source


def _read(source: Source) -> ModelConfig:
    return source.decoder(
        attention=source.attention(
            kv_heads=32,
            qkv_bias=True,
            window=source.window_if_used(4096),
            windowed=later_layers(source),
        ),
        mlp=source.mlp(),
        norms=Norms(eps=source.number("rms_norm_eps", 1e-6)),
    )


def later_layers(source: Source) -> frozenset[int]:
    """Those from `max_window_layers` on have a window, with `use_sliding_window`."""
    return source.windowed_layers(range(source.full_layers(), source.num_layers))


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", 32768, _read)

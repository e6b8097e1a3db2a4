"""Whether a model can run as it is meant to: asked before its weights are fetched, and by workers.

What cannot be known from `config.json` is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixgrove.protocol.model.config import ModelConfig, ModelError, check_divides

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Intended:
    """How a model is to run."""

    tp: int = 1
    dtype: str = ""  # of its weights, a name of `DTYPES`; "": the checkpoint's own
    max_model_len: int | None = None  # tokens; None: the model's
    memory: int = 0  # bytes that its ranks have together; 0: not known


def check_fit(config: ModelConfig, intended: Intended) -> None:
    """Refuse a model that does not divide, is too short or does not fit.

    Raises:
        ModelError: the message names what would do.
    """
    check_divides(config, intended.tp)
    check_length(config, intended.max_model_len)
    _check_memory(config, intended)


def check_length(config: ModelConfig, max_model_len: int | None) -> None:
    """Refuse a length that the model cannot attend to.

    Raises:
        ModelError: names the model's own.
    """
    longest = config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ModelError(f"max_model_len {max_model_len} exceeds the model's {longest}")


def _check_memory(config: ModelConfig, intended: Intended) -> None:
    dtype = intended.dtype or config.dtype
    needed = count_parameters(config) * _DTYPE_BYTES[dtype]
    if intended.memory and needed > intended.memory:
        raise ModelError(
            f"the weights take {needed / 2**30:.1f} GiB in {dtype}, and the group's {intended.tp} "
            f"ranks have {intended.memory / 2**30:.1f} GiB: more or larger devices are needed"
        )


def count_parameters(config: ModelConfig) -> int:
    """Numbers in the weights; tied embeddings count once."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = hidden * (queries + 2 * keys) + queries * hidden
    attention += config.qkv_bias * (queries + 2 * keys) + config.output_bias * hidden
    attention += config.qk_norm * 2 * config.head_dim
    dense = 3 * hidden * mlp + config.mlp_bias * (2 * mlp + hidden)
    tables = (1 if config.tied_embeddings else 2) * config.vocab_size * hidden
    return tables + config.num_layers * (attention + dense + 2 * hidden) + hidden

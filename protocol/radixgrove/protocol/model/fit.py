"""Whether a model can run as it is meant to: asked before its weights are fetched, and by workers.

What cannot be known from `config.json` is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixgrove.protocol.model.config import ModelConfig, ModelError, NormKind, QkNorm
from radixgrove.protocol.model.quantization import (
    MXFP4,
    Quantization,
    QuantizationError,
    intended_quantization,
)
from radixgrove.protocol.model.split import check_divides, check_stages
from radixgrove.protocol.settings import Quantize

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Intended:
    """How a model is to run."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    pp_layers: tuple[int, ...] = ()  # of each stage; empty: as the worker deals them out
    dtype: str = ""  # of its weights, a name of `DTYPES`; "": the checkpoint's own
    quantize: str = ""  # as the setting; "": not
    max_model_len: int | None = None  # tokens; None: the model's
    memory: int = 0  # bytes that the tp * pp ranks of a member have together; 0: not known


def check_fit(config: ModelConfig, intended: Intended) -> None:
    """Refuse a model that does not divide, is too short or does not fit.

    Raises:
        ModelError: the message names what would do.
    """
    check_divides(config, intended.tp, intended.ep)
    check_stages(config, intended.pp, intended.pp_layers)
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
    quantization = quantization_of(config, Quantize(intended.quantize or Quantize.NONE))
    needed = count_parameters(config) * _DTYPE_BYTES[dtype]
    if quantization is not None and quantization.method == MXFP4:
        dtype = f"{dtype}, to which {MXFP4} is widened"
    elif quantization is not None:  # one byte a number; the few that have more leave room
        needed -= count_projected(config) * (_DTYPE_BYTES[dtype] - 1)
        numbers = sorted({scheme.numbers.value for scheme in quantization.schemes()})
        dtype = " and ".join((dtype, *numbers))
    ranks = intended.tp * intended.pp
    if intended.memory and needed > intended.memory:
        raise ModelError(
            f"the weights take {needed / 2**30:.1f} GiB in {dtype}, and its {ranks} ranks "
            f"have {intended.memory / 2**30:.1f} GiB: more or larger devices are needed"
        )


def quantization_of(config: ModelConfig, quantize: Quantize) -> Quantization | None:
    """How the model's projections are quantized when it is served.

    Raises:
        ModelError: they are quantized already, and `quantize` asks for it.
    """
    try:
        return intended_quantization(config.quantization, quantize)
    except QuantizationError as error:
        raise ModelError(str(error)) from error


def count_projected(config: ModelConfig) -> int:
    """Numbers in the matrices of all layers."""
    attention = 2 * config.hidden_size * (config.attention.queries + config.attention.keys)
    return config.num_layers * attention + _count_mlp_parameters(config)


def count_parameters(config: ModelConfig) -> int:
    """Numbers in the weights; tied embeddings count once."""
    hidden, norms = config.hidden_size, config.norms
    tables = (1 if config.tied_embeddings else 2) * config.vocab_size * hidden
    norm = hidden * (2 if norms.kind is NormKind.LAYER else 1)
    places = norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp
    layer = _attention_parameters(config) + norm * sum(map(bool, places))
    return tables + config.num_layers * layer + _count_mlp_parameters(config) + norm


def _count_mlp_parameters(config: ModelConfig) -> int:
    """Those of them in the MLPs and experts of all layers."""
    mixtures = config.expert_layers
    dense = (config.num_layers - mixtures) * _mlp_parameters(config)
    return dense + mixtures * _mixture_parameters(config)


def _attention_parameters(config: ModelConfig) -> int:
    hidden, attention = config.hidden_size, config.attention
    queries, keys = attention.queries, attention.keys
    numbers = hidden * (queries + 2 * keys) + queries * hidden
    numbers += attention.qkv_bias * (queries + 2 * keys) + attention.output_bias * hidden
    numbers += attention.sinks * attention.heads
    per_head = 2 * attention.head_dim
    norms = {QkNorm.NONE: 0, QkNorm.HEAD: per_head, QkNorm.WIDTH: queries + keys}
    return numbers + norms[attention.qk_norm]


def _mlp_parameters(config: ModelConfig) -> int:
    hidden, mlp = config.hidden_size, config.mlp
    inner = mlp.width * (2 if mlp.gate else 1)
    return hidden * (inner + mlp.width) + mlp.bias * (inner + hidden)


def _mixture_parameters(config: ModelConfig) -> int:
    """Parameters of a layer's experts, of its router, and of the shared expert with its gate."""
    experts, hidden = config.experts, config.hidden_size
    if experts is None:
        return 0
    inner = experts.intermediate_size
    numbers = experts.count * (3 * hidden * inner + hidden)
    numbers += experts.count * (experts.bias * (2 * inner + hidden) + experts.router_bias)
    return numbers + (3 * experts.shared_size + 1) * hidden * (experts.shared_size > 0)

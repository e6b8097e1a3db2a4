"""A decoder's projections by their names in checkpoints: which are computed as one, what of them
ranks share, and whether they can be served as a `quantization_config` has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from radixgrove.protocol.model.config import ExpertsConfig, ModelConfig, ModelError
from radixgrove.protocol.model.quantization import MXFP4, Numbers, Quantization, Scheme

_HEAD = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """Those of a layer that have one format.

    Attributes:
        names: without `.weight`.
        by_outputs: ranks share the outputs, else the inputs.
        shared: how many of those, of each that has a place of its own in the fused weight.
        inputs: of each.
        stacked: one tensor has them, one below the other.
        routed: of experts, which `ep` deals out before ranks share what each has.
    """

    names: tuple[str, ...]
    by_outputs: bool
    shared: tuple[int, ...]
    inputs: int
    stacked: bool = False
    routed: bool = False


def projections_of(config: ModelConfig) -> Iterator[Projections]:
    """All but the head."""
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        yield from _of_attention(config, f"{prefix}.self_attn")
        if (experts := config.experts_of(layer)) is None:
            yield from _of_mlp(config, config.mlp.width, f"{prefix}.mlp")
            continue
        block = f"{prefix}.{experts.names.block}"
        yield from _of_experts(config, experts, f"{block}.experts")
        if experts.shared_size:
            yield from _of_mlp(config, experts.shared_size, f"{block}.shared_expert")


def unused_ignores(config: ModelConfig) -> list[str]:
    """Entries of `ignore` that match no projection, nor what is never quantized, of those formats
    that list none but a model's own."""
    quantization = config.quantization
    if quantization is None or not quantization.warns:
        return []
    return quantization.unused_ignores([*_names(config), *_left_alone(config)])


def check_quantization(config: ModelConfig) -> None:
    """Refuse a `quantization_config` with which the projections cannot be served.

    Raises:
        ModelError: names one of them, and what would be served.
    """
    if (quantization := config.quantization) is None:
        return
    for found in projections_of(config):
        _check(found, quantization)
    head = None if config.tied_embeddings else quantization.scheme_of(_HEAD)
    if head is not None:
        raise ModelError(
            f"{_HEAD} is quantized ({head}), which is not supported: quantize the model anew with "
            "the head among the ignored layers"
        )
    names = _names(config)
    if unused := quantization.unused_targets(names):
        raise ModelError(
            f"quantization_config: targets {', '.join(unused)} match no projection of the model, "
            f"such as {names[0]}"
        )


def _check(found: Projections, quantization: Quantization) -> None:
    first, *others = found.names
    scheme = quantization.scheme_of(first)
    for other in others:
        if (its := quantization.scheme_of(other)) != scheme:
            raise ModelError(
                f"{first} is {_described(scheme)} and {other} is {_described(its)}: they are "
                "computed as one, and have to be quantized alike"
            )
    if scheme is None:
        return
    if found.routed and scheme.numbers is Numbers.INT8:
        raise ModelError(
            f"{first}: experts in int8 are not supported, only in float8; use the unquantized "
            "weights with quantize fp8"
        )
    if scheme.block is None:
        return
    rows, columns = scheme.block
    if scheme.numbers is Numbers.FLOAT4 and found.inputs % columns:
        raise ModelError(
            f"{first}: {found.inputs} columns are no multiple of the {columns} that share a scale "
            f"in {MXFP4}"
        )
    if found.stacked and any(size % rows for size in found.shared[:-1]):
        raise ModelError(
            f"{first}: blocks of {rows} rows that share a scale have rows of two of its "
            "projections; use other quantized weights, or none"
        )


def _described(scheme: Scheme | None) -> str:
    return "not quantized" if scheme is None else f"quantized ({scheme})"


def _names(config: ModelConfig) -> list[str]:
    names = [name for found in projections_of(config) for name in found.names]
    return names if config.tied_embeddings else [*names, _HEAD]


def _left_alone(config: ModelConfig) -> Iterator[str]:
    """Routers and the gates of shared experts."""
    for layer in range(config.num_layers):
        if experts := config.experts_of(layer):
            block = f"model.layers.{layer}.{experts.names.block}"
            yield f"{block}.{experts.names.router}"
            yield f"{block}.shared_expert_gate"


def _of_attention(config: ModelConfig, prefix: str) -> Iterator[Projections]:
    attention = config.attention
    names = [attention.fused] if attention.fused else ["q_proj", "k_proj", "v_proj"]
    yield Projections(
        names=tuple(f"{prefix}.{name}" for name in names),
        by_outputs=True,
        shared=(attention.queries, attention.keys, attention.keys),
        inputs=config.hidden_size,
        stacked=bool(attention.fused),
    )
    yield Projections(
        names=(f"{prefix}.o_proj",),
        by_outputs=False,
        shared=(attention.queries,),
        inputs=attention.queries,
    )


def _of_mlp(config: ModelConfig, width: int, prefix: str) -> Iterator[Projections]:
    mlp = config.mlp
    names = dict.fromkeys(name for name in (mlp.gate, mlp.up) if name)
    yield Projections(
        names=tuple(f"{prefix}.{name}" for name in names),
        by_outputs=True,
        shared=(width, width) if mlp.gate else (width,),
        inputs=config.hidden_size,
        stacked=mlp.gate == mlp.up,
    )
    yield Projections(
        names=(f"{prefix}.{mlp.down}",), by_outputs=False, shared=(width,), inputs=width
    )


def _of_experts(config: ModelConfig, experts: ExpertsConfig, prefix: str) -> Iterator[Projections]:
    """The first has the names of all, which have one format."""
    names, width = experts.names, experts.intermediate_size
    kinds = names.gate, names.up, names.down
    yield Projections(
        names=tuple(f"{prefix}.{i}.{kind}" for i in range(experts.count) for kind in kinds),
        by_outputs=True,
        shared=(width, width),
        inputs=config.hidden_size,
        routed=True,
    )
    yield Projections(
        names=(f"{prefix}.0.{names.down}",),
        by_outputs=False,
        shared=(width,),
        inputs=width,
        routed=True,
    )

"""Over how many ranks a model can be split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.model.projections import projections_of


def check_divides(config: ModelConfig, tp: int, ep: int = 1) -> None:
    """Refuse a `tp` or `ep` that cannot split the model.

    Raises:
        ModelError: names the values that do.
    """
    _check_experts_divide(config, tp, ep)
    sizes = [config.attention.heads, config.attention.kv_heads]
    named = [f"{sizes[0]} query heads", f"{sizes[1]} KV heads"]
    if config.expert_layers < config.num_layers:
        sizes.append(config.mlp.width)
        named.append(f"MLP width {config.mlp.width}")
    inner = 0
    if experts := config.experts:
        inner = experts.intermediate_size
        named.append(f"expert width {inner}" + (f" over ep {ep}" if ep > 1 else ""))
        if experts.shared_size:
            sizes.append(experts.shared_size)
            named.append(f"shared expert's width {experts.shared_size}")

    def divides(n: int) -> bool:
        return n % ep == 0 and inner % (n // ep) == 0 and all(size % n == 0 for size in sizes)

    possible = [n for n in range(1, config.attention.kv_heads + 1) if divides(n)]
    if tp not in possible:
        raise ModelError(
            f"tp {tp} does not divide the model's {', '.join(named[:-1])} and {named[-1]}; "
            f"possible: {', '.join(map(str, possible)) or 'none'}"
        )
    _check_blocks(config, tp, ep, possible)


def check_stages(config: ModelConfig, pp: int, layers: Sequence[int] = ()) -> None:
    """Refuse more stages than there are layers.

    Args:
        layers: how many each stage is to have; empty: that is not said.

    Raises:
        ModelError: names the model's layers.
    """
    if layers and (len(layers) != pp or sum(layers) != config.num_layers):
        raise ModelError(
            f"pp_layers {list(layers)} are not the model's {config.num_layers} layers in {pp} "
            "stages"
        )
    if pp > config.num_layers:
        raise ModelError(f"pp {pp} exceeds the model's {config.num_layers} layers")


def _check_experts_divide(config: ModelConfig, tp: int, ep: int) -> None:
    count = config.experts.count if config.experts else 1
    possible = [n for n in range(1, tp + 1) if tp % n == 0 and count % n == 0]
    if ep in possible:
        return
    if config.experts is None:
        raise ModelError(f"ep {ep} is for models with experts, and this one has none; possible: 1")
    raise ModelError(
        f"ep {ep} does not divide the group's tp {tp} and the model's {count} experts; possible: "
        f"{', '.join(map(str, possible))}"
    )


def _check_blocks(config: ModelConfig, tp: int, ep: int, possible: Sequence[int]) -> None:
    """Refuse a `tp` with which ranks would hold a part of what shares a scale."""
    found = _in_blocks(config)
    if (block := _cut_block(found, tp, ep)) is None:
        return
    largest = max((n for n in possible if _cut_block(found, n, ep) is None), default=0)
    works = f"the largest that works is {largest}" if largest else f"none works with ep {ep}"
    raise ModelError(
        f"tp {tp} would cut blocks of {block[0]}x{block[1]} of the quantized weights, which share "
        f"a scale; {works}"
    )


@dataclass(frozen=True, slots=True)
class _InBlocks:
    """Outputs or inputs of a projection that ranks share, and that are quantized in blocks."""

    size: int
    length: int  # of the blocks, along these
    block: tuple[int, int]
    routed: bool  # of experts


def _in_blocks(config: ModelConfig) -> list[_InBlocks]:
    if config.quantization is None:
        return []
    found: dict[_InBlocks, None] = {}
    for projections in projections_of(config):
        scheme = config.quantization.scheme_of(projections.names[0])
        if scheme is not None and (block := scheme.block) is not None:
            length = block[0] if projections.by_outputs else block[1]
            for size in projections.shared:
                found[_InBlocks(size, length, block, projections.routed)] = None
    return list(found)


def _cut_block(found: Iterable[_InBlocks], tp: int, ep: int) -> tuple[int, int] | None:
    """Of those a block that a rank's part would begin or end within; None: there is none."""
    for each in found:
        ranks = tp // ep if each.routed else tp
        if ranks > 1 and each.size % (ranks * each.length):
            return each.block
    return None

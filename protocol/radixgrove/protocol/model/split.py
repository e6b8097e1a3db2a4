"""Over how many ranks a model can be split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from radixgrove.protocol.model.config import ModelConfig, ModelError
from radixgrove.protocol.model.quantization import MXFP4


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
    schemes = config.quantization.schemes() if config.quantization else ()
    for block in (scheme.block for scheme in schemes if scheme.block is not None):
        if not _keeps_blocks(config, tp, ep, block):
            largest = max((n for n in possible if _keeps_blocks(config, n, ep, block)), default=0)
            works = (
                f"the largest that works is {largest}" if largest else f"none works with ep {ep}"
            )
            raise ModelError(
                f"tp {tp} would cut blocks of {block[0]}x{block[1]} of the quantized weights, "
                f"which share a scale; {works}"
            )


def _keeps_blocks(config: ModelConfig, tp: int, ep: int, block: tuple[int, int]) -> bool:
    """Whether every rank's part of each projection begins and ends with a block."""
    rows, columns = block
    queries, keys = [(config.attention.queries, tp)], [(config.attention.keys, tp)]
    if config.quantization is not None and config.quantization.method == MXFP4:
        queries, keys = [], []  # of experts alone
    inner = [(config.mlp.width, tp)] if config.expert_layers < config.num_layers else []
    inner += _expert_widths(config, tp, ep, block)

    def cut(sizes: Iterable[tuple[int, int]], length: int) -> bool:
        return any(ranks > 1 and size % (ranks * length) for size, ranks in sizes)

    return not (cut([*queries, *keys, *inner], rows) or cut([*queries, *inner], columns))


def _expert_widths(
    config: ModelConfig, tp: int, ep: int, block: tuple[int, int]
) -> set[tuple[int, int]]:
    """(width, ranks) of routed and shared experts that are quantized in blocks of `block`."""
    found = set()
    for layer in range(config.num_layers):
        if not (experts := config.experts_of(layer)) or config.quantization is None:
            continue
        prefix, down = f"model.layers.{layer}.{experts.names.block}", experts.names.down
        widths = {f"{prefix}.experts.0.{down}": (experts.intermediate_size, tp // ep)}
        if experts.shared_size:
            widths[f"{prefix}.shared_expert.down_proj"] = experts.shared_size, tp
        for name, width in widths.items():
            scheme = config.quantization.scheme_of(name)
            if scheme is not None and scheme.block == block:
                found.add(width)
    return found

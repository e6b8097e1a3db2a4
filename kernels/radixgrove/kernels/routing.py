"""Which experts a token goes to, and its pairs with them in the order of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv, next_power_of_2, pdl
from radixgrove.kernels.routing_kernels import route_and_sort_kernel, route_kernel, sort_kernel

# Pairs of a program of `sort_kernel`, and scores of one of `route_kernel`.
_CHUNK_PAIRS = 256
_CHUNK_SCORES = 16384
_FEW_TOKENS = 128  # that one program of `route_and_sort_kernel` may take
# Each power of two below has kernels of its own; from here on they are all the same.
MOST_FORMS = 2 * _FEW_TOKENS


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts follow from its logits.

    Attributes:
        top_k: experts of a token.
        sigmoid: scores are sigmoids of the logits, not their softmax.
        late: the softmax is over the chosen ones' logits only; excludes `sigmoid`.
        renormalize: weights of a token sum to `scale`.
        groups: equal runs of experts, of which only the best `groups_kept` are chosen from; a group
            is as good as its best expert, or the sum of its best two with `group_top` 2.
        scale: factor on the weights.
    """

    top_k: int
    sigmoid: bool = False
    late: bool = False
    renormalize: bool = False
    groups: int = 1
    groups_kept: int = 1
    group_top: int = 1
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Router:
    """What a layer's routing needs beside logits.

    Attributes:
        bias: [E] float32, added to scores for the choice alone.
        places: [E] int32, where an expert is in this rank's weights; -1: on another rank. None: all
            are here, in order.
        load: [E] int64, to which the tokens of each expert are added.
    """

    routing: Routing
    bias: Tensor | None = None
    places: Tensor | None = None
    load: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of each token, best first.

    Attributes:
        ids: [T, top_k] int32, places in this rank's weights; -1: on another rank.
        weights: [T, top_k] float32.
        counts: [chunks, places] int32, pairs of each chunk of tokens by place; None: not asked for.
        chunk: tokens of a chunk.
    """

    ids: Tensor
    weights: Tensor
    counts: Tensor | None = None
    chunk: int = 0


def route_reference(logits: Tensor, router: Router) -> Routed:
    """See `route`."""
    routing = router.routing
    logits = logits.float()
    scores = logits
    if not routing.late:
        scores = logits.sigmoid() if routing.sigmoid else logits.softmax(-1)
    choice = scores if router.bias is None else scores + router.bias
    choice = choice.nan_to_num(-3.0e38)
    if routing.groups > 1:
        grouped = choice.view(len(choice), routing.groups, -1)
        best = grouped.topk(routing.group_top, -1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(routing.groups_kept, -1).indices, True)
        choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(-1, ids)
    if routing.late:
        weights = weights.softmax(-1)
    elif routing.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if router.load is not None:
        router.load.add_(torch.bincount(ids.flatten(), minlength=logits.shape[1]))
    if router.places is not None:
        ids = router.places[ids]
    return Routed(ids.int(), weights * routing.scale)


def route(logits: Tensor, router: Router, *, places: int = 0) -> Routed:
    """Each token's experts and their weights, in one kernel.

    Args:
        logits: [T, E] float32 contiguous, at most 512 experts.
        places: experts that this rank holds, if pairs are going to be sorted.

    Returns:
        Of equal scores the first expert's goes first. A token with NaN gets some experts, and NaN
        among its weights.
    """
    tokens, experts = logits.shape
    routing = router.routing
    slots, block_e = next_power_of_2(routing.top_k), max(16, next_power_of_2(experts))
    chunk = min(_CHUNK_PAIRS // slots, _CHUNK_SCORES // block_e, next_power_of_2(tokens))
    ids = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    chunks = cdiv(tokens, chunk)
    counts = ids.new_empty((chunks, places)) if places else None
    if tokens:
        route_kernel[(chunks,)](
            logits,
            logits if router.bias is None else router.bias,
            ids if router.places is None else router.places,
            ids if router.load is None else router.load,
            ids,
            weights,
            ids if counts is None else counts,
            tokens,
            experts,
            places,
            routing.scale,
            **_route_options(router),
            BLOCK_T=chunk,
            BLOCK_E=block_e,
            COUNT=counts is not None,
            num_warps=min(8, max(1, chunk * block_e // 512)),
            **pdl(logits),
        )
    return Routed(ids, weights, counts, chunk)


def _route_options(router: Router) -> dict[str, int]:
    routing = router.routing
    return {
        "TOP_K": routing.top_k,
        "SLOTS": next_power_of_2(routing.top_k),
        "SIGMOID": routing.sigmoid,
        "LATE": routing.late,
        "RENORMALIZE": routing.renormalize,
        "GROUPS": routing.groups,
        "GROUPS_KEPT": routing.groups_kept,
        "GROUP_TOP": routing.group_top,
        "BIAS": router.bias is not None,
        "PLACES": router.places is not None,
        "LOAD": router.load is not None,
    }


@dataclass(frozen=True, slots=True)
class Sorted:
    """Pairs in the order of experts, of equal experts by token, and blocks of one expert's pairs.

    A pair's number is `token * top_k + slot`. All are int32.

    Attributes:
        order: [pairs]: the pairs; those of other ranks' experts are left out, the rest is unset.
        positions: [pairs]: where each pair is in `order`, -1: nowhere.
        offsets: [places + 1]: where each expert's pairs begin.
        block_expert, block_start: [most blocks]: their expert, and first position.
        num_blocks: [1]: how many there are.
        counters: zeros, as many as asked for.
    """

    order: Tensor
    positions: Tensor
    offsets: Tensor
    block_expert: Tensor
    block_start: Tensor
    num_blocks: Tensor
    counters: Tensor

    @property
    def most_blocks(self) -> int:
        return len(self.block_expert)


def sort(routed: Routed, block_m: int, *, counters: int = 0, zeroed: bool = False) -> Sorted:
    """Sort the pairs of `routed`, which has counts, for blocks of `block_m` pairs.

    Args:
        zeroed: what is unset of `order` is to be zero, so that all of it can be gathered by.
    """
    ids, counts = routed.ids, routed.counts
    if counts is None:
        raise ValueError("sorting needs the counts of `route`")
    chunks, places = counts.shape
    pairs, chunk = ids.numel(), routed.chunk * ids.shape[1]
    made = _unsorted(ids, places, block_m, counters, zeroed)
    block_e = max(16, next_power_of_2(places))
    sort_kernel[(chunks + 1,)](
        ids,
        counts,
        made.order,
        made.positions,
        made.offsets,
        made.block_expert,
        made.block_start,
        made.num_blocks,
        made.counters,
        pairs,
        chunks,
        places,
        counters,
        block_m,
        CHUNK=chunk,
        BLOCK_C=next_power_of_2(chunk),
        BLOCK_E=block_e,
        SLAB=max(1, 2048 // block_e),
        STRIPE=min(16, next_power_of_2(chunk)),
        num_warps=4,
        **pdl(ids),
    )
    return made


def _unsorted(ids: Tensor, places: int, block_m: int, counters: int, zeroed: bool) -> Sorted:
    """Room for what `sort` makes of pairs with these [T, top_k] places."""
    pairs = ids.numel()
    blocks = pairs // block_m + min(pairs, places)
    return Sorted(
        order=ids.new_zeros(pairs) if zeroed else ids.new_empty(pairs),
        positions=ids.new_empty(pairs),
        offsets=ids.new_empty(places + 1),
        block_expert=ids.new_empty(blocks),
        block_start=ids.new_empty(blocks),
        num_blocks=ids.new_empty(1),
        counters=ids.new_empty(counters),
    )


def route_and_sort(
    logits: Tensor,
    router: Router,
    places: int,
    block_m: int,
    *,
    counters: int = 0,
    zeroed: bool = False,
) -> tuple[Routed, Sorted]:
    """`route`, then `sort`; in one kernel where the tokens are few.

    Args:
        places: experts that this rank holds.
    """
    tokens, experts = logits.shape
    top_k, block_t = router.routing.top_k, next_power_of_2(tokens)
    block_e = max(16, next_power_of_2(experts))
    if not 0 < tokens <= _FEW_TOKENS or block_t * block_e > _CHUNK_SCORES:
        routed = route(logits, router, places=places)
        return routed, sort(routed, block_m, counters=counters, zeroed=zeroed)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    made = _unsorted(ids, places, block_m, counters, zeroed)
    route_and_sort_kernel[(1,)](
        logits,
        logits if router.bias is None else router.bias,
        ids if router.places is None else router.places,
        ids if router.load is None else router.load,
        ids,
        weights,
        made.order,
        made.positions,
        made.offsets,
        made.block_expert,
        made.block_start,
        made.num_blocks,
        made.counters,
        tokens,
        experts,
        places,
        router.routing.scale,
        counters,
        **_route_options(router),
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_M=block_m,
        num_warps=min(16, max(1, block_t * block_e // 512)),
        **pdl(logits),
    )
    return Routed(ids, weights), made

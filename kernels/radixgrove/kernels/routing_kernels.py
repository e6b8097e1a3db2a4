# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The device code of `moe` before its products: routing, and sorting by expert."""

from __future__ import annotations

from radixgrove.kernels._triton import gdc_launch_dependents, gdc_wait, jit, tl


@jit
def _without_the_best(values, lane, LANES: tl.constexpr):
    """The largest of each row [T, N], where it is, the first of equals, and the rest."""
    best = tl.max(values, axis=1)
    index = tl.min(tl.where(values == best[:, None], lane[None, :], LANES), axis=1)
    rest = tl.where(lane[None, :] == index[:, None], float("-inf"), values)
    return best, index, rest


@jit
def _in_the_best_groups(
    choice, lane, size, GROUPS: tl.constexpr, KEPT: tl.constexpr, TOP: tl.constexpr
):
    """Scores of experts outside the best groups to -inf; a group is as good as its best `TOP`."""
    groups: tl.constexpr = 16
    group = tl.arange(0, groups)
    scores = tl.full((choice.shape[0], groups), float("-inf"), dtype=tl.float32)
    for index in tl.static_range(GROUPS):
        own = tl.where((lane // size == index)[None, :], choice, float("-inf"))
        score, _, own = _without_the_best(own, lane, choice.shape[1])
        if TOP == 2:
            score += tl.max(own, axis=1)
        scores = tl.where((group == index)[None, :], score[:, None], scores)
    kept = tl.zeros(choice.shape, dtype=tl.int1)
    for _ in tl.static_range(KEPT):
        _, index, scores = _without_the_best(scores, group, groups)
        kept = kept | ((lane // size)[None, :] == index[:, None])
    return tl.where(kept, choice, float("-inf"))


@jit
def _chosen(
    logits_ptr,
    bias_ptr,
    token,
    tokens,
    experts,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SIGMOID: tl.constexpr,
    LATE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Of tokens [T]: their experts [T, SLOTS], the weights of those, and [T, BLOCK_E] which they
    are, as 0 and 1."""
    expert = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, SLOTS)
    alive = token < tokens
    inside = (expert < experts)[None, :]
    logits = tl.load(
        logits_ptr + token[:, None] * experts + expert[None, :],
        mask=alive[:, None] & inside,
        other=0.0,
    )
    logits = tl.where(inside, logits, float("-inf"))
    if LATE:
        scores = logits
    elif SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = scores / tl.sum(scores, axis=1)[:, None]
    choice = scores
    if BIAS:
        choice += tl.load(bias_ptr + expert, mask=expert < experts, other=0.0)[None, :]
    # Every comparison with NaN is false: such a token gets some experts all the same, each once,
    # so that sorting stays right for the others; its weights are NaN.
    choice = tl.where(choice > -3.0e38, choice, -3.0e38)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_the_best_groups(
            choice, expert, experts // GROUPS, GROUPS, GROUPS_KEPT, GROUP_TOP
        )
    ids = tl.zeros((token.shape[0], SLOTS), dtype=tl.int32)
    weights = tl.full((token.shape[0], SLOTS), float("-inf") if LATE else 0.0, dtype=tl.float32)
    chosen = tl.zeros((token.shape[0], BLOCK_E), dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        _, index, choice = _without_the_best(choice, expert, BLOCK_E)
        here = expert[None, :] == index[:, None]
        chosen += here.to(tl.int32)
        score = tl.sum(tl.where(here, scores, 0.0), axis=1)
        ids = tl.where((slot == k)[None, :], index[:, None], ids)
        weights = tl.where((slot == k)[None, :], score[:, None], weights)
    if LATE:
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])
    if LATE or RENORMALIZE:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    return ids, weights, tl.where(alive[:, None], chosen, 0)


@jit(varying=("tokens",))
def route_kernel(
    logits_ptr,
    bias_ptr,
    place_ptr,
    load_ptr,
    ids_ptr,
    weights_ptr,
    counts_ptr,
    tokens,
    experts,
    places,
    scale,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SIGMOID: tl.constexpr,
    LATE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    BIAS: tl.constexpr,
    PLACES: tl.constexpr,
    LOAD: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: `BLOCK_T` tokens' experts, their weights, and how many each expert got."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, SLOTS)
    alive = token < tokens
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ids, weights, chosen = _chosen(
        logits_ptr,
        bias_ptr,
        token,
        tokens,
        experts,
        TOP_K,
        SLOTS,
        BLOCK_E,
        SIGMOID,
        LATE,
        RENORMALIZE,
        GROUPS,
        GROUPS_KEPT,
        GROUP_TOP,
        BIAS,
    )
    counts = tl.sum(chosen, axis=0)
    if LOAD:
        # Integers: the sum does not depend on the order.
        tl.atomic_add(load_ptr + expert, counts.to(tl.int64), mask=counts > 0)
    place = expert
    if PLACES:
        place = tl.load(place_ptr + expert, mask=expert < experts, other=-1)
        ids = tl.load(place_ptr + ids)
    if COUNT:
        own = (expert < experts) & (place >= 0)
        tl.store(counts_ptr + tl.program_id(0) * places + place, counts, mask=own)
    target = token[:, None] * TOP_K + slot[None, :]
    mask = alive[:, None] & (slot < TOP_K)[None, :]
    tl.store(ids_ptr + target, ids, mask=mask)
    tl.store(weights_ptr + target, weights * scale, mask=mask)


@jit(varying=("tokens", "counters"))
def route_and_sort_kernel(
    logits_ptr,
    bias_ptr,
    place_ptr,
    load_ptr,
    ids_ptr,
    weights_ptr,
    order_ptr,
    position_ptr,
    offsets_ptr,
    block_expert_ptr,
    block_start_ptr,
    num_blocks_ptr,
    counter_ptr,
    tokens,
    experts,
    places,
    scale,
    counters,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SIGMOID: tl.constexpr,
    LATE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    BIAS: tl.constexpr,
    PLACES: tl.constexpr,
    LOAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `route_kernel` and `sort_kernel` do, in the one program of few tokens."""
    token = tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    slot = tl.arange(0, SLOTS)
    alive = token < tokens
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    _clear(counter_ptr, counters, 0, 1)
    ids, weights, chosen = _chosen(
        logits_ptr,
        bias_ptr,
        token,
        tokens,
        experts,
        TOP_K,
        SLOTS,
        BLOCK_E,
        SIGMOID,
        LATE,
        RENORMALIZE,
        GROUPS,
        GROUPS_KEPT,
        GROUP_TOP,
        BIAS,
    )
    if LOAD:
        counts = tl.sum(chosen, axis=0)
        tl.atomic_add(load_ptr + expert, counts.to(tl.int64), mask=counts > 0)
    if PLACES:
        ids = tl.load(place_ptr + ids)
        chosen = tl.zeros((BLOCK_T, BLOCK_E), dtype=tl.int32)
        for k in tl.static_range(TOP_K):
            own = tl.sum(tl.where((slot == k)[None, :], ids, 0), axis=1)
            chosen += (alive[:, None] & (expert[None, :] == own[:, None])).to(tl.int32)
    target = token[:, None] * TOP_K + slot[None, :]
    mask = alive[:, None] & (slot < TOP_K)[None, :]
    tl.store(ids_ptr + target, ids, mask=mask)
    tl.store(weights_ptr + target, weights * scale, mask=mask)
    total = tl.sum(chosen, axis=0)
    offset = tl.cumsum(total, axis=0) - total
    # An expert's pairs are in the order of tokens.
    start = offset[None, :] + tl.cumsum(chosen, axis=0) - chosen
    for k in tl.static_range(TOP_K):
        own = tl.sum(tl.where((slot == k)[None, :], ids, 0), axis=1)
        position = tl.sum(tl.where(expert[None, :] == own[:, None], start, 0), axis=1)
        here = alive & (own >= 0)
        pair = token * TOP_K + k
        tl.store(order_ptr + position, pair, mask=here)
        tl.store(position_ptr + pair, tl.where(here, position, -1), mask=alive)
    _list_blocks(
        total,
        offset,
        places,
        offsets_ptr,
        block_expert_ptr,
        block_start_ptr,
        num_blocks_ptr,
        BLOCK_M,
        BLOCK_E,
    )


@jit
def _clear(counter_ptr, counters, program, programs):
    """What the product after next counts arrivals with begins at zero."""
    for first in range(program * 1024, counters, programs * 1024):
        lane = first + tl.arange(0, 1024)
        tl.store(counter_ptr + lane, tl.zeros((1024,), dtype=tl.int32), mask=lane < counters)


@jit
def _list_blocks(
    total,
    offset,
    places,
    offsets_ptr,
    block_expert_ptr,
    block_start_ptr,
    num_blocks_ptr,
    block_m,
    BLOCK_E: tl.constexpr,
):
    """Blocks of `block_m` pairs of one expert each, of experts with `total` pairs from `offset`."""
    place = tl.arange(0, BLOCK_E)
    inside = place < places
    blocks = (total + block_m - 1) // block_m
    first_block = tl.cumsum(blocks, axis=0) - blocks
    tl.store(offsets_ptr + place, offset, mask=inside)
    tl.store(offsets_ptr + places, tl.sum(total, axis=0))
    tl.store(num_blocks_ptr, tl.sum(blocks, axis=0))
    for index in range(0, tl.max(blocks, axis=0)):
        mask = index < blocks
        tl.store(block_expert_ptr + first_block + index, place, mask=mask)
        tl.store(block_start_ptr + first_block + index, offset + index * block_m, mask=mask)


@jit(varying=("pairs", "chunks", "counters", "block_m"))
def sort_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    position_ptr,
    offsets_ptr,
    block_expert_ptr,
    block_start_ptr,
    num_blocks_ptr,
    counter_ptr,
    pairs,
    chunks,
    places,
    counters,
    block_m,
    CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SLAB: tl.constexpr,
    STRIPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Pairs of token and expert in the order of experts, then tokens.

    A program finds where the pairs of one chunk go; the last one lists the blocks of `block_m`
    pairs of one expert each. All sum the counts of all chunks, so that none waits for another.
    Sizes of blocks are no reason to compile it anew: it takes the compiler seconds.
    """
    chunk = tl.program_id(0)
    place = tl.arange(0, BLOCK_E)
    inside = place < places
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_E,), dtype=tl.int32)
    before = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, chunks, SLAB):
        row = first + tl.arange(0, SLAB)
        slab = tl.load(
            counts_ptr + row[:, None] * places + place[None, :],
            mask=(row < chunks)[:, None] & inside[None, :],
            other=0,
        )
        total += tl.sum(slab, axis=0)
        before += tl.sum(tl.where((row < chunk)[:, None], slab, 0), axis=0)
    offset = tl.cumsum(total, axis=0) - total
    _clear(counter_ptr, counters, chunk, tl.num_programs(0))
    if chunk < chunks:
        lane = tl.arange(0, BLOCK_C)
        pair = chunk * CHUNK + lane
        alive = (lane < CHUNK) & (pair < pairs)
        own = tl.load(ids_ptr + pair, mask=alive, other=-1)
        rank = tl.zeros((BLOCK_C,), dtype=tl.int32)  # among the chunk's pairs of the same expert
        for stripe in tl.static_range(0, CHUNK, STRIPE):  # all are asked for at once
            other = stripe + tl.arange(0, STRIPE)
            theirs = tl.load(
                ids_ptr + chunk * CHUNK + other,
                mask=(other < CHUNK) & (chunk * CHUNK + other < pairs),
                other=-1,
            )
            same = (theirs[None, :] == own[:, None]) & (other[None, :] < lane[:, None])
            rank += tl.sum(same.to(tl.int32), axis=1)
        here = alive & (own >= 0)
        position = rank + tl.gather(offset + before, tl.where(here, own, 0), axis=0)
        tl.store(order_ptr + position, pair, mask=here)
        tl.store(position_ptr + pair, tl.where(here, position, -1), mask=alive)
    else:
        _list_blocks(
            total,
            offset,
            places,
            offsets_ptr,
            block_expert_ptr,
            block_start_ptr,
            num_blocks_ptr,
            block_m,
            BLOCK_E,
        )

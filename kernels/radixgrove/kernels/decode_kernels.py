# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The device code of `decode`: a program a row, and rows dealt out in equal shares."""

from __future__ import annotations

from radixgrove.kernels._triton import gdc_launch_dependents, gdc_wait, jit, tl
from radixgrove.kernels.attention import above, sink_weights
from radixgrove.kernels.float8 import stored
from radixgrove.kernels.rope import decode_queries


@jit
def attend_run(
    q,
    k_pages_ptr,
    v_pages_ptr,
    table,
    kv_head,
    start,
    stop,
    scale_log2,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over tokens start..stop of a row: best score (rounded up to a whole number),
    norm, and weighted values."""
    dim = tl.arange(0, BLOCK_D)
    lane = tl.arange(0, BLOCK_N)
    best = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    norm = tl.zeros((BLOCK_G,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    # A tile's pages are read a tile earlier, so that the pipeline's stages are all of K and V.
    next_page = tl.load(table + (start + lane) // PAGE, mask=start + lane < stop, other=0)
    for first in range(start, stop, BLOCK_N):
        token = first + lane
        inside = token < stop
        page = next_page.to(tl.int64)
        later = token + BLOCK_N
        next_page = tl.load(table + later // PAGE, mask=later < stop, other=0)
        place = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * HEAD_DIM
        k = tl.load(
            k_pages_ptr + place[None, :] + dim[:, None],
            mask=inside[None, :] & (dim < HEAD_DIM)[:, None],
            other=0.0,
        ).to(q.dtype)
        v = tl.load(
            v_pages_ptr + place[:, None] + dim[None, :],
            mask=inside[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        ).to(q.dtype)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_best = above(best, scores)
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        norm = norm * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
        best = new_best
    return best, norm, acc


@jit
def store_result(
    best,
    norm,
    acc,
    heads,
    inside,
    prefix,
    state_ptr,
    state_stats_ptr,
    state_heads,
    out_ptr,
    out_scale_ptr,
    out_tokens,
    like_ptr,
    sinks_ptr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PREFIX: tl.constexpr,
    SINKS: tl.constexpr,
    QUANTIZES: tl.constexpr,
):
    """The result of `heads`; their softmax goes on from what was left of their prefix, and ends
    with their sinks.

    With `QUANTIZES` it is rounded to the type behind `like_ptr`, then to float8, with a scale for
    each head: [heads, tokens].
    """
    dim = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
    if PREFIX:
        known = inside & (prefix > 0)
        other_best = tl.load(state_stats_ptr + heads, mask=known, other=float("-inf"))
        other_norm = tl.load(state_stats_ptr + state_heads + heads, mask=known, other=0.0)
        other = tl.load(
            state_ptr + heads[:, None] * BLOCK_D + dim[None, :], mask=known[:, None], other=0.0
        )
        new_best = tl.maximum(best, other_best)
        shrink, weight = tl.exp2(best - new_best), tl.exp2(other_best - new_best)
        norm = norm * shrink + other_norm * weight
        acc = acc * shrink[:, None] + other * weight[:, None]
        best = new_best
    if SINKS:
        norm += sink_weights(sinks_ptr, heads % HEADS, best)
    out = acc / norm[:, None]
    target = heads[:, None] * HEAD_DIM + dim[None, :]
    if QUANTIZES:
        out = out.to(like_ptr.dtype.element_ty).to(tl.float32)
        scales = tl.maximum(tl.max(tl.abs(out), axis=1) / 448.0, 1e-12)
        place = out_scale_ptr + heads % HEADS * out_tokens + heads // HEADS
        tl.store(place, scales, mask=inside)
        out = stored(out / scales[:, None], out_ptr)
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit(varying=("rows_ptr", "kv_lens_ptr", "out_tokens", "prefix_lens_ptr", "state_heads"))
def decode_kernel(
    source_ptr,
    source_stride,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_pages_ptr,
    v_pages_ptr,
    rows_ptr,
    kv_lens_ptr,
    page_table_ptr,
    out_ptr,
    out_scale_ptr,
    out_tokens,
    prefix_lens_ptr,
    state_ptr,
    state_stats_ptr,
    table_stride,
    scale_log2,
    eps,
    state_heads,
    sinks_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    RAW: tl.constexpr,
    NORM: tl.constexpr,
    PREFIX: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    QUANTIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the query heads of one KV head of one row."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    group = tl.arange(0, BLOCK_G)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    table = page_table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
    kv_len = tl.load(kv_lens_ptr + row)
    prefix = 0
    if PREFIX:
        prefix = tl.load(prefix_lens_ptr + row)
    if WINDOW > 0:
        prefix = tl.maximum(kv_len - WINDOW, 0)
    q = decode_queries(
        source_ptr,
        source_stride,
        cos_sin_ptr,
        q_norm_ptr,
        k_norm_ptr,
        k_pages_ptr,
        v_pages_ptr,
        table,
        row,
        kv_head,
        kv_len,
        True,
        eps,
        KV_HEADS,
        GROUP,
        HEAD_DIM,
        PAGE,
        BLOCK_G,
        BLOCK_D,
        RAW,
        NORM,
    )
    best, norm, acc = attend_run(
        q,
        k_pages_ptr,
        v_pages_ptr,
        table,
        kv_head,
        prefix,
        kv_len,
        scale_log2,
        KV_HEADS,
        HEAD_DIM,
        PAGE,
        BLOCK_G,
        BLOCK_D,
        BLOCK_N,
        PRECISION,
    )
    store_result(
        best,
        norm,
        acc,
        (row.to(tl.int64) * KV_HEADS + kv_head) * GROUP + group,
        group < GROUP,
        prefix,
        state_ptr,
        state_stats_ptr,
        state_heads,
        out_ptr,
        out_scale_ptr,
        out_tokens,
        source_ptr,
        sinks_ptr,
        KV_HEADS * GROUP,
        HEAD_DIM,
        BLOCK_D,
        PREFIX,
        SINKS,
        QUANTIZES,
    )


@jit
def find_pair(unit, item, lens, ends, KV_HEADS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of the block with the number `unit`: the item, its length, the KV head, the block's place in
    the pair's run, and where that run begins and ends."""
    index = tl.sum((ends <= unit).to(tl.int32), axis=0)
    is_item = item == index
    end = tl.sum(tl.where(is_item, ends, 0), axis=0)
    length = tl.sum(tl.where(is_item, lens, 0), axis=0)
    blocks = tl.cdiv(length, BLOCK_N)
    place = unit - (end - blocks * KV_HEADS)
    first_block = place % blocks
    pair_start = unit - first_block
    return index, length, place // blocks, first_block, pair_start, pair_start + blocks


@jit
def leave_part(
    best,
    norm,
    acc,
    pair,
    pair_start,
    program,
    share,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Leave a pair's part for the program that will merge them; how many have been left before.

    A share holds at most two parts of pairs that it does not hold whole: slot 0 is for the pair
    that began before it, slot 1 for the one that goes on after it.
    """
    group = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    slot = (2 * program + (pair_start >= program * share).to(tl.int32)).to(tl.int64)
    inner = group[:, None] * BLOCK_D + dim[None, :]
    tl.store(partial_ptr + slot * ROWS * BLOCK_D + inner, acc, mask=(group < ROWS)[:, None])
    tl.store(stats_ptr + slot * 2 * ROWS + group, best, mask=group < ROWS)
    tl.store(stats_ptr + slot * 2 * ROWS + ROWS + group, norm, mask=group < ROWS)
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel")


@jit
def merge_parts(
    pair_start,
    first_program,
    last_program,
    share,
    partial_ptr,
    stats_ptr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What `_leave_part` left of one pair: best score, norm and weighted values of its queries."""
    query = tl.arange(0, BLOCK_R)
    dim = tl.arange(0, BLOCK_D)
    inside = query < ROWS
    inner = query[:, None] * BLOCK_D + dim[None, :]
    best = tl.full((BLOCK_R,), float("-inf"), dtype=tl.float32)
    norm = tl.zeros((BLOCK_R,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    for owner in range(first_program, last_program + 1):
        slot = (2 * owner + (pair_start >= owner * share).to(tl.int32)).to(tl.int64)
        stats = stats_ptr + slot * 2 * ROWS + query
        part_best = tl.load(stats, mask=inside, other=0.0, cache_modifier=".cg")
        part_norm = tl.load(stats + ROWS, mask=inside, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partial_ptr + slot * ROWS * BLOCK_D + inner,
            mask=inside[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_best = tl.maximum(best, part_best)
        shrink, weight = tl.exp2(best - new_best), tl.exp2(part_best - new_best)
        norm = norm * shrink + part_norm * weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        best = new_best
    return best, norm, acc


@jit(
    varying=(
        "rows_ptr",
        "kv_lens_ptr",
        "tokens_ptr",
        "out_tokens",
        "prefix_lens_ptr",
        "state_heads",
        "batch",
        "least",
    )
)
def shared_decode_kernel(
    source_ptr,
    source_stride,
    cos_sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    k_pages_ptr,
    v_pages_ptr,
    rows_ptr,
    kv_lens_ptr,
    page_table_ptr,
    out_ptr,
    out_scale_ptr,
    out_tokens,
    prefix_lens_ptr,
    state_ptr,
    state_stats_ptr,
    table_stride,
    scale_log2,
    eps,
    state_heads,
    sinks_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    tokens_ptr,
    batch,
    least,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    RAW: tl.constexpr,
    NORM: tl.constexpr,
    PREFIX: tl.constexpr,
    QUANTIZES: tl.constexpr,
    INDEXED: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: its share of all blocks of KV, a run of them across rows and KV heads.

    Blocks are numbered row by row, and KV head by KV head within a row; a pair's blocks (row, KV
    head) are a run too. Where a pair reaches into several shares, each leaves its part, and the
    last program of the pair to arrive merges them.
    """
    program = tl.program_id(0)
    item = tl.arange(0, BLOCK_B)
    group = tl.arange(0, BLOCK_G)
    # Lengths do not come from the kernel before, so they are read while it ends.
    lens = tl.load(kv_lens_ptr + item, mask=item < batch, other=0)
    if PREFIX:
        lens -= tl.load(prefix_lens_ptr + item, mask=item < batch, other=0)
    if WINDOW > 0:
        lens = tl.minimum(lens, WINDOW)
    blocks = (lens + BLOCK_N - 1) // BLOCK_N
    ends = tl.cumsum(blocks, axis=0) * KV_HEADS
    total = tl.sum(blocks, axis=0) * KV_HEADS
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), least)
    unit = program * share
    stop_unit = tl.minimum(unit + share, total)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    while unit < stop_unit:
        row, length, kv_head, first_block, pair_start, pair_end = find_pair(
            unit, item, lens, ends, KV_HEADS, BLOCK_N
        )
        count = tl.minimum(pair_end, stop_unit) - unit
        prefix = 0
        if PREFIX:
            prefix = tl.load(prefix_lens_ptr + row)
        if WINDOW > 0:
            prefix = tl.load(kv_lens_ptr + row) - length
        kv_len = prefix + length
        token = row
        if INDEXED:
            token = tl.load(tokens_ptr + row)
        first_head = (token.to(tl.int64) * KV_HEADS + kv_head) * GROUP
        table = page_table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
        q = decode_queries(
            source_ptr,
            source_stride,
            cos_sin_ptr,
            q_norm_ptr,
            k_norm_ptr,
            k_pages_ptr,
            v_pages_ptr,
            table,
            token,
            kv_head,
            kv_len,
            unit + count == pair_end,
            eps,
            KV_HEADS,
            GROUP,
            HEAD_DIM,
            PAGE,
            BLOCK_G,
            BLOCK_D,
            RAW,
            NORM,
        )
        start = prefix + first_block * BLOCK_N
        best, norm, acc = attend_run(
            q,
            k_pages_ptr,
            v_pages_ptr,
            table,
            kv_head,
            start,
            tl.minimum(start + count * BLOCK_N, kv_len),
            scale_log2,
            KV_HEADS,
            HEAD_DIM,
            PAGE,
            BLOCK_G,
            BLOCK_D,
            BLOCK_N,
            PRECISION,
        )

        first_program = pair_start // share
        last_program = (pair_end - 1) // share
        if first_program == last_program:
            store_result(
                best,
                norm,
                acc,
                first_head + group,
                group < GROUP,
                prefix,
                state_ptr,
                state_stats_ptr,
                state_heads,
                out_ptr,
                out_scale_ptr,
                out_tokens,
                source_ptr,
                sinks_ptr,
                KV_HEADS * GROUP,
                HEAD_DIM,
                BLOCK_D,
                PREFIX,
                SINKS,
                QUANTIZES,
            )
        else:
            pair = (row * KV_HEADS + kv_head).to(tl.int64)
            arrived = leave_part(
                best,
                norm,
                acc,
                pair,
                pair_start,
                program,
                share,
                partial_ptr,
                stats_ptr,
                counter_ptr,
                GROUP,
                BLOCK_G,
                BLOCK_D,
            )
            if arrived == last_program - first_program:
                tl.store(counter_ptr + pair, 0)
                all_best, all_norm, all_acc = merge_parts(
                    pair_start,
                    first_program,
                    last_program,
                    share,
                    partial_ptr,
                    stats_ptr,
                    GROUP,
                    BLOCK_R,
                    BLOCK_D,
                )
                query = tl.arange(0, BLOCK_R)
                store_result(
                    all_best,
                    all_norm,
                    all_acc,
                    first_head + query,
                    query < GROUP,
                    prefix,
                    state_ptr,
                    state_stats_ptr,
                    state_heads,
                    out_ptr,
                    out_scale_ptr,
                    out_tokens,
                    source_ptr,
                    sinks_ptr,
                    KV_HEADS * GROUP,
                    HEAD_DIM,
                    BLOCK_D,
                    PREFIX,
                    SINKS,
                    QUANTIZES,
                )
        unit += count

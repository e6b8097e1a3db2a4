# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The device code of `decode` for prefixes that rows have in common."""

from __future__ import annotations

from radixgrove.kernels._triton import gdc_launch_dependents, gdc_wait, jit, tl
from radixgrove.kernels.decode_kernels import attend_run, find_pair, leave_part, merge_parts


@jit(varying=("rows_ptr", "tiles_ptr", "tile_lens_ptr", "state_heads", "tiles"))
def prefix_kernel(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    rows_ptr,
    page_table_ptr,
    tiles_ptr,
    tile_lens_ptr,
    state_ptr,
    state_stats_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    table_stride,
    scale_log2,
    state_heads,
    tiles,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `_shared_decode_kernel`, with tiles of rows for rows, and their prefix for their KV.

    The unfinished softmax of each head is left in the state.
    """
    program = tl.program_id(0)
    item = tl.arange(0, BLOCK_B)
    group = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    queries: tl.constexpr = TILE_ROWS * GROUP
    # Tiles have been there since before the step.
    lens = tl.load(tile_lens_ptr + item, mask=item < tiles, other=0)
    blocks = (lens + BLOCK_N - 1) // BLOCK_N
    ends = tl.cumsum(blocks, axis=0) * KV_HEADS
    total = tl.sum(blocks, axis=0) * KV_HEADS
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), 1)
    unit = program * share
    stop_unit = tl.minimum(unit + share, total)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    while unit < stop_unit:
        tile, length, kv_head, first_block, pair_start, pair_end = find_pair(
            unit, item, lens, ends, KV_HEADS, BLOCK_N
        )
        count = tl.minimum(pair_end, stop_unit) - unit
        members = tiles_ptr + tile * TILE_ROWS
        member = tl.load(members + group // GROUP, mask=group < queries, other=-1)
        there = member >= 0
        heads = (member.to(tl.int64) * KV_HEADS + kv_head) * GROUP + group % GROUP
        q = tl.load(
            q_ptr + heads[:, None] * HEAD_DIM + dim[None, :],
            mask=there[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        row = tl.load(rows_ptr + tl.load(members))
        start = first_block * BLOCK_N
        best, norm, acc = attend_run(
            q,
            k_pages_ptr,
            v_pages_ptr,
            page_table_ptr + row.to(tl.int64) * table_stride,
            kv_head,
            start,
            tl.minimum(start + count * BLOCK_N, length),
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
        complete = first_program == last_program
        if not complete:
            pair = (tile * KV_HEADS + kv_head).to(tl.int64)
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
                queries,
                BLOCK_G,
                BLOCK_D,
            )
            complete = arrived == last_program - first_program
            if complete:
                tl.store(counter_ptr + pair, 0)
                best, norm, acc = merge_parts(
                    pair_start,
                    first_program,
                    last_program,
                    share,
                    partial_ptr,
                    stats_ptr,
                    queries,
                    BLOCK_G,
                    BLOCK_D,
                )
        if complete:
            tl.store(state_ptr + heads[:, None] * BLOCK_D + dim[None, :], acc, mask=there[:, None])
            tl.store(state_stats_ptr + heads, best, mask=there)
            tl.store(state_stats_ptr + state_heads + heads, norm, mask=there)
        unit += count

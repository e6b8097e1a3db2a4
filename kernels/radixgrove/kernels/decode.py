# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Decode attention over paged KV: one query a row.

With the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) in base 2. The KV of all rows
is dealt out to the programs in equal shares, as stream-K does with a product's tiles (Osama et al.
2023; for attention, Sanovar et al. 2024): whatever the lengths, all programs end together. Many
rows have a program each instead. A layer is one launch, which may begin with q/k norm, RoPE and the
store of the new K and V.

Rows with a prefix in common can read it once for all of them (as in Hydragen, Juravsky et al. 2024,
and ChunkAttention, Ye et al. 2024): a kernel before attends to the prefix with the queries of a
tile of rows, and the rows' own programs go on from what it leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.kernels._triton import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    pdl,
    tl,
)
from radixgrove.kernels.attention import LOG2_E, extend_attention_reference
from radixgrove.kernels.rope import decode_queries, rope_store_reference

MAX_PROGRAMS = 16  # of a decode, on each multiprocessor


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How decode attention is cut up.

    Attributes:
        block_n: KV tokens that a program takes at a time, with `stages` of them in flight.
        programs: on each multiprocessor, up to `MAX_PROGRAMS`.
        least: blocks that a program takes at least; the programs beyond have nothing to do.
    """

    block_n: int = 64
    stages: int = 2
    warps: int = 2
    programs: int = 4
    least: int = 1


# On an H200 the best, or within 2 % of it, of 130 for 16 to 256 rows of 200 to 1,800 tokens. Up to
# 8 rows, short blocks spread a row over more programs.
_MANY_ROWS = DecodeConfig()
_FEW_ROWS = DecodeConfig(block_n=32, stages=3, warps=4, programs=3, least=2)
_FEW = 8
# Of pairs with a program each, and of tiles of rows with a prefix in common.
_WHOLE = DecodeConfig(stages=3, warps=4)
_TILES = DecodeConfig(stages=3, warps=4, programs=2)
# From so many pairs (row, KV head) a program on, each pair has a program of its own: that balances
# well enough, and rows with a prefix in common, whose programs of one KV head run at the same time,
# then find it in the L2 cache.
_WHOLE_PAIRS = 3
_WIDE = DecodeConfig(block_n=32, stages=2, warps=4)  # float32 takes twice the shared memory
_TILE_QUERIES = 64  # of rows with a prefix in common that one program multiplies at once


def decode_attention_reference(
    q: Tensor, pages: Tensor, rows: Tensor, kv_lens: Tensor, page_table: Tensor, scale: float
) -> Tensor:
    """See `decode_attention`."""
    indptr = torch.arange(len(rows) + 1)
    return extend_attention_reference(q, pages, rows, indptr, kv_lens, page_table, scale)


def rope_decode_attention_reference(
    qkv: Tensor,
    cos_sin: Tensor,
    pages: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """See `rope_decode_attention`."""
    page_size = pages.shape[2]
    positions = kv_lens.long() - 1
    own = page_table[rows.long(), positions // page_size].long()
    slots = own * page_size + positions % page_size
    q = rope_store_reference(qkv.clone(), cos_sin, positions, slots, pages, q_norm, k_norm, eps)
    return decode_attention_reference(q, pages, rows, kv_lens, page_table, scale)


@jit
def _attend_run(
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
    """Online softmax over tokens start..stop of a row: best score, norm, and weighted values."""
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
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        norm = norm * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
        best = new_best
    return best, norm, acc


@jit
def _store_result(
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
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PREFIX: tl.constexpr,
):
    """The result of `heads`, whose softmax goes on from what was left of their prefix."""
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
    out = acc / norm[:, None]
    target = heads[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=mask)


@jit(varying=("rows_ptr", "kv_lens_ptr", "prefix_lens_ptr", "state_heads"))
def _decode_kernel(
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
    prefix_lens_ptr,
    state_ptr,
    state_stats_ptr,
    table_stride,
    scale_log2,
    eps,
    state_heads,
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
    best, norm, acc = _attend_run(
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
    _store_result(
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
        HEAD_DIM,
        BLOCK_D,
        PREFIX,
    )


@jit
def _find_pair(unit, item, lens, ends, KV_HEADS: tl.constexpr, BLOCK_N: tl.constexpr):
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
def _leave_part(
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
def _merge_parts(
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
        "prefix_lens_ptr",
        "state_heads",
        "batch",
        "least",
    )
)
def _shared_decode_kernel(
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
    prefix_lens_ptr,
    state_ptr,
    state_stats_ptr,
    table_stride,
    scale_log2,
    eps,
    state_heads,
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
    INDEXED: tl.constexpr,
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
        row, length, kv_head, first_block, pair_start, pair_end = _find_pair(
            unit, item, lens, ends, KV_HEADS, BLOCK_N
        )
        count = tl.minimum(pair_end, stop_unit) - unit
        prefix = 0
        if PREFIX:
            prefix = tl.load(prefix_lens_ptr + row)
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
        best, norm, acc = _attend_run(
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
            _store_result(
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
                HEAD_DIM,
                BLOCK_D,
                PREFIX,
            )
        else:
            pair = (row * KV_HEADS + kv_head).to(tl.int64)
            arrived = _leave_part(
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
                all_best, all_norm, all_acc = _merge_parts(
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
                _store_result(
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
                    HEAD_DIM,
                    BLOCK_D,
                    PREFIX,
                )
        unit += count


@jit(varying=("rows_ptr", "tiles_ptr", "tile_lens_ptr", "state_heads", "tiles"))
def _prefix_kernel(
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
        tile, length, kv_head, first_block, pair_start, pair_end = _find_pair(
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
        best, norm, acc = _attend_run(
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
            arrived = _leave_part(
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
                best, norm, acc = _merge_parts(
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


class DecodeWorkspace:
    """Parts of pairs (row, KV head) that several programs share, and how many have arrived.

    Counters are zero between launches: the program that sees the last arrival puts them back.
    """

    def __init__(
        self, max_batch: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.max_batch = max_batch
        # The same for the usual batch sizes, so that the kernel is compiled once for all.
        self.block_b = max(256, next_power_of_2(max_batch))
        self.multiprocessors = _multiprocessors(device)
        group = num_heads // num_kv_heads
        slots = 2 * self.multiprocessors * MAX_PROGRAMS
        self.partials = torch.empty(
            slots * group * max(16, next_power_of_2(head_dim)), dtype=torch.float32, device=device
        )
        self.stats = torch.empty(slots * 2 * group, dtype=torch.float32, device=device)
        self.counters = torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device)
        self.prefixes = PrefixWorkspace(max_batch, num_heads, num_kv_heads, head_dim, device)


class PrefixWorkspace:
    """What prefixes in common need: parts as in `DecodeWorkspace`, and the state they leave.

    Attributes:
        state: [B * H * BLOCK_D] float32, weighted values of each head before they are divided.
        state_stats: [2 * B * H] float32, best scores, then norms.
    """

    def __init__(
        self, max_batch: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.state_heads = max_batch * num_heads
        block_d = max(16, next_power_of_2(head_dim))
        queries = tile_rows(num_heads, num_kv_heads) * (num_heads // num_kv_heads)
        slots = 2 * _multiprocessors(device) * _TILES.programs

        def empty(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        self.partials, self.stats = empty(slots * queries * block_d), empty(slots * 2 * queries)
        self.state = empty(self.state_heads * block_d)
        self.state_stats = empty(2 * self.state_heads)
        self.counters = torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device)


def tile_rows(num_heads: int, num_kv_heads: int) -> int:
    """Rows with a prefix in common that are attended to at once."""
    return max(1, _TILE_QUERIES // (num_heads // num_kv_heads))


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Prefixes that rows of a batch have in common, on the device.

    Attributes:
        tiles: [T, `tile_rows`] int32, indices of rows of the batch whose first pages are the same;
            -1 beyond a tile's last. A row is in one tile at most.
        tile_lens: [T] int32, how many tokens these pages hold; 0: the tile is empty.
        row_lens: [at least B] int32, the same of each row's tile, less than the row's length; 0: it
            has none.
    """

    tiles: Tensor
    tile_lens: Tensor
    row_lens: Tensor


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: a few programs, so that tests see the merge
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def decode_attention(
    q: Tensor,
    pages: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    *,
    tokens: Tensor | None = None,
    prefixes: SharedPrefixes | None = None,
    config: DecodeConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from one query a row to all of the row's KV, the query's own included.

    Args:
        q: [B, H, D] contiguous, or [T, H, D] with `tokens`. pages: [2, num_pages, page_size, KV, D]
            contiguous, q's dtype or float8 (widened to q's as it is read), KV divides H.
        rows: [B] int32, rows of page_table. kv_lens: [B] int32, at least 1, or 0 with `tokens`.
        page_table: [max_rows, max_pages] int32.
        tokens: [B] int32, where each row's query is in q, and its result in the output; rows
            without KV have none. The other places of the output are left as they were.
        prefixes: what rows have in common and is read once for all of them, by a kernel of its own;
            not with `tokens`. The result is the same up to rounding.
        config: tile, pipeline and programs, by default what suits B; any gives the same result up
            to rounding.
        out: where to write, as the returned tensor; allocated when None.

    Returns:
        As q. The grid depends on the config alone, so a captured graph serves any
        lengths.

    Raises:
        ValueError: B exceeds the workspace, or there are both `tokens` and `prefixes`.
    """
    if tokens is not None and prefixes is not None:
        raise ValueError("rows with prefixes in common have their queries in the batch's order")
    if out is None:
        out = torch.empty_like(q)
    if prefixes is not None and len(q):
        _attend_prefixes(q, pages, rows, page_table, scale, prefixes, workspace.prefixes)
    inputs = _Inputs(
        q, q.stride(0), q, q, q, eps=0.0, raw=False, norm=False, tokens=tokens, prefixes=prefixes
    )
    _launch(inputs, pages, rows, kv_lens, page_table, scale, workspace, config, out)
    return out


def _attend_prefixes(
    q: Tensor,
    pages: Tensor,
    rows: Tensor,
    page_table: Tensor,
    scale: float,
    prefixes: SharedPrefixes,
    workspace: PrefixWorkspace,
) -> None:
    """Leave the softmax of every row over its tile's prefix in the state."""
    _, heads, head_dim = q.shape
    page_size, kv_heads = pages.shape[2:4]
    wide = q.dtype == torch.float32
    config = _WIDE if wide else _TILES
    _prefix_kernel[(_multiprocessors(q.device) * _TILES.programs,)](
        q,
        pages[0],
        pages[1],
        rows,
        page_table,
        prefixes.tiles,
        prefixes.tile_lens,
        workspace.state,
        workspace.state_stats,
        workspace.partials,
        workspace.stats,
        workspace.counters,
        page_table.stride(0),
        scale * LOG2_E,
        workspace.state_heads,
        len(prefixes.tile_lens),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        TILE_ROWS=prefixes.tiles.shape[1],
        BLOCK_B=next_power_of_2(len(prefixes.tile_lens)),
        BLOCK_G=max(16, next_power_of_2(prefixes.tiles.shape[1] * (heads // kv_heads))),
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_N=config.block_n,
        PRECISION="ieee" if wide else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        **pdl(q),
    )


def rope_decode_attention(
    qkv: Tensor,
    cos_sin: Tensor,
    pages: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    config: DecodeConfig | None = None,
) -> Tensor:
    """`rope.rope_store` of each row's last token, then `decode_attention`, in one kernel.

    Args:
        qkv: [B, (H + 2 KV) * D], heads of q, then k, then v; rows may be strided. Only read.
        cos_sin: [max_position, D] float32: D/2 cosines, then D/2 sines; row b's token has the
            position `kv_lens[b] - 1`, and the place in the pages that the table gives it. Rows may
            share the page of that place only where nobody reads it (padding, the scratch page).
        q_norm, k_norm: [D] each, both or none.

    The other arguments, the result and what is raised are those of `decode_attention`.
    """
    kv_heads, head_dim = pages.shape[3:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    out = torch.empty((qkv.shape[0], heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    inputs = _Inputs(
        qkv,
        qkv.stride(0),
        cos_sin,
        q_norm if q_norm is not None else qkv,
        k_norm if k_norm is not None else qkv,
        eps=eps,
        raw=True,
        norm=q_norm is not None,
    )
    _launch(inputs, pages, rows, kv_lens, page_table, scale, workspace, config, out)
    return out


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Queries as they are, or the projection that they come from with what makes them."""

    source: Tensor
    stride: int
    cos_sin: Tensor
    q_norm: Tensor
    k_norm: Tensor
    eps: float
    raw: bool
    norm: bool
    tokens: Tensor | None = None
    prefixes: SharedPrefixes | None = None


def _launch(
    inputs: _Inputs,
    pages: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    config: DecodeConfig | None,
    out: Tensor,
) -> None:
    tokens, heads, head_dim = out.shape
    batch = tokens if inputs.tokens is None else len(inputs.tokens)
    page_size, kv_heads = pages.shape[2:4]
    if not batch:
        return
    if batch > workspace.max_batch:
        raise ValueError(f"batch {batch} exceeds the workspace's {workspace.max_batch}")
    programs = workspace.multiprocessors * (config or _MANY_ROWS).programs
    # Of indexed rows any number may have no KV, which only the shares account for.
    whole = inputs.tokens is None and batch * kv_heads >= _WHOLE_PAIRS * programs
    wide = out.dtype == torch.float32
    if config is None:
        few = _FEW_ROWS if batch <= _FEW else _MANY_ROWS
        config = _WIDE if wide else _WHOLE if whole else few
    group = heads // kv_heads
    prefixes = inputs.prefixes
    geometry = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE": page_size,
        "BLOCK_G": max(16, next_power_of_2(group)),
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "BLOCK_N": config.block_n,
        "PRECISION": "ieee" if wide else "tf32",
        "RAW": inputs.raw,
        "NORM": inputs.norm,
        "PREFIX": prefixes is not None,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **pdl(out),
    }
    arguments = (
        inputs.source,
        inputs.stride,
        inputs.cos_sin,
        inputs.q_norm,
        inputs.k_norm,
        pages[0],
        pages[1],
        rows,
        kv_lens,
        page_table,
        out,
        prefixes.row_lens if prefixes is not None else rows,
        workspace.prefixes.state,
        workspace.prefixes.state_stats,
        page_table.stride(0),
        scale * LOG2_E,
        inputs.eps,
        workspace.prefixes.state_heads,
    )
    if whole:
        _decode_kernel[(batch, kv_heads)](*arguments, **geometry)
        return
    _shared_decode_kernel[(workspace.multiprocessors * config.programs,)](
        *arguments,
        workspace.partials,
        workspace.stats,
        workspace.counters,
        rows if inputs.tokens is None else inputs.tokens,
        batch,
        config.least,
        BLOCK_B=workspace.block_b,
        BLOCK_R=next_power_of_2(group),
        INDEXED=inputs.tokens is not None,
        **geometry,
    )

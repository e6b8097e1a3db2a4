# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Decode attention over paged KV: one query a row.

With the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) in base 2. The KV of all rows
is dealt out to the programs in equal shares, as stream-K does with a product's tiles (Osama et al.
2023; for attention, Sanovar et al. 2024): whatever the lengths, all programs end together. Many
rows have a program each instead. A layer is one launch, which may begin with q/k norm, RoPE and the
store of the new K and V.
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
        merge: parts of a pair that are loaded at once when they are merged. A small batch has many,
            and waits for each round; a large one has few, and needs the registers.
    """

    block_n: int = 64
    stages: int = 3
    warps: int = 2
    programs: int = 4
    least: int = 1
    merge: int = 1


# On an H100 the best of 77 for 16 to 256 rows of 200 to 2,000 tokens, or within 2 % of it; and of
# 462 for up to 8 rows, where short blocks spread a row over more programs.
_MANY_ROWS = DecodeConfig()
_FEW_ROWS = DecodeConfig(block_n=32, stages=4, warps=4, programs=3, least=2)
_FEW = 8
# From so many pairs (row, KV head) a program on, each pair has a program of its own: that balances
# well enough, and rows with a prefix in common, whose programs of one KV head run at the same time,
# then find it in the L2 cache.
_WHOLE_PAIRS = 3
_WIDE = DecodeConfig(block_n=32, stages=2, warps=4)  # float32 takes twice the shared memory


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
    best = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    norm = tl.zeros((BLOCK_G,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
    for first in range(start, stop, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        inside = token < stop
        page = tl.load(table + token // PAGE, mask=inside, other=0).to(tl.int64)
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


@jit(varying=("rows_ptr", "kv_lens_ptr"))
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
    table_stride,
    scale_log2,
    eps,
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
    PDL: tl.constexpr,
):
    """One program: the query heads of one KV head of one row."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    group = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    in_group = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    target = ((row.to(tl.int64) * KV_HEADS + kv_head) * GROUP + group)[:, None] * HEAD_DIM
    target += dim[None, :]
    table = page_table_ptr + tl.load(rows_ptr + row).to(tl.int64) * table_stride
    kv_len = tl.load(kv_lens_ptr + row)
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
    _, norm, acc = _attend_run(
        q,
        k_pages_ptr,
        v_pages_ptr,
        table,
        kv_head,
        0,
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
    out = acc / norm[:, None]
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=in_group)


@jit(varying=("rows_ptr", "kv_lens_ptr", "tokens_ptr", "batch", "least"))
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
    partial_ptr,
    stats_ptr,
    counter_ptr,
    tokens_ptr,
    table_stride,
    scale_log2,
    eps,
    batch,
    least,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MERGE: tl.constexpr,
    PRECISION: tl.constexpr,
    RAW: tl.constexpr,
    NORM: tl.constexpr,
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
    dim = tl.arange(0, BLOCK_D)
    in_group = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    inner = group[:, None] * BLOCK_D + dim[None, :]
    area: tl.constexpr = GROUP * BLOCK_D
    # Lengths do not come from the kernel before, so they are read while it ends.
    lens = tl.load(kv_lens_ptr + item, mask=item < batch, other=0)
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
        row = tl.sum((ends <= unit).to(tl.int32), axis=0)
        is_row = item == row
        row_end = tl.sum(tl.where(is_row, ends, 0), axis=0)
        kv_len = tl.sum(tl.where(is_row, lens, 0), axis=0)
        row_blocks = tl.cdiv(kv_len, BLOCK_N)
        place_in_row = unit - (row_end - row_blocks * KV_HEADS)
        kv_head = place_in_row // row_blocks
        first_block = place_in_row % row_blocks
        pair_start = unit - first_block
        pair_end = pair_start + row_blocks
        count = tl.minimum(pair_end, stop_unit) - unit

        pair = (row * KV_HEADS + kv_head).to(tl.int64)
        token = row
        if INDEXED:
            token = tl.load(tokens_ptr + row)
        heads = (token.to(tl.int64) * KV_HEADS + kv_head) * GROUP + group
        target = heads[:, None] * HEAD_DIM + dim[None, :]
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
        start = first_block * BLOCK_N
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
            out = acc / norm[:, None]
            tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=in_group)
        else:
            # A share holds at most two parts of pairs that it does not hold whole: slot 0 is for
            # the pair that began before it, slot 1 for the one that goes on after it.
            slot = (2 * program + (pair_start >= program * share).to(tl.int32)).to(tl.int64)
            tl.store(partial_ptr + slot * area + inner, acc, mask=in_group)
            tl.store(stats_ptr + slot * (2 * BLOCK_G) + group, best)
            tl.store(stats_ptr + slot * (2 * BLOCK_G) + BLOCK_G + group, norm)
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel")
            if arrived == last_program - first_program:
                tl.store(counter_ptr + pair, 0)
                best = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
                norm = tl.zeros((BLOCK_G,), dtype=tl.float32)
                acc = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
                for first_part in range(first_program, last_program + 1, MERGE):
                    owner = first_part + tl.arange(0, MERGE)
                    there = owner <= last_program
                    slots = (2 * owner + (pair_start >= owner * share).to(tl.int32)).to(tl.int64)
                    stats = stats_ptr + slots[:, None] * (2 * BLOCK_G) + group[None, :]
                    bests = tl.load(
                        stats, mask=there[:, None], other=float("-inf"), cache_modifier=".cg"
                    )
                    norms = tl.load(
                        stats + BLOCK_G, mask=there[:, None], other=0.0, cache_modifier=".cg"
                    )
                    parts = tl.load(
                        partial_ptr + slots[:, None, None] * area + inner[None, :, :],
                        mask=there[:, None, None] & in_group[None, :, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    new_best = tl.maximum(best, tl.max(bests, axis=0))
                    shrink = tl.exp2(best - new_best)
                    weights = tl.exp2(bests - new_best[None, :])
                    norm = norm * shrink + tl.sum(norms * weights, axis=0)
                    acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
                    best = new_best
                out = acc / norm[:, None]
                tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=in_group)
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
        self.stats = torch.empty(
            slots * 2 * max(16, next_power_of_2(group)), dtype=torch.float32, device=device
        )
        self.counters = torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device)


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
        config: tile, pipeline and programs, by default what suits B; any gives the same result up
            to rounding.
        out: where to write, as the returned tensor; allocated when None.

    Returns:
        As q. The grid depends on the config alone, so a captured graph serves any
        lengths.

    Raises:
        ValueError: B exceeds the workspace.
    """
    if out is None:
        out = torch.empty_like(q)
    inputs = _Inputs(q, q.stride(0), q, q, q, eps=0.0, raw=False, norm=False, tokens=tokens)
    _launch(inputs, pages, rows, kv_lens, page_table, scale, workspace, config, out)
    return out


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
    wide = out.dtype == torch.float32
    if config is None:
        config = _WIDE if wide else _FEW_ROWS if batch <= _FEW else _MANY_ROWS
    geometry = {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE": page_size,
        "BLOCK_G": max(16, next_power_of_2(heads // kv_heads)),
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "BLOCK_N": config.block_n,
        "PRECISION": "ieee" if wide else "tf32",
        "RAW": inputs.raw,
        "NORM": inputs.norm,
        "num_warps": config.warps,
        "num_stages": config.stages,
        **pdl(out),
    }
    tensors = (
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
    )
    numbers = (page_table.stride(0), scale * LOG2_E, inputs.eps)
    programs = workspace.multiprocessors * config.programs
    # Of indexed rows any number may have no KV, which only the shares account for.
    if inputs.tokens is None and batch * kv_heads >= _WHOLE_PAIRS * programs:
        _decode_kernel[(batch, kv_heads)](*tensors, *numbers, **geometry)
        return
    _shared_decode_kernel[(programs,)](
        *tensors,
        workspace.partials,
        workspace.stats,
        workspace.counters,
        rows if inputs.tokens is None else inputs.tokens,
        *numbers,
        batch,
        config.least,
        BLOCK_B=workspace.block_b,
        MERGE=config.merge,
        INDEXED=inputs.tokens is not None,
        **geometry,
    )

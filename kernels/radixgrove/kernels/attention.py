# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Attention over paged KV: decode (one query a row) and extend (cached prefix + new tokens).

Both use the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) in base 2. Decode splits
a row's KV over programs as flash-decoding does (Dao et al. 2023); the last program of a row to
arrive merges the parts, so that a layer is one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.kernels._triton import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    pdl,
    tl,
)

LOG2_E = 1.4426950408889634
MAX_SPLITS = 64
# Large batches fill the device with one program a row, but a row much longer than the others would
# then run on alone at the end. Programs beyond what a row's length needs return at once.
_LEAST_SPLITS = 4


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """KV tokens that a program of decode attention takes at a time, pipeline stages and warps."""

    block_n: int = 64
    stages: int = 3
    warps: int = 4


_WIDE_CONFIG = DecodeConfig(block_n=32, stages=2)  # float32 takes twice the shared memory


def extend_attention_reference(
    q: Tensor,
    pages: Tensor,
    rows: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
) -> Tensor:
    """See `extend_attention`; rows of one query are decodes. Computed in float32 or wider."""
    heads = q.shape[1]
    page_size, kv_heads = pages.shape[2:4]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    for item in range(len(rows)):
        start, stop = int(qo_indptr[item]), int(qo_indptr[item + 1])
        kv_len, length = int(kv_lens[item]), stop - start
        table = page_table[int(rows[item]), : cdiv(kv_len, page_size)].long()
        kv = pages[:, table].flatten(1, 2)[:, :kv_len].to(wide)
        k, v = kv.repeat_interleave(heads // kv_heads, dim=2)
        scores = torch.einsum("qhd,khd->hqk", q[start:stop].to(wide), k) * scale
        limit = torch.arange(kv_len - length, kv_len, device=q.device)
        hidden = torch.arange(kv_len, device=q.device)[None, :] > limit[:, None]
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


def decode_attention_reference(
    q: Tensor, pages: Tensor, rows: Tensor, kv_lens: Tensor, page_table: Tensor, scale: float
) -> Tensor:
    """See `decode_attention`."""
    indptr = torch.arange(len(rows) + 1)
    return extend_attention_reference(q, pages, rows, indptr, kv_lens, page_table, scale)


@jit(varying=("rows_ptr", "kv_lens_ptr", "min_split"))
def _decode_kernel(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    rows_ptr,
    kv_lens_ptr,
    page_table_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    table_stride,
    scale_log2,
    min_split,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the query heads of one KV head of one row, over one split of its KV."""
    item = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    group = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv_len = tl.load(kv_lens_ptr + item)
    # A split is whole blocks and not tiny, so that a short row does not pay for the merge.
    length = tl.maximum(tl.cdiv(tl.cdiv(kv_len, splits), BLOCK_N) * BLOCK_N, min_split)
    used = tl.cdiv(kv_len, length)
    if split < used:
        heads = (item * KV_HEADS + kv_head) * GROUP + group
        in_group = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        target = heads[:, None] * HEAD_DIM + dim[None, :]
        q = tl.load(q_ptr + target, mask=in_group, other=0.0)
        table = page_table_ptr + tl.load(rows_ptr + item).to(tl.int64) * table_stride
        best = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
        norm = tl.zeros((BLOCK_G,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
        start = split * length
        stop = tl.minimum(start + length, kv_len)
        for first in range(start, stop, BLOCK_N):
            token = first + tl.arange(0, BLOCK_N)
            inside = token < stop
            page = tl.load(table + token // PAGE, mask=inside, other=0).to(tl.int64)
            place = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * HEAD_DIM
            k = tl.load(
                k_pages_ptr + place[None, :] + dim[:, None],
                mask=inside[None, :] & (dim < HEAD_DIM)[:, None],
                other=0.0,
            )
            v = tl.load(
                v_pages_ptr + place[:, None] + dim[None, :],
                mask=inside[:, None] & (dim < HEAD_DIM)[None, :],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
            scores = tl.where(inside[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            shrink = tl.exp2(best - new_best)
            weights = tl.exp2(scores - new_best[:, None])
            norm = norm * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            best = new_best
        if used == 1:
            out = acc / norm[:, None]
            tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=in_group)
        else:
            pair = item * KV_HEADS + kv_head
            area: tl.constexpr = BLOCK_G * BLOCK_D
            inner = group[:, None] * BLOCK_D + dim[None, :]
            slot = pair * splits + split
            tl.store(partial_ptr + slot * area + inner, acc, mask=in_group)
            tl.store(stats_ptr + slot * (2 * BLOCK_G) + group, best)
            tl.store(stats_ptr + slot * (2 * BLOCK_G) + BLOCK_G + group, norm)
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel")
            if arrived == used - 1:
                tl.store(counter_ptr + pair, 0)
                other = tl.arange(0, MAX_SPLITS)
                stats = stats_ptr + (pair * splits + other)[:, None] * (2 * BLOCK_G)
                stats += group[None, :]
                there = (other < used)[:, None]
                bests = tl.load(stats, mask=there, other=float("-inf"), cache_modifier=".cg")
                norms = tl.load(stats + BLOCK_G, mask=there, other=0.0, cache_modifier=".cg")
                best = tl.max(bests, axis=0)
                norm = tl.sum(norms * tl.exp2(bests - best[None, :]), axis=0)
                acc = tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32)
                # Four parts at a time: their loads do not wait for one another.
                for first in range(0, used, 4):
                    slots = first + tl.arange(0, 4)
                    alive = slots < used
                    slots += pair * splits
                    part_best = tl.load(
                        stats_ptr + slots[:, None] * (2 * BLOCK_G) + group[None, :],
                        mask=alive[:, None],
                        other=float("-inf"),
                        cache_modifier=".cg",
                    )
                    part = tl.load(
                        partial_ptr + slots[:, None, None] * area + inner[None, :, :],
                        mask=alive[:, None, None] & in_group[None, :, :],
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    weights = tl.exp2(part_best - best[None, :])
                    acc += tl.sum(part * weights[:, :, None], axis=0)
                out = acc / norm[:, None]
                tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=in_group)


class DecodeWorkspace:
    """Parts of split rows and their counters, for up to `max_batch` rows of one backend.

    Counters are zero between launches: the program that sees the last arrival puts them back.
    """

    def __init__(
        self, max_batch: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.programs = 3 * _multiprocessors(device)
        self.num_kv_heads = num_kv_heads
        group = max(16, next_power_of_2(num_heads // num_kv_heads))
        pairs = max_batch * num_kv_heads
        # As many parts as any batch up to max_batch may have (see `splits`).
        parts = max(b * num_kv_heads * self.splits(b) for b in range(1, max_batch + 1))
        self.max_batch = max_batch
        self.partials = torch.empty(
            parts * group * next_power_of_2(head_dim), dtype=torch.float32, device=device
        )
        self.stats = torch.empty(parts * group * 2, dtype=torch.float32, device=device)
        self.counters = torch.zeros(pairs, dtype=torch.int32, device=device)

    def splits(self, batch: int) -> int:
        """Programs a row and KV head: enough to fill the device, and `_LEAST_SPLITS`."""
        filling = next_power_of_2(cdiv(self.programs, batch * self.num_kv_heads))
        return min(MAX_SPLITS, max(_LEAST_SPLITS, filling))


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 2  # the interpreter: a few splits, so that tests see the merge
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
    min_split: int | None = None,
    config: DecodeConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from one query a row to all of the row's KV, the query's own included.

    Args:
        q: [B, H, D] contiguous. pages: [2, num_pages, page_size, KV, D] contiguous, q's dtype,
            KV divides H.
        rows: [B] int32, rows of page_table. kv_lens: [B] int32, at least 1.
        page_table: [max_rows, max_pages] int32.
        min_split: tokens below which a row is not split further; by default the fewer programs
            there are anyway, the smaller.
        config: tile and pipeline; any gives the same result up to rounding.
        out: where to write, as the returned tensor; allocated when None.

    Returns:
        [B, H, D], q's dtype. The grid depends on B alone, so a captured graph serves any lengths.

    Raises:
        ValueError: B exceeds the workspace.
    """
    batch, heads, head_dim = q.shape
    page_size, kv_heads = pages.shape[2:4]
    if out is None:
        out = torch.empty_like(q)
    if not batch:
        return out
    if batch > workspace.max_batch:
        raise ValueError(f"batch {batch} exceeds the workspace's {workspace.max_batch}")
    if min_split is None:
        min_split = min(512, max(128, 2 * next_power_of_2(batch * kv_heads)))
    wide = q.dtype == torch.float32
    config = _WIDE_CONFIG if wide else config or DecodeConfig()
    _decode_kernel[(batch, kv_heads, workspace.splits(batch))](
        q,
        pages[0],
        pages[1],
        rows,
        kv_lens,
        page_table,
        out,
        workspace.partials,
        workspace.stats,
        workspace.counters,
        page_table.stride(0),
        scale * LOG2_E,
        min_split,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        BLOCK_G=max(16, next_power_of_2(heads // kv_heads)),
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_N=config.block_n,
        MAX_SPLITS=MAX_SPLITS,
        PRECISION="ieee" if wide else "tf32",
        num_warps=config.warps,
        num_stages=config.stages,
        **pdl(q),
    )
    return out


@jit(varying=("rows_ptr", "qo_indptr_ptr", "kv_lens_ptr"))
def _extend_kernel(
    q_ptr,
    k_pages_ptr,
    v_pages_ptr,
    rows_ptr,
    qo_indptr_ptr,
    kv_lens_ptr,
    page_table_ptr,
    out_ptr,
    table_stride,
    scale_log2,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: BLOCK_M queries of one head of one row."""
    # The last blocks see the most KV: starting with them leaves short ones to fill the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    item = tl.program_id(2)
    start = tl.load(qo_indptr_ptr + item)
    length = tl.load(qo_indptr_ptr + item + 1) - start
    if block * BLOCK_M < length:
        kv_len = tl.load(kv_lens_ptr + item)
        prefix = kv_len - length
        query = block * BLOCK_M + tl.arange(0, BLOCK_M)
        dim = tl.arange(0, BLOCK_D)
        mask = (query < length)[:, None] & (dim < HEAD_DIM)[None, :]
        target = ((start + query).to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + dim[None, :]
        q = tl.load(q_ptr + target, mask=mask, other=0.0)
        table = page_table_ptr + tl.load(rows_ptr + item).to(tl.int64) * table_stride
        kv_head = head // (HEADS // KV_HEADS)
        best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        norm = tl.zeros((BLOCK_M,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        stop = tl.minimum(prefix + (block + 1) * BLOCK_M, kv_len)
        for first in range(0, stop, BLOCK_N):
            token = first + tl.arange(0, BLOCK_N)
            inside = token < stop
            page = tl.load(table + token // PAGE, mask=inside, other=0).to(tl.int64)
            place = ((page * PAGE + token % PAGE) * KV_HEADS + kv_head) * HEAD_DIM
            k = tl.load(
                k_pages_ptr + place[None, :] + dim[:, None],
                mask=inside[None, :] & (dim < HEAD_DIM)[:, None],
                other=0.0,
            )
            v = tl.load(
                v_pages_ptr + place[:, None] + dim[None, :],
                mask=inside[:, None] & (dim < HEAD_DIM)[None, :],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
            visible = token[None, :] <= prefix + query[:, None]
            # Only rows past `length` may lack a visible key, and they are not stored.
            scores = tl.where(visible & inside[None, :], scores, -1.0e30)
            new_best = tl.maximum(best, tl.max(scores, axis=1))
            shrink = tl.exp2(best - new_best)
            weights = tl.exp2(scores - new_best[:, None])
            norm = norm * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            best = new_best
        out = acc / norm[:, None]
        tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=mask)


def extend_attention(
    q: Tensor,
    pages: Tensor,
    rows: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    max_q_len: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of chunks of new tokens over their rows' cached prefix and themselves.

    Args:
        q: [T, H, D] contiguous; tokens of item i are qo_indptr[i] .. qo_indptr[i + 1].
        pages: [2, num_pages, page_size, KV, D] contiguous, q's dtype; holds the new tokens' KV.
        rows: [P] int32. qo_indptr: [P + 1] int32. kv_lens: [P] int32, new tokens included.
        page_table: [max_rows, max_pages] int32.
        max_q_len: at least the longest chunk; known to the host, so nothing synchronises.
        out: where to write, as the returned tensor; allocated when None.

    Returns:
        [T, H, D], q's dtype.
    """
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = pages.shape[2:4]
    if out is None:
        out = torch.empty_like(q)
    if not tokens:
        return out
    wide = q.dtype == torch.float32
    block_m = 32 if wide else 128
    if max_q_len <= 64:
        block_m = 16 if max_q_len <= 16 else min(block_m, 64)
    _extend_kernel[(cdiv(max_q_len, block_m), heads, rows.numel())](
        q,
        pages[0],
        pages[1],
        rows,
        qo_indptr,
        kv_lens,
        page_table,
        out,
        page_table.stride(0),
        scale * LOG2_E,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        BLOCK_M=block_m,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_N=32 if wide else 64,
        PRECISION="ieee" if wide else "tf32",
        num_warps=8 if block_m == 128 else 4,
        num_stages=2 if wide else 3,
    )
    return out

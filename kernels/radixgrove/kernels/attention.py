# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Extend attention over paged KV: a cached prefix and new tokens, causal.

With the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) in base 2.
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


@dataclass(frozen=True, slots=True)
class ExtendConfig:
    """A program's tile, queries x KV tokens, with `stages` of the latter in flight.

    `chunks`: that every program looks at, or more where there are more. A round number, so that the
    kernel is not compiled for each.
    """

    block_m: int = 128
    block_n: int = 64
    stages: int = 3
    warps: int = 8
    chunks: int = 256


_TINY = ExtendConfig(block_m=16, warps=4)
_SHORT = ExtendConfig(block_m=64, warps=4)
_WIDE = ExtendConfig(block_m=32, block_n=32, stages=2, warps=4)  # float32 takes twice the memory
_WIDE_TINY = ExtendConfig(block_m=16, block_n=32, stages=2, warps=4)


def _config_for(max_q_len: int, *, wide: bool) -> ExtendConfig:
    if max_q_len <= 16:
        return _WIDE_TINY if wide else _TINY
    if wide:
        return _WIDE
    return _SHORT if max_q_len <= 64 else ExtendConfig()


def extend_attention_reference(
    q: Tensor,
    pages: Tensor,
    rows: Tensor,
    qo_indptr: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
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
        token = torch.arange(kv_len, device=q.device)[None, :]
        hidden = token > limit[:, None]
        if window:
            hidden |= token <= limit[:, None] - window
        scores = scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            own = sinks.to(wide)[:, None, None].expand(-1, length, 1)
            scores = torch.cat((scores, own), -1)
        weights = scores.softmax(-1)[..., :kv_len]
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out


@jit
def above(best, scores):
    """A whole number that `best` [N] and every score of a row [N, M] are at most.

    Weights are powers of two relative to it. Rounded to 16 bits, they are the same but for a power
    of two whatever blocks the row is read in: so decoding attends as the prefill of a text does.
    """
    return tl.maximum(best, tl.ceil(tl.max(scores, axis=1)))


@jit
def sink_weights(sinks_ptr, head, best):
    """Weights of the heads' sinks, relative to `best` as those of the scores."""
    return tl.exp2(tl.load(sinks_ptr + head) * 1.4426950408889634 - best)


@jit(varying=("rows_ptr", "qo_indptr_ptr", "kv_lens_ptr", "chunks"))
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
    chunks,
    sinks_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_M queries of one head of one chunk.

    Blocks are numbered chunk by chunk, and dealt out from the last one: a chunk's last blocks see
    the most KV, and starting with them leaves short ones to fill the end.
    """
    head = tl.program_id(1)
    chunk = tl.arange(0, BLOCK_C)
    starts = tl.load(qo_indptr_ptr + chunk, mask=chunk < chunks, other=0)
    lengths = tl.load(qo_indptr_ptr + chunk + 1, mask=chunk < chunks, other=0) - starts
    ends = tl.cumsum((lengths + BLOCK_M - 1) // BLOCK_M, axis=0)
    block = tl.max(ends, axis=0) - 1 - tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if block >= 0:
        item = tl.sum((ends <= block).to(tl.int32), axis=0)
        block -= tl.max(tl.where(chunk < item, ends, 0), axis=0)
        start = tl.load(qo_indptr_ptr + item)
        length = tl.load(qo_indptr_ptr + item + 1) - start
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
        begin = 0
        if WINDOW > 0:  # what the first query sees, and nothing before: that may be another row's
            begin = tl.maximum(prefix + block * BLOCK_M + 1 - WINDOW, 0)
        for first in range(begin, stop, BLOCK_N):
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
            visible = token[None, :] <= prefix + query[:, None]
            if WINDOW > 0:
                visible &= token[None, :] > prefix + query[:, None] - WINDOW
            # Rows past `length` may lack a visible key, and are not stored; others may before they
            # come to their window, and what they sum till then has no weight beside it.
            scores = tl.where(visible & inside[None, :], scores, -1.0e30)
            new_best = above(best, scores)
            shrink = tl.exp2(best - new_best)
            weights = tl.exp2(scores - new_best[:, None])
            norm = norm * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weights.to(q.dtype), v, acc, input_precision=PRECISION)
            best = new_best
        if SINKS:
            norm += sink_weights(sinks_ptr, head, best)
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
    window: int = 0,
    sinks: Tensor | None = None,
    config: ExtendConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of chunks of new tokens over their rows' cached prefix and themselves.

    Args:
        q: [T, H, D] contiguous; tokens of chunk i are qo_indptr[i] .. qo_indptr[i + 1].
        pages: [2, num_pages, page_size, KV, D] contiguous, q's dtype or float8 (widened to q's as
            it is read); holds the new tokens' KV.
        rows: [P] int32. qo_indptr: [P + 1] int32, chunks may be empty. kv_lens: [P] int32, new
            tokens included.
        page_table: [max_rows, max_pages] int32; with a window, what is behind that of a chunk's
            first query is not read.
        max_q_len: about the length of the longest chunk, which decides the tile unless `config`
            does (but for float32, which has its own); any gives the same result up to rounding.
        window: tokens that a query attends to, its own included; 0: all.
        sinks: [H] float32, of each head a logit more, without a value; None: there are none.
        out: where to write, as the returned tensor; allocated when None.

    Returns:
        [T, H, D], q's dtype; tokens of no chunk are left as they were. The grid depends on T, P and
        the tile alone, so a captured graph serves any chunks.
    """
    tokens, heads, head_dim = q.shape
    page_size, kv_heads = pages.shape[2:4]
    if out is None:
        out = torch.empty_like(q)
    if not tokens:
        return out
    wide = q.dtype == torch.float32
    if config is None or wide:
        config = _config_for(max_q_len, wide=wide)
    chunks = rows.numel()
    # A chunk ends with a block that may not be full.
    _extend_kernel[(cdiv(tokens, config.block_m) + chunks, heads)](
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
        chunks,
        q if sinks is None else sinks,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        BLOCK_C=max(config.chunks, next_power_of_2(chunks)),
        BLOCK_M=config.block_m,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_N=config.block_n,
        PRECISION="ieee" if wide else "tf32",
        WINDOW=window,
        SINKS=sinks is not None,
        num_warps=config.warps,
        num_stages=config.stages,
        **pdl(q),
    )
    return out

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""From the fused QKV projection to attention's inputs in one kernel: q/k RMSNorm (Qwen3), rotary
position embedding (Su et al. 2021, the half-split layout) and the store of K and V into pages; or
the same as the beginning of decode attention.
"""

from __future__ import annotations

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
from radixgrove.kernels.float8 import bits, stored, to_page
from radixgrove.kernels.norm import rms_norm_reference


def rotate_reference(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate [T, heads, D] by the angles of `positions`, in float32; x's dtype."""
    cos, sin = cos_sin[positions].float().unsqueeze(1).chunk(2, dim=-1)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def rope_store_reference(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """See `rope_store`."""
    kv_heads, head_dim = pages.shape[3:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=1)
    keys = k
    if q_norm is not None and k_norm is not None:
        q, keys = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    keys = rotate_reference(keys, cos_sin, positions)
    kept = to_page(torch.stack((keys, v)), pages.dtype)
    bits(pages).view(2, -1, kv_heads, head_dim).index_copy_(1, slots, bits(kept))
    if pages.dtype == qkv.dtype:
        k.copy_(keys)
    return rotate_reference(q, cos_sin, positions)


@jit
def _normalized(x, scale, weight):
    """x times its scale and the norm's weight, rounded as a separate RMSNorm leaves it."""
    return (x.to(tl.float32) * scale[:, None] * weight.to(tl.float32)[None, :]).to(x.dtype)


@jit
def _turn(low, high, norm_ptr, eps, cos, sin, HALF: tl.constexpr, NORM: tl.constexpr):
    """Halves of heads [N, >= HALF], zero past HALF: normalised, rotated, in their own type."""
    low_wide = low.to(tl.float32)
    high_wide = high.to(tl.float32)
    if NORM:
        lane = tl.arange(0, low.shape[1])
        low_weight = tl.load(norm_ptr + lane, mask=lane < HALF, other=0.0)
        high_weight = tl.load(norm_ptr + HALF + lane, mask=lane < HALF, other=0.0)
        square = tl.sum(low_wide * low_wide + high_wide * high_wide, axis=1) / (2 * HALF)
        scale = 1.0 / tl.sqrt(square + eps)
        low_wide = _normalized(low, scale, low_weight).to(tl.float32)
        high_wide = _normalized(high, scale, high_weight).to(tl.float32)
    new_low = low_wide * cos - high_wide * sin
    new_high = high_wide * cos + low_wide * sin
    return new_low.to(low.dtype), new_high.to(low.dtype)


@jit(varying=("tokens", "positions_ptr", "slots_ptr"))
def _rope_store_kernel(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    k_pages_ptr,
    v_pages_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_out_ptr,
    tokens,
    qkv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one head (query, key or value) of BLOCK_T tokens."""
    head = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    lane = tl.arange(0, BLOCK_HALF)
    alive = token < tokens
    mask = alive[:, None] & (lane < HALF)[None, :]
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = qkv_ptr + token[:, None] * qkv_stride + head * (2 * HALF) + lane[None, :]
    low = tl.load(source, mask=mask, other=0.0)
    high = tl.load(source + HALF, mask=mask, other=0.0)
    is_query = head < HEADS
    if head < HEADS + KV_HEADS:
        norm_ptr = q_norm_ptr if is_query else k_norm_ptr
        position = tl.load(positions_ptr + token, mask=alive, other=0)
        angles = cos_sin_ptr + position[:, None] * (2 * HALF) + lane[None, :]
        cos = tl.load(angles, mask=mask, other=0.0)
        sin = tl.load(angles + HALF, mask=mask, other=0.0)
        low, high = _turn(low, high, norm_ptr, eps, cos, sin, HALF, NORM)
    if is_query:
        query = q_out_ptr + (token[:, None] * HEADS + head) * (2 * HALF) + lane[None, :]
        tl.store(query, low, mask=mask)
        tl.store(query + HALF, high, mask=mask)
    else:
        slot = tl.load(slots_ptr + token, mask=alive, other=0)
        is_key = head < HEADS + KV_HEADS
        base = k_pages_ptr if is_key else v_pages_ptr
        kept_low = stored(low, base)
        kept_high = stored(high, base)
        if kept_low.dtype == low.dtype and is_key:
            tl.store(source, low, mask=mask)
            tl.store(source + HALF, high, mask=mask)
        kv_head = (head - HEADS) % KV_HEADS
        place = base + (slot[:, None] * KV_HEADS + kv_head) * (2 * HALF) + lane[None, :]
        tl.store(place, kept_low, mask=mask)
        tl.store(place + HALF, kept_high, mask=mask)


def rope_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Normalise (optionally) and rotate q and k, store k and v into the layer's pages, return q.

    Args:
        qkv: [T, (H + 2 KV) * D], heads of q, then k, then v; rows may be strided. Afterwards its
            keys and values are as stored, unless pages are float8, for attention that need not go
            through the pages.
        cos_sin: [max_position, D] float32: D/2 cosines, then D/2 sines.
        positions: [T] int64. slots: [T] int64, `page * page_size + offset`, distinct except for
            the scratch page, which holds nothing defined.
        pages: [2, num_pages, page_size, KV, D] contiguous, qkv's dtype or float8: one layer of
            the pool.
        q_norm, k_norm: [D] each, both or none.

    Returns:
        q, [T, H, D] contiguous, qkv's dtype.
    """
    tokens = qkv.shape[0]
    kv_heads, head_dim = pages.shape[3:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        block_t = 1 if tokens <= 4 else 4 if tokens <= 128 else 16
        _rope_store_kernel[(cdiv(tokens, block_t), heads + 2 * kv_heads)](
            qkv,
            cos_sin,
            positions,
            slots,
            pages[0],
            pages[1],
            q_norm if q_norm is not None else qkv,
            k_norm if k_norm is not None else qkv,
            q,
            tokens,
            qkv.stride(0),
            eps,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            NORM=q_norm is not None,
            BLOCK_T=block_t,
            BLOCK_HALF=next_power_of_2(head_dim // 2),
            num_warps=4 if block_t == 16 else 1,
            **pdl(qkv),
        )
    return q


@jit
def decode_queries(
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
    has_newest,
    eps,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RAW: tl.constexpr,
    NORM: tl.constexpr,
):
    """The queries of a pair (row, KV head), [BLOCK_G, BLOCK_D], for the program that attends.

    From a raw projection they still have to be normalised and rotated, and the program that attends
    to the pair's newest token stores that token's K and V: it then finds them in their page.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    group = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    mask = (group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    source = source_ptr + row.to(tl.int64) * source_stride
    heads = source + (kv_head * GROUP + group)[:, None] * HEAD_DIM
    q = tl.load(heads + dim[None, :], mask=mask, other=0.0)
    if RAW:
        # The other half is loaded again: to exchange halves between threads costs more. Whatever
        # is needed is asked for at once, before anything waits.
        other_dim = tl.where(dim < HALF, dim + HALF, dim - HALF)
        other = tl.load(heads + other_dim[None, :], mask=mask, other=0.0)
        angles = cos_sin_ptr + (kv_len - 1).to(tl.int64) * HEAD_DIM
        angle = tl.where(dim < HALF, dim, dim - HALF)
        q_cos = tl.load(angles + angle, mask=dim < HEAD_DIM, other=0.0)
        q_sin = tl.load(angles + HALF + angle, mask=dim < HEAD_DIM, other=0.0)
        if NORM:
            weight = tl.load(q_norm_ptr + dim, mask=dim < HEAD_DIM, other=0.0)
            other_weight = tl.load(q_norm_ptr + other_dim, mask=dim < HEAD_DIM, other=0.0)
        if has_newest:
            page = tl.load(table + (kv_len - 1) // PAGE).to(tl.int64)
            place = (page * PAGE + (kv_len - 1) % PAGE) * KV_HEADS + kv_head
            newest = source + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
            lane = tl.arange(0, BLOCK_D // 2)[None, :]
            inside = lane < HALF
            low = tl.load(newest + lane, mask=inside, other=0.0)
            high = tl.load(newest + HALF + lane, mask=inside, other=0.0)
            value = tl.load(newest + KV_HEADS * HEAD_DIM + dim, mask=dim < HEAD_DIM)
            cos = tl.load(angles + lane, mask=inside, other=0.0)
            sin = tl.load(angles + HALF + lane, mask=inside, other=0.0)
            low, high = _turn(low, high, k_norm_ptr, eps, cos, sin, HALF, NORM)
            low, high = stored(low, k_pages_ptr), stored(high, k_pages_ptr)
            tl.store(k_pages_ptr + place * HEAD_DIM + lane, low, mask=inside)
            tl.store(k_pages_ptr + place * HEAD_DIM + HALF + lane, high, mask=inside)
            value = stored(value, v_pages_ptr)
            tl.store(v_pages_ptr + place * HEAD_DIM + dim, value, mask=dim < HEAD_DIM)
        dtype = q.dtype
        if NORM:
            wide = q.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)
            q = _normalized(q, scale, weight)
            other = _normalized(other, scale, other_weight)
        q_sin = tl.where(dim < HALF, -q_sin, q_sin)
        q = (q.to(tl.float32) * q_cos[None, :] + other.to(tl.float32) * q_sin[None, :]).to(dtype)
        # What some threads of the block have stored, others read behind this.
        tl.debug_barrier()
    return q

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

from radixgrove.kernels._triton import next_power_of_2, pdl
from radixgrove.kernels.attention import LOG2_E, extend_attention_reference
from radixgrove.kernels.decode_kernels import decode_kernel, shared_decode_kernel
from radixgrove.kernels.prefix_kernel import prefix_kernel
from radixgrove.kernels.rope import rope_store_reference
from radixgrove.kernels.weight import QuantizedRows

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
# well enough, and the programs of one KV head run at the same time: rows with a prefix in common
# then find it in the L2 cache.
_WHOLE_PAIRS = 3
_WIDE = DecodeConfig(block_n=32, stages=2, warps=4)  # float32 takes twice the shared memory
_TILE_QUERIES = 64  # of rows with a prefix in common that one program multiplies at once


def decode_attention_reference(
    q: Tensor,
    pages: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `decode_attention`."""
    indptr = torch.arange(len(rows) + 1)
    return extend_attention_reference(
        q, pages, rows, indptr, kv_lens, page_table, scale, window, sinks
    )


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
        tiles: [T, `tile_rows`] int32, indices of rows of the batch with the same first pages;
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
    window: int = 0,
    sinks: Tensor | None = None,
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
            not with `tokens` or a window. The result is the same up to rounding.
        window: the last tokens of a row that are attended to; 0: all.
        sinks: [H] float32, of each head a logit more, without a value; None: there are none.
        config: tile, pipeline and programs, by default what suits B; any gives the same result up
            to rounding.
        out: where to write, as the returned tensor; allocated when None.

    Returns:
        As q. The grid depends on the config alone, so a captured graph serves any
        lengths.

    Raises:
        ValueError: B exceeds the workspace, or there are `prefixes` and `tokens` or a window.
    """
    if tokens is not None and prefixes is not None:
        raise ValueError("rows with prefixes in common have their queries in the batch's order")
    if window and prefixes is not None:
        raise ValueError("prefixes in common are attended to as a whole, without a window")
    if out is None:
        out = torch.empty_like(q)
    if prefixes is not None and len(q):
        _attend_prefixes(q, pages, rows, page_table, scale, prefixes, workspace.prefixes)
    inputs = _Inputs(
        q, q.stride(0), q, q, q, eps=0.0, raw=False, norm=False, tokens=tokens, prefixes=prefixes
    )
    where = pages, rows, kv_lens, page_table
    _launch(inputs, *where, scale, window, sinks, workspace, config, out)
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
    prefix_kernel[(_multiprocessors(q.device) * _TILES.programs,)](
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
    window: int = 0,
    sinks: Tensor | None = None,
    config: DecodeConfig | None = None,
    quantized: QuantizedRows | None = None,
) -> Tensor:
    """`rope.rope_store` of each row's last token, then `decode_attention`, in one kernel.

    Args:
        qkv: [B, (H + 2 KV) * D], heads of q, then k, then v; rows may be strided. Only read.
        cos_sin: [max_position, D] float32: D/2 cosines, then D/2 sines; row b's token has the
            position `kv_lens[b] - 1`, and the place in the pages that the table gives it. Rows may
            share the page of that place only where it is never read (padding, the scratch page).
        q_norm, k_norm: [D] each, both or none.
        quantized: [B, H * D], where to write the result instead, with a scale for each head.

    The other arguments, the result and what is raised are those of `decode_attention`.
    """
    kv_heads, head_dim = pages.shape[3:]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if quantized is None:
        out = torch.empty((len(qkv), heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    else:
        out = quantized.values.view(-1, heads, head_dim)
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
    scales = None if quantized is None else quantized.scales
    where = pages, rows, kv_lens, page_table
    _launch(inputs, *where, scale, window, sinks, workspace, config, out, scales)
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
    window: int,
    sinks: Tensor | None,
    workspace: DecodeWorkspace,
    config: DecodeConfig | None,
    out: Tensor,
    out_scales: Tensor | None = None,
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
    wide = inputs.source.dtype == torch.float32
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
        "WINDOW": window,
        "SINKS": sinks is not None,
        "QUANTIZES": out_scales is not None,
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
        out if out_scales is None else out_scales,
        tokens,
        prefixes.row_lens if prefixes is not None else rows,
        workspace.prefixes.state,
        workspace.prefixes.state_stats,
        page_table.stride(0),
        scale * LOG2_E,
        inputs.eps,
        workspace.prefixes.state_heads,
        inputs.source if sinks is None else sinks,
    )
    if whole:
        decode_kernel[(batch, kv_heads)](*arguments, **geometry)
        return
    shared_decode_kernel[(workspace.multiprocessors * config.programs,)](
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

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Pages between layouts, and the flat page lists that attention libraries want.

Device pool, of one group of layers: layer first, `[layers, 2, pool pages, page_size, KV, D]`. Host
tier: page first, `[host pages, layers, 2, page_size, KV, D]`; a host page is one piece for copies,
which may have several groups side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels._triton import cdiv, jit, next_power_of_2, tl
from radixgrove.kernels.float8 import bits

_BLOCK_BYTES = 4096  # 16 a thread
# Over the bus: as much under way at once as its latency wants.
_BUS_BYTES = 16384
_BUS_PROGRAMS = 32


def gather_pages_reference(pool: Tensor, page_ids: Tensor, out: Tensor) -> None:
    """See `gather_pages`."""
    out.copy_(pool.index_select(2, page_ids.long()).movedim(2, 0))


def scatter_pages_reference(pool: Tensor, page_ids: Tensor, source: Tensor) -> None:
    """See `scatter_pages`."""
    moved = source.movedim(0, 2).to(pool.device)
    bits(pool).index_copy_(2, page_ids.long(), bits(moved))


def kv_indices_reference(
    rows: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    page_size: int,
    indptr: Tensor,
    out: Tensor,
    last_page_len: Tensor,
) -> None:
    """See `kv_indices`."""
    last_page_len.copy_((kv_lens - 1) % page_size + 1)
    counts = (kv_lens.long() + page_size - 1) // page_size
    indptr[0] = 0
    torch.cumsum(counts, 0, out=indptr[1:])
    if rows.numel():
        columns = torch.arange(page_table.shape[1], device=rows.device)
        wanted = columns[None, :] < counts[:, None]
        flat = page_table[rows.long()][wanted]
        out[: flat.numel()] = flat


@jit(varying=("page_ids_ptr", "packed_ids_ptr", "blocks", "first_plane"))
def _copy_pages_kernel(
    pool_ptr,
    page_ids_ptr,
    packed_ptr,
    packed_ids_ptr,
    blocks,
    first_plane,
    planes,
    packed_stride,
    pool_pages,
    page_elements,
    GATHER: tl.constexpr,
    PICK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program takes every so many blocks: BLOCK elements of one plane (layer, K or V) of one
    page. PICK: packed pages have ids too; else they are in order."""
    parts = tl.cdiv(page_elements, BLOCK)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        element = block % parts * BLOCK + tl.arange(0, BLOCK)
        mask = element < page_elements
        plane = (first_plane + block // parts % planes).to(tl.int64)
        index = block // (parts * planes)
        page = tl.load(page_ids_ptr + index).to(tl.int64)
        packed = tl.load(packed_ids_ptr + index).to(tl.int64) if PICK else index.to(tl.int64)
        in_pool = pool_ptr + (plane * pool_pages + page) * page_elements + element
        in_pack = packed_ptr + packed * packed_stride + plane * page_elements + element
        if GATHER:
            tl.store(in_pack, tl.load(in_pool, mask=mask), mask=mask)
        else:
            tl.store(in_pool, tl.load(in_pack, mask=mask), mask=mask)


def gather_pages(pool: Tensor, page_ids: Tensor, out: Tensor) -> None:
    """Copy pages of the device pool into page-first layout.

    Args:
        pool: [layers, 2, pool pages, page_size, KV, D] contiguous.
        page_ids: [n] int32 or int64 on the pool's device.
        out: [n, layers, 2, page_size, KV, D], pool's dtype, each page contiguous; on the device or
            pinned.
    """
    _copy(pool, page_ids, out, gather=True)


def scatter_pages(pool: Tensor, page_ids: Tensor, source: Tensor) -> None:
    """The inverse of `gather_pages`: write page-first pages into the pool; ids are distinct."""
    _copy(pool, page_ids, source, gather=False)


def scatter_layer(
    pool: Tensor, layer: int, page_ids: Tensor, host: Tensor, host_ids: Tensor
) -> None:
    """Write one layer of some pages of the host tier into the pool, by few programs: more would
    not have it sooner, and take the processors from the kernels beside it.

    Args:
        pool: as of `gather_pages`.
        page_ids, host_ids: [n] int64 on the pool's device; page_ids are distinct.
        host: [host pages, layers, 2, page_size, KV, D], pool's dtype, each page contiguous; pinned,
            or on the device.
    """
    sides = pool.shape[1]
    planes = range(layer * sides, (layer + 1) * sides)
    _copy(pool, page_ids, host, gather=False, packed_ids=host_ids, planes=planes)


def _copy(
    pool: Tensor,
    page_ids: Tensor,
    packed: Tensor,
    *,
    gather: bool,
    packed_ids: Tensor | None = None,
    planes: range | None = None,
) -> None:
    layers, sides, pool_pages = pool.shape[:3]
    page_elements = pool[0, 0, 0].numel()
    if not page_ids.numel():
        return
    over_bus = packed_ids is not None
    planes = range(layers * sides) if planes is None else planes
    block = (_BUS_BYTES if over_bus else _BLOCK_BYTES) // pool.element_size()
    blocks = page_ids.numel() * len(planes) * cdiv(page_elements, block)
    _copy_pages_kernel[(min(blocks, _BUS_PROGRAMS) if over_bus else blocks,)](
        bits(pool),
        page_ids,
        bits(packed),
        page_ids if packed_ids is None else packed_ids,
        blocks,
        planes.start,
        len(planes),
        packed.stride(0),
        pool_pages,
        page_elements,
        GATHER=gather,
        PICK=over_bus,
        BLOCK=block,
        num_warps=8,
    )


@jit(
    varying=(
        "rows_ptr",
        "kv_lens_ptr",
        "indptr_ptr",
        "out_ptr",
        "last_page_len_ptr",
        "batch",
    )
)
def _kv_indices_kernel(
    rows_ptr,
    kv_lens_ptr,
    page_table_ptr,
    indptr_ptr,
    out_ptr,
    last_page_len_ptr,
    batch,
    table_stride,
    page_size,
    BLOCK_BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row; each sums the counts before it, which is cheaper than a second launch."""
    row = tl.program_id(0)
    others = tl.arange(0, BLOCK_BATCH)
    lens = tl.load(kv_lens_ptr + others, mask=others < batch, other=0)
    counts = (lens + page_size - 1) // page_size
    start = tl.sum(tl.where(others < row, counts, 0), axis=0)
    count = tl.sum(tl.where(others == row, counts, 0), axis=0)
    tl.store(indptr_ptr + row + 1, start + count)
    tl.store(last_page_len_ptr + row, (tl.load(kv_lens_ptr + row) - 1) % page_size + 1)
    if row == 0:
        tl.store(indptr_ptr, 0)
    table_row = tl.load(rows_ptr + row).to(tl.int64)
    for first in range(0, count, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = column < count
        page = tl.load(page_table_ptr + table_row * table_stride + column, mask=mask)
        tl.store(out_ptr + start + column, page, mask=mask)


def kv_indices(
    rows: Tensor,
    kv_lens: Tensor,
    page_table: Tensor,
    page_size: int,
    indptr: Tensor,
    out: Tensor,
    last_page_len: Tensor,
) -> None:
    """Flatten the page tables of a batch on the device, as FlashInfer's wrappers want them, without
    a host round trip.

    Args:
        rows, kv_lens: [B] int32, lengths at least 1. page_table: [max_rows, max_pages] int32.
        indptr: [B + 1] int32, written whole: offsets of each row's pages.
        out: int32, at least the sum of `ceil(kv_len / page_size)`; the rest is left as it was.
        last_page_len: [B] int32, written: tokens in each row's last page.
    """
    batch = rows.numel()
    if not batch:
        indptr.zero_()
        return
    _kv_indices_kernel[(batch,)](
        rows,
        kv_lens,
        page_table,
        indptr,
        out,
        last_page_len,
        batch,
        page_table.stride(0),
        page_size,
        BLOCK_BATCH=max(512, next_power_of_2(batch)),
        BLOCK=256,
        num_warps=4,
    )

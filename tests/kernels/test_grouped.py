"""Groups of layers with heads, dtypes and windows of their own attend side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from radixgrove.kernels.float8 import FLOAT8
from radixgrove.worker.attention.base import AttentionBatch, GroupBackend, PaddedBatch
from radixgrove.worker.attention.decode import FUSED_ROWS
from radixgrove.worker.attention.grouped import GroupedAttention
from radixgrove.worker.attention.kv_pool import KvGroup, KvPool, KvShape
from radixgrove.worker.attention.torch import TorchAttention
from radixgrove.worker.attention.triton import TritonAttention
from tests.kernels.helpers import PagedKv, assert_close

pytest.importorskip("triton")

HEADS, PAGE, SCALE = 4, 4, 0.3
LENGTHS, CHUNKS = [3, 17, 30, 9], [3, 10]  # two prompts, one of them behind 7 tokens; two decodes
SHAPE = KvShape(
    (
        KvGroup(layers=(1,), kv_heads=2, head_dim=16, dtype=torch.bfloat16),
        KvGroup(layers=(0, 2), kv_heads=1, head_dim=32, dtype=FLOAT8, window=6),
    ),
    page_size=PAGE,
)


def backends(kind: type[GroupBackend], pool: KvPool) -> list[GroupBackend]:
    return [
        kind(
            tensor,
            num_heads=HEADS,
            num_kv_heads=group.kv_heads,
            head_dim=group.head_dim,
            scale=SCALE,
            dtype=torch.bfloat16,
            window=group.window,
        )
        for group, tensor in zip(pool.shape.groups, pool.tensors, strict=True)
    ]


def filled_pool(device: torch.device) -> tuple[KvPool, PagedKv]:
    """Rows of these lengths; all groups share their table of pages."""
    rows = PagedKv.random(
        LENGTHS, page_size=PAGE, kv_heads=1, head_dim=2, dtype=torch.float32, device=device
    )
    pool = SHAPE.allocate(rows.pages.shape[1] - 1, device)
    for tensor in pool.tensors:
        tensor.copy_(torch.randn(tensor.shape))
    return pool, rows


def mixed_batch(rows: PagedKv) -> AttentionBatch:
    """Chunks and decodes; what is attended to is in the pages already."""
    q_lens = [*CHUNKS, 1, 1]
    device = rows.pages.device
    lens = zip(LENGTHS, q_lens, strict=True)
    positions = torch.cat([torch.arange(n - q, n) for n, q in lens]).to(device)
    owner = rows.rows.long().repeat_interleave(torch.tensor(q_lens, device=device))
    pages = rows.page_table[owner, positions // PAGE].long()
    return AttentionBatch(
        num_prefills=len(CHUNKS),
        num_decodes=2,
        num_prefill_tokens=sum(CHUNKS),
        rows=rows.rows,
        qo_indptr=torch.tensor([0, *q_lens]).cumsum(0).int().to(device),
        kv_lens=rows.kv_lens,
        page_table=rows.page_table.clamp(min=0),
        slots=pages * PAGE + positions % PAGE,
        positions=positions,
        q_lens_host=CHUNKS,
        kv_lens_host=LENGTHS,
    )


def exact(q: Tensor, pages: Tensor, rows: PagedKv, q_lens: list[int], window: int) -> Tensor:
    """Softmax over each query's own window, one by one."""
    out, first = [], 0
    kv_heads, head_dim = pages.shape[3:]
    for row, kv_len, count in zip(rows.rows.tolist(), LENGTHS, q_lens, strict=True):
        own = rows.page_table[row, : -(-kv_len // PAGE)].long()
        k, v = pages.float()[:, own].flatten(1, 2).double()
        for index in range(count):
            end = kv_len - count + index + 1
            seen = slice(max(0, end - window) if window else 0, end)
            query = q[first + index].double().view(kv_heads, -1, head_dim)
            scores = torch.einsum("kgd,nkd->kgn", query, k[seen]) * SCALE
            out.append(torch.einsum("kgn,nkd->kgd", scores.softmax(-1), v[seen]).flatten(0, 1))
        first += count
    return torch.stack(out)


@pytest.mark.parametrize("kind", [TorchAttention, TritonAttention])
def test_a_layer_attends_as_its_group_does(kind: type[GroupBackend], device: torch.device) -> None:
    pool, rows = filled_pool(device)
    attention = GroupedAttention(pool, backends(kind, pool))
    attention.plan(mixed_batch(rows))
    for layer, window in enumerate((6, 0, 6)):
        pages = attention.pages[layer]
        assert pages.data_ptr() == pool.pages[layer].data_ptr()
        q = torch.randn(sum(CHUNKS) + 2, HEADS, pages.shape[4], device=device).bfloat16()
        expected = exact(q, pages, rows, [*CHUNKS, 1, 1], window)
        assert_close(attention.attend(layer, q, q), expected)


def within_windows(pool: KvPool, rows: PagedKv, spare: int) -> tuple[KvPool, AttentionBatch]:
    """The same in a pool with a page for each that some query's window reaches, in another order;
    the table's other entries name a page of NaN, as a row's may be that computed it."""
    batch = mixed_batch(rows)
    q_lens = [*CHUNKS, 1, 1]
    narrow = SHAPE.allocate(pool.num_pages, pool.device, spare + 1)
    narrow.tensors[0].copy_(pool.tensors[0])
    table = torch.full_like(batch.page_table, spare)
    for row, kv_len, count in zip(rows.rows.tolist(), LENGTHS, q_lens, strict=True):
        for index in range(max(0, kv_len - count + 1 - 6) // PAGE, -(-kv_len // PAGE)):
            spare -= 1
            table[row, index] = spare
            narrow.tensors[1][:, :, spare].copy_(pool.tensors[1][:, :, rows.page_table[row, index]])
    assert spare >= 0
    narrow.tensors[1][:, :, table.max()] = float("nan")
    owner = rows.rows.long().repeat_interleave(torch.tensor(q_lens, device=pool.device))
    pages = table[owner, batch.positions // PAGE].long()
    slots = pages * PAGE + batch.positions % PAGE
    return narrow, replace(batch, window_table=table, window_slots=slots)


@pytest.mark.parametrize("kind", [TorchAttention, TritonAttention])
@pytest.mark.parametrize("way", ["eager", "captured", "padded"])
def test_layers_with_a_window_attend_to_pages_of_their_own(
    kind: type[GroupBackend], way: str, device: torch.device
) -> None:
    pool, rows = filled_pool(device)
    narrow, batch = within_windows(pool, rows, spare=11)
    first, q_lens = 0, [*CHUNKS, 1, 1]
    attention = GroupedAttention(narrow, backends(kind, narrow))
    attention.prepare_capture(max_batch=128, max_pages=8)
    if way == "captured":
        first = sum(CHUNKS)
        decodes = replace(
            batch,
            num_prefills=0,
            num_prefill_tokens=0,
            rows=batch.rows[2:],
            qo_indptr=batch.qo_indptr[2:] - first,
            kv_lens=batch.kv_lens[2:],
            q_lens_host=[],
            kv_lens_host=LENGTHS[2:],
        )
        attention.plan_captured(decodes, 2)
    elif way == "padded":
        attention.plan_padded(padded(batch), batch)
    else:
        attention.plan(batch)
    for layer, window in enumerate((6, 0, 6)):
        pages = attention.pages[layer]
        q = torch.randn(sum(q_lens), HEADS, pages.shape[4], device=device).bfloat16()
        expected = exact(q, pool.pages[layer], rows, q_lens, window)
        assert_close(attention.attend(layer, q[first:], q[first:]), expected[first:])


def padded(batch: AttentionBatch) -> PaddedBatch:
    """The step in static buffers, with room for more."""
    chunks = batch.num_prefills

    def longer(values: Tensor, length: int, fill: int = 0) -> Tensor:
        out = torch.full((length,), fill, dtype=torch.int32, device=values.device)
        out[: len(values)].copy_(values)
        return out

    return PaddedBatch(
        chunk_rows=longer(batch.rows[:chunks], 4),
        chunk_indptr=longer(batch.qo_indptr[: chunks + 1], 5, batch.num_prefill_tokens),
        chunk_kv_lens=longer(batch.kv_lens[:chunks], 4),
        decode_rows=longer(batch.rows[chunks:], 6),
        decode_kv_lens=longer(batch.kv_lens[chunks:], 6),
        decode_tokens=longer(batch.qo_indptr[chunks:-1], 6),
        page_table=batch.page_table,
        window_table=batch.window_table,
    )


def test_every_group_plans_and_captures_a_step(device: torch.device) -> None:
    pool, rows = filled_pool(device)
    attention = GroupedAttention(pool, backends(TritonAttention, pool))
    attention.prepare_capture(max_batch=128, max_pages=8)
    decodes = replace(
        mixed_batch(rows), num_prefills=0, num_prefill_tokens=0, num_decodes=4, q_lens_host=[]
    )
    plans: list[tuple[Callable[[], None], bool]] = [
        (lambda: attention.plan(decodes), True),
        (lambda: attention.plan(mixed_batch(rows)), False),
        (lambda: attention.plan_captured(decodes, FUSED_ROWS), True),
        (lambda: attention.plan_captured(decodes, FUSED_ROWS + 1), False),
    ]
    for plan, takes_qkv in plans:
        plan()
        assert attention.takes_qkv is takes_qkv


def test_prefixes_are_read_together_in_the_tiles_of_groups_without_a_window(
    device: torch.device,
) -> None:
    pool, _ = filled_pool(device)
    full, windowed = backends(TritonAttention, pool)
    assert full.prefix_tile_rows != windowed.prefix_tile_rows
    assert GroupedAttention(pool, [full, windowed]).prefix_tile_rows == full.prefix_tile_rows
    windowed.window = 0
    assert GroupedAttention(pool, [full, windowed]).prefix_tile_rows == 1

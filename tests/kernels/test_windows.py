"""Attention of layers that see a row's last tokens alone, against all of attention masked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from radixgrove.kernels import attention, decode
from radixgrove.kernels.decode import DecodeConfig, DecodeWorkspace
from tests.kernels.helpers import PagedKv, assert_close, projected

pytest.importorskip("triton")

HEADS, KV_HEADS, HEAD_DIM, PAGE, SCALE = 4, 2, 32, 16, 0.3
LENGTHS = [1, 16, 20, 65, 130]
WINDOWS = pytest.mark.parametrize("window", [1, 16, 20, 64, 500])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["wide", "narrow"])


def paged(lengths: list[int], dtype: torch.dtype, device: torch.device) -> PagedKv:
    return PagedKv.random(
        lengths,
        page_size=PAGE,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=device,
    )


def exact(q: Tensor, kv: PagedKv, indptr: Tensor, window: int) -> Tensor:
    """Softmax over a query's own window, row by row, apart from the code under test."""
    rows = []
    for item, (row, kv_len) in enumerate(zip(kv.rows.tolist(), kv.kv_lens.tolist(), strict=True)):
        own = kv.page_table[row, : -(-kv_len // PAGE)].long()
        k, v = kv.pages[:, own].flatten(1, 2)[:, :kv_len].double()
        first, stop = int(indptr[item]), int(indptr[item + 1])
        for index, query in enumerate(q[first:stop].double()):
            end = kv_len - (stop - first) + index + 1
            begin = max(0, end - window)
            heads = query.view(KV_HEADS, -1, HEAD_DIM)
            scores = torch.einsum("kgd,nkd->kgn", heads, k[begin:end]) * SCALE
            rows.append(
                torch.einsum("kgn,nkd->kgd", scores.softmax(-1), v[begin:end]).flatten(0, 1)
            )
    return torch.stack(rows)


@pytest.mark.covering(2)
@WINDOWS
@DTYPES
def test_decode(window: int, dtype: torch.dtype, device: torch.device) -> None:
    kv = paged(LENGTHS, dtype, device)
    q = torch.randn(len(LENGTHS), HEADS, HEAD_DIM, device=device).to(dtype)
    workspace = DecodeWorkspace(len(LENGTHS), HEADS, KV_HEADS, HEAD_DIM, device)
    workspace.stats.fill_(float("nan"))
    expected = exact(q, kv, torch.arange(len(LENGTHS) + 1), window)
    arguments = q, kv.pages, kv.rows, kv.kv_lens, kv.page_table, SCALE
    for config in (None, DecodeConfig(block_n=16, stages=2, warps=1, programs=2, least=1)):
        out = decode.decode_attention(*arguments, workspace, window=window, config=config)
        assert_close(out, expected)
        assert not workspace.counters.any(), "counters must be zero between launches"
    assert_close(decode.decode_attention_reference(*arguments, window), expected)


def test_decode_gives_each_of_many_rows_a_program(device: torch.device) -> None:
    lengths = [1 + 7 * index % 60 for index in range(3 * 4 * decode._multiprocessors(device))]
    kv = paged(lengths, torch.bfloat16, device)
    q = torch.randn(len(lengths), HEADS, HEAD_DIM, device=device).bfloat16()
    workspace = DecodeWorkspace(len(lengths), HEADS, KV_HEADS, HEAD_DIM, device)
    out = decode.decode_attention(
        q, kv.pages, kv.rows, kv.kv_lens, kv.page_table, SCALE, workspace, window=24
    )
    assert_close(out, exact(q, kv, torch.arange(len(lengths) + 1), 24))


@WINDOWS
def test_decode_from_a_projection(window: int, device: torch.device) -> None:
    kv = paged(LENGTHS, torch.float32, device)
    qkv, cos_sin, q, stored = projected(kv, HEADS)
    out = decode.rope_decode_attention(
        qkv,
        cos_sin,
        kv.pages,
        kv.rows,
        kv.kv_lens,
        kv.page_table,
        SCALE,
        DecodeWorkspace(len(LENGTHS), HEADS, KV_HEADS, HEAD_DIM, device),
        window=window,
    )
    kv.pages = stored
    assert_close(out, exact(q, kv, torch.arange(len(LENGTHS) + 1), window), 1e-5)


@pytest.mark.covering(2)
@WINDOWS
@DTYPES
@pytest.mark.parametrize("news", [[1, 16, 3, 65, 70], [1, 1, 20, 5, 130]], ids=["long", "mixed"])
def test_extend(window: int, news: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """Chunks that begin their rows, and chunks behind what is in the pages already."""
    kv = paged(LENGTHS, dtype, device)
    q = torch.randn(sum(news), HEADS, HEAD_DIM, device=device).to(dtype)
    indptr = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], device=device).int()
    arguments = q, kv.pages, kv.rows, indptr, kv.kv_lens, kv.page_table, SCALE
    expected = exact(q, kv, indptr, window)
    for longest in (16, 130):
        out = attention.extend_attention(*arguments, longest, window=window)
        assert_close(out, expected)
    assert_close(attention.extend_attention_reference(*arguments, window), expected)


def forget(kv: PagedKv, queries: list[int], window: int) -> None:
    """Let pages that no query of a row sees be NaN, as another row's may be."""
    items = zip(kv.rows.tolist(), kv.kv_lens.tolist(), queries, strict=True)
    for row, kv_len, count in items:
        behind = max(0, kv_len - count + 1 - window) // PAGE
        kv.pages[:, kv.page_table[row, :behind].long()] = float("nan")


@pytest.mark.parametrize("window", [1, 20, 64])
@DTYPES
def test_nothing_is_read_behind_a_window(
    window: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A weight of 0 would not hide NaN."""
    news = [1, 16, 3, 33, 70]
    kv = paged(LENGTHS, dtype, device)
    q = torch.randn(sum(news), HEADS, HEAD_DIM, device=device).to(dtype)
    indptr = torch.tensor([0, *torch.tensor(news).cumsum(0).tolist()], device=device).int()
    expected = exact(q, kv, indptr, window)
    last = indptr[1:].long() - 1
    forget(kv, news, window)
    arguments = q, kv.pages, kv.rows, indptr, kv.kv_lens, kv.page_table, SCALE
    for longest in (16, 130):
        out = attention.extend_attention(*arguments, longest, window=window)
        assert_close(out, expected)
    forget(kv, [1] * len(news), window)
    workspace = DecodeWorkspace(len(LENGTHS), HEADS, KV_HEADS, HEAD_DIM, device)
    for config in (None, DecodeConfig(block_n=16, stages=2, warps=1, programs=2, least=1)):
        out = decode.decode_attention(
            q[last],
            kv.pages,
            kv.rows,
            kv.kv_lens,
            kv.page_table,
            SCALE,
            workspace,
            window=window,
            config=config,
        )
        assert_close(out, expected[last])


def test_prefixes_in_common_have_no_window(device: torch.device) -> None:
    kv = paged([20, 20], torch.float32, device)
    q = torch.randn(2, HEADS, HEAD_DIM, device=device)
    workspace = DecodeWorkspace(2, HEADS, KV_HEADS, HEAD_DIM, device)
    nothing = torch.zeros(2, dtype=torch.int32, device=device)
    prefixes = decode.SharedPrefixes(nothing[:, None] - 1, nothing, nothing)
    arguments = q, kv.pages, kv.rows, kv.kv_lens, kv.page_table, SCALE, workspace
    with pytest.raises(ValueError, match="without a window"):
        decode.decode_attention(*arguments, prefixes=prefixes, window=8)

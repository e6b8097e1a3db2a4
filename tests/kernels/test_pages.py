"""Pages between the device's layer-first pool and page-first packs, and flat page lists."""

from __future__ import annotations

import pytest
import torch

from radixgrove.kernels import pages
from tests.kernels.helpers import DTYPES


@DTYPES
@pytest.mark.parametrize("ids", [[], [3], [8, 0, 5]])
def test_gather_and_scatter_are_inverse(
    ids: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    pool = torch.randn(3, 2, 9, 16, 2, 24, device=device).to(dtype)
    index = torch.tensor(ids, dtype=torch.int64, device=device)
    entry = 3 * 2 * 16 * 2 * 24
    # Each page stands between what other groups of layers keep of it.
    whole = torch.full((len(ids), 40 + entry + 8), float("nan"), dtype=dtype, device=device)
    packed = whole[:, 40 : 40 + entry].unflatten(1, (3, 2, 16, 2, 24))
    pages.gather_pages(pool, index, packed)
    beside = torch.cat((whole[:, :40], whole[:, 40 + entry :]), 1)
    assert beside.isnan().all(), "written beside the pages"
    for place, page in enumerate(ids):
        assert torch.equal(packed[place], pool[:, :, page])
    other = torch.zeros_like(pool)
    pages.scatter_pages(other, index, packed)
    expected = torch.zeros_like(pool)
    expected[:, :, ids] = pool[:, :, ids]
    assert torch.equal(other, expected)


@DTYPES
@pytest.mark.parametrize(("page_size", "ids"), [(1, [3]), (16, [8, 0, 5]), (64, list(range(9)))])
def test_one_layer_comes_from_pages_with_ids_of_their_own(
    page_size: int, ids: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    entry = 3 * 2 * page_size * 2 * 64
    whole = torch.randn(11, 16 + entry + 8, device=device).to(dtype)
    host = whole[:, 16 : 16 + entry].unflatten(1, (3, 2, page_size, 2, 64))
    host_ids = torch.randperm(11)[: len(ids)].to(device)
    pool = torch.randn(3, 2, 9, page_size, 2, 64, device=device).to(dtype)
    expected = pool.clone()
    expected[1][:, ids] = host[host_ids, 1].movedim(0, 1)
    pages.scatter_layer(pool, 1, torch.tensor(ids, device=device), host, host_ids)
    assert torch.equal(pool, expected)


@pytest.mark.gpu
def test_gather_writes_pinned_host_memory(device: torch.device) -> None:
    pool = torch.randn(2, 2, 9, 16, 2, 64, device=device)
    packed = torch.zeros(2, 2, 2, 16, 2, 64).pin_memory()
    pages.gather_pages(pool, torch.tensor([4, 1], device=device), packed)
    torch.cuda.synchronize()
    assert torch.equal(packed, pool[:, :, [4, 1]].movedim(2, 0).cpu())


@pytest.mark.parametrize("lengths", [[1], [16, 17, 1], [15, 300, 32, 31]])
def test_kv_indices_lists_each_rows_pages(lengths: list[int], device: torch.device) -> None:
    page_size = 16
    table = torch.randint(0, 1000, (9, 20), dtype=torch.int32, device=device)
    rows = torch.randperm(9)[: len(lengths)].int().to(device)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    counts = [-(-length // page_size) for length in lengths]
    for function in (pages.kv_indices, pages.kv_indices_reference):
        indptr = torch.full((len(lengths) + 1,), -7, dtype=torch.int32, device=device)
        out = torch.full((64,), -7, dtype=torch.int32, device=device)
        last = torch.full((len(lengths),), -7, dtype=torch.int32, device=device)
        function(rows, lens, table, page_size, indptr, out, last)
        expected = [table[row, :n] for row, n in zip(rows.tolist(), counts, strict=True)]
        assert torch.equal(out[: sum(counts)], torch.cat(expected))
        assert (out[sum(counts) :] == -7).all(), "written past the end"
        assert indptr.tolist() == [sum(counts[:i]) for i in range(len(lengths) + 1)]
        assert last.tolist() == [(length - 1) % page_size + 1 for length in lengths]

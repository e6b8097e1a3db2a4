"""Decode attention that reads the prefixes of several rows once: as that which does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from radixgrove.kernels import decode
from radixgrove.kernels.decode import (
    DecodeWorkspace,
    SharedPrefixes,
    decode_attention,
    decode_attention_reference,
    tile_rows,
)

from .helpers import PAGED_DTYPES, PagedKv, assert_close

PAGE, SCALE = 16, 0.3


class Case:
    """Rows of a batch that have their first pages in common.

    `groups`: pages of a prefix, and the batch's rows that have it.
    """

    def __init__(
        self,
        lengths: list[int],
        groups: list[tuple[int, list[int]]],
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        *,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        device: torch.device,
    ) -> None:
        self.kv = PagedKv.random(
            lengths,
            page_size=PAGE,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=kv_dtype or dtype,
            device=device,
        )
        for pages, members in groups:
            own = self.kv.rows.long()[members]
            self.kv.page_table[own, :pages] = self.kv.page_table[own[0], :pages].clone()
        self.q = torch.randn(len(lengths), heads, head_dim, device=device).to(dtype)
        self.prefixes = self._tiles(groups, tile_rows(heads, kv_heads))
        self.workspace = DecodeWorkspace(len(lengths), heads, kv_heads, head_dim, device)
        parts = self.workspace.prefixes
        for part in (parts.state, parts.state_stats, parts.partials, parts.stats):
            part.fill_(float("nan"))

    def _tiles(self, groups: list[tuple[int, list[int]]], width: int) -> SharedPrefixes:
        """Groups cut into tiles, one tile more than there are, and rows that have none."""
        batch = len(self.q)
        tiles, lens = [], []
        row_lens = [0] * batch
        for pages, members in groups:
            for first in range(0, len(members), width):
                tile = members[first : first + width]
                tiles.append(tile + [-1] * (width - len(tile)))
                lens.append(pages * PAGE)
            for member in members:
                row_lens[member] = pages * PAGE
        tiles.append([-1] * width)
        lens.append(0)

        def integers(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.q.device)

        return SharedPrefixes(integers(tiles), integers(lens), integers(row_lens))

    def run(self, prefixes: SharedPrefixes | None) -> Tensor:
        kv = self.kv
        return decode_attention(
            self.q,
            kv.pages,
            kv.rows,
            kv.kv_lens,
            kv.page_table,
            SCALE,
            self.workspace,
            prefixes=prefixes,
        )

    def exact(self) -> Tensor:
        kv, wide = self.kv, torch.float64
        return decode_attention_reference(
            self.q.to(wide), kv.pages.to(wide), kv.rows, kv.kv_lens, kv.page_table, SCALE
        )

    def check(self) -> None:
        for _ in range(2):  # the second run finds the counters as the first left them
            assert_close(self.run(self.prefixes).to(self.q.dtype), self.exact())
            assert not self.workspace.prefixes.counters.any()
            assert not self.workspace.counters.any()


@PAGED_DTYPES
def test_rows_with_a_prefix_in_common(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Two groups of different lengths, a row of none between, one that ends behind its prefix."""
    lengths = [100, 33, 40, 65, 200, 81, 70]
    groups = [(4, [0, 6, 3]), (2, [1, 2])]
    Case(lengths, groups, dtype=dtype, kv_dtype=kv_dtype, device=device).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (14, 2)])
def test_groups_larger_than_a_tile(heads: int, kv_heads: int, device: torch.device) -> None:
    """Of groups of query heads that are a power of two, and that are not."""
    width = tile_rows(heads, kv_heads)
    members = list(range(width + 3))
    lengths = [PAGE * 2 + 1 + index % 20 for index in members] + [5]
    Case(lengths, [(2, members)], heads, kv_heads, 16, device=device).check()


def test_a_prefix_that_many_programs_share(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(decode, "_multiprocessors", lambda _device: 8)
    case = Case([900, 801, 810], [(50, [2, 0, 1])], dtype=torch.float32, device=device)
    case.check()
    parts = case.workspace.prefixes.stats.isfinite().sum()
    assert parts > 2 * 8, "each KV head's prefix should reach into many shares"


def test_many_rows_with_a_program_each(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(decode, "_WHOLE_PAIRS", 0)
    case = Case([50, 49, 20, 60], [(3, [0, 3, 1])], device=device)
    case.check()


def test_no_group_at_all(device: torch.device) -> None:
    case = Case([50, 3], [], device=device)
    assert torch.equal(case.run(case.prefixes), case.run(None))


def test_queries_elsewhere_have_no_prefixes(device: torch.device) -> None:
    case = Case([50, 49], [(1, [0, 1])], device=device)
    kv = case.kv
    with pytest.raises(ValueError, match="order"):
        decode_attention(
            case.q,
            kv.pages,
            kv.rows,
            kv.kv_lens,
            kv.page_table,
            SCALE,
            case.workspace,
            tokens=kv.rows,
            prefixes=case.prefixes,
        )

"""Prefixes that rows of a decode batch have in common, so that attention reads them once for all.

The radix tree gives requests the same pages for the same tokens, so the host finds prefixes in
common by comparing pages. Which rows to take together is a choice: all that begin with one system
prompt, or those among them with a longer context. The groups are those that save the most reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from radixgrove.kernels.decode import SharedPrefixes
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.execution.transfer import to_device

# Tokens of KV that must be saved for a group, and in all, to be worth a kernel more in each layer.
_LEAST_OF_GROUP = 512
_LEAST = 8192


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a batch, by their indices, and the first pages that they have in common."""

    rows: list[int]
    pages: int

    @property
    def saved(self) -> int:
        """Pages that need not be read again."""
        return (len(self.rows) - 1) * self.pages


def best_groups(
    pages: NDArray[np.int32], rows: NDArray[np.int64], counts: NDArray[np.int64]
) -> list[Group]:
    """Disjoint groups of rows that together save the most pages.

    Args:
        pages: [rows of the table, pages of a row], of which a batch has `rows` [B].
        counts: [B], how many of a row's first pages others may have too.
    """
    first = np.where(counts > 0, pages[rows, 0], -1 - np.arange(len(rows)))
    _, inverse, sizes = np.unique(first, return_inverse=True, return_counts=True)
    candidates = np.flatnonzero(sizes[inverse] > 1)
    if not len(candidates):
        return []
    longest = int(counts[candidates].max())
    # Whatever is behind a row's own pages is like nothing else.
    known = np.arange(longest) < counts[candidates, None]
    unique = -1 - candidates.astype(np.int32)[:, None]
    table = np.where(known, pages[rows[candidates], :longest], unique)
    order = sorted(range(len(table)), key=[row.tobytes() for row in table].__getitem__)
    table = table[order]
    differs = table[1:] != table[:-1]
    common = np.where(differs.any(axis=1), differs.argmax(axis=1), longest)
    return _choose(candidates[order].tolist(), common.tolist())


@dataclass(slots=True)
class _Node:
    """Neighbours in sorted order with `pages` in common: groups of more, and rows in none."""

    pages: int
    groups: list[Group] = field(default_factory=list)
    loose: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Once all rows are known: put those that save more that way into a group of the node's."""
        dissolved = [group for group in self.groups if len(group.rows) * self.pages > group.saved]
        pool = Group([*self.loose, *(row for group in dissolved for row in group.rows)], self.pages)
        apart = Group(self.loose, self.pages)
        if pool.saved <= sum(group.saved for group in dissolved) + max(0, apart.saved):
            pool, dissolved = apart, []
        if len(pool.rows) > 1:
            self.groups = [group for group in self.groups if group not in dissolved] + [pool]
            self.loose = []


def _choose(rows: list[int], common: list[int]) -> list[Group]:
    """The best groups of sorted rows, of which neighbours have `common` pages in common."""
    stack = [_Node(0)]
    for row, pages in zip(rows, [*common, 0], strict=True):
        if stack[-1].pages < pages:
            stack.append(_Node(pages))
        stack[-1].loose.append(row)
        while stack[-1].pages > pages:
            node = stack.pop()
            node.close()
            if stack[-1].pages < pages:
                stack.append(_Node(pages))
            stack[-1].groups += node.groups
            stack[-1].loose += node.loose
    return stack[0].groups


class PrefixInputs:
    """Static buffers for the prefixes of captured steps, and the host's part of finding them."""

    def __init__(self, table: RequestTable, max_batch: int, width: int) -> None:
        """
        Args:
            max_batch: the most rows of a step.
            width: rows of a tile, at least 2.
        """
        self._table = table
        self._width = width
        tiles = max(1, max_batch // 2)
        self._sizes = [tiles * width, tiles, max_batch]
        device = table.pages.device
        self._packed = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        members, tile_lens, row_lens = torch.split(self._packed, self._sizes)
        self.tensors = SharedPrefixes(members.view(tiles, width), tile_lens, row_lens)

    def fill(self, rows: list[int]) -> bool:
        """Find the prefixes of a batch of decode rows; whether there are any worth the trouble."""
        groups = self._find(rows)
        if groups:
            packed = self._pack(groups)
            self._packed.copy_(to_device(packed, self._packed.device))
        return bool(groups)

    def _find(self, rows: list[int]) -> list[Group]:
        size = self._table.page_size
        # The page of a row's last token is its own.
        counts = np.array([(self._table.host_lens[row] - 1) // size for row in rows])
        groups = best_groups(self._table.host_pages, np.array(rows), counts)
        groups = [group for group in groups if group.saved * size >= _LEAST_OF_GROUP]
        return groups if sum(group.saved for group in groups) * size >= _LEAST else []

    def _pack(self, groups: list[Group]) -> NDArray[np.int32]:
        packed = np.zeros(sum(self._sizes), dtype=np.int32)
        members, tile_lens, row_lens = np.split(packed, np.cumsum(self._sizes)[:-1])
        members.fill(-1)
        tiles = members.reshape(-1, self._width)
        used = 0
        for group in groups:
            tokens = group.pages * self._table.page_size
            row_lens[group.rows] = tokens
            for first in range(0, len(group.rows), self._width):
                rows = group.rows[first : first + self._width]
                tiles[used, : len(rows)] = rows
                tile_lens[used] = tokens
                used += 1
        return packed

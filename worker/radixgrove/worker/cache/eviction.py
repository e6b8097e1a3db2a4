"""Which cached page goes first: an ordered set of evictable leaves, never a walk over the tree."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from radixgrove.protocol.settings import EvictionPolicy
from radixgrove.worker.cache.node import TreeNode

# Smallest goes first. Ticks are logical: they order uses, whatever the wall clock does.
_KEYS: dict[EvictionPolicy, Callable[[TreeNode], tuple[int, int]]] = {
    EvictionPolicy.LRU: lambda node: (node.used, node.created),
    EvictionPolicy.LFU: lambda node: (node.hits, node.used),
    EvictionPolicy.FIFO: lambda node: (node.created, node.used),
    EvictionPolicy.PRIORITY: lambda node: (node.priority, node.used),
}

# Discarded entries stay in the heap until it is half dead weight.
_SLACK = 64


@dataclass(slots=True, eq=False)
class _Entry:
    key: tuple[int, int]
    node: TreeNode | None  # None once discarded

    def __lt__(self, other: _Entry) -> bool:
        return self.key < other.key


class EvictionQueue:
    """A priority queue of nodes. A node's key is read when it is added and must not change until
    it leaves: the tree adds a node when its last lock goes and discards it at the next lock."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._key = _KEYS[policy]
        self._heap: list[_Entry] = []
        self._entries: dict[TreeNode, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: TreeNode) -> bool:
        return node in self._entries

    def add(self, node: TreeNode) -> None:
        entry = _Entry(self._key(node), node)
        self._entries[node] = entry
        heapq.heappush(self._heap, entry)

    def discard(self, node: TreeNode) -> None:
        entry = self._entries.pop(node, None)
        if entry is None:
            return
        entry.node = None
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = [live for live in self._heap if live.node is not None]
            heapq.heapify(self._heap)

    def pop(self) -> TreeNode | None:
        """Remove and return the node to evict first; None when there is none."""
        while self._heap:
            node = heapq.heappop(self._heap).node
            if node is not None:
                del self._entries[node]
                return node
        return None

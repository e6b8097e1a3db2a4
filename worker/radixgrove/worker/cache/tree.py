"""The radix tree of cached prefixes: what requests find in it, and what they leave.

`structure` is the tree itself, `residency` where its nodes' pages are and what moves them.

Layers with a window may keep less than the tree holds (`windows`): then a match ends where the last
window before its end is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from radixgrove.protocol.blocks import BlockHasher
from radixgrove.protocol.settings import EvictionPolicy
from radixgrove.worker.cache.events import EventLog
from radixgrove.worker.cache.host_tier import HostTier
from radixgrove.worker.cache.index import BlockIndex
from radixgrove.worker.cache.node import CacheScope, TreeNode
from radixgrove.worker.cache.pool import PagePool
from radixgrove.worker.cache.residency import Residency
from radixgrove.worker.cache.structure import TreeStructure
from radixgrove.worker.cache.timeline import Timeline
from radixgrove.worker.cache.windows import WindowPages
from radixgrove.worker.messages import Tier


class RadixTree:
    """Which prefixes the pool, and the host, hold.

    `hasher` makes the chain hashes of a namespace's index blocks; None when nothing follows
    the cache's events. Its block size must be a multiple of the page size.
    """

    def __init__(
        self,
        pool: PagePool,
        timeline: Timeline,
        page_size: int,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        hasher: Callable[[str], BlockHasher] | None = None,
        host: HostTier | None = None,
        windows: WindowPages | None = None,
    ) -> None:
        self.page_size = page_size
        self._index = BlockIndex(page_size, hasher)
        self._structure = TreeStructure(page_size, self._index, host)
        self.residency = Residency(self._structure, pool, timeline, policy, host)
        self._host = host
        self._windows = windows

    @property
    def events(self) -> EventLog:
        return self._index.events

    @property
    def version(self) -> int:
        """Changes whenever a match may."""
        windows = 0 if self._windows is None else self._windows.version
        return self._structure.version + windows

    def loads_ended(self) -> None:
        """Nodes that were being loaded can be matched now."""
        self._structure.version += 1

    def nodes(self) -> Iterator[TreeNode]:
        """Every node, parents first, roots included."""
        return self._structure.nodes()

    def blocks(self) -> Iterator[tuple[Tier, str, bytes]]:
        """(where, domain, packed hashes) of everything cached, parents first."""
        return self._structure.blocks()

    # ---- matching ------------------------------------------------------------------------------

    def root(self, scope: CacheScope) -> TreeNode:
        """The root of a scope; it lives while locked or while something hangs from it."""
        return self._structure.root(scope)

    def peek(self, scope: CacheScope, tokens: bytes, limit: int) -> tuple[TreeNode | None, int]:
        """The deepest node on the device that `tokens` reach, and how many pages match; changes
        nothing.

        Args:
            limit: most pages to match. The match may end inside the node.
        """
        root = self._structure.find_root(scope)
        return (None, 0) if root is None else self._find(root, tokens, limit)

    def _find(self, root: TreeNode, tokens: bytes, limit: int) -> tuple[TreeNode, int]:
        """As `peek`, from a root."""
        node, depth = self._structure.descend(root, tokens, limit, self.residency.on_device)
        if self._windows is not None:
            depth = self._windows.usable(self.path_pages(node)[:depth])
            while node.parent is not None and depth <= node.start:
                node = node.parent
        return node, depth

    def behind_windows(self, node: TreeNode, tokens: bytes, limit: int) -> int:
        """How many more pages of `tokens` are cached than `match`, which answered `node`, could
        take for want of window pages."""
        if self._windows is None:
            return 0
        return self._structure.descend(node, tokens, limit, _anywhere)[1] - node.end

    def peek_below(self, node: TreeNode, depth: int, tokens: bytes, limit: int) -> int:
        """How many pages match once those on the host, and those on their way, are counted too.

        Args:
            node, depth: as `peek` answered.
        """
        if self._host is None or depth < node.end:
            return depth
        return self._structure.descend(node, tokens, limit, _anywhere)[1]

    def awaits_load(self, node: TreeNode, depth: int, tokens: bytes, limit: int) -> bool:
        """Whether the first page that `peek` did not match is being loaded."""
        if self._host is None or depth < node.end or depth >= limit:
            return False
        child = node.children.get(self._structure.page(tokens, depth))
        return child is not None and bool(child.pages) and not self.residency.on_device(child)

    def match(self, scope: CacheScope, tokens: bytes, limit: int) -> TreeNode:
        """The node that ends where the match of at most `limit` pages ends; split off if need be.

        The caller locks it before anything else may evict.
        """
        node, depth = self._find(self.root(scope), tokens, limit)
        return self._structure.split(node, depth) if depth < node.end else node

    def match_host(self, node: TreeNode, tokens: bytes, limit: int) -> TreeNode:
        """Where the match of `tokens`, which end at `node` on the device, ends on the host.

        Between the two are nodes on the host alone, for `load`. `node` itself when there are none.
        """
        below, depth = self._structure.descend(node, tokens, limit, _on_host)
        return self._structure.split(below, depth) if depth < below.end else below

    @staticmethod
    def path_pages(node: TreeNode) -> list[int]:
        """The device pages of a node and its ancestors, in token order."""
        parts = [node.pages]
        while node.parent is not None:
            node = node.parent
            parts.append(node.pages)
        return list(itertools.chain.from_iterable(reversed(parts)))

    @staticmethod
    def unlocked_pages(node: TreeNode | None) -> int:
        """How many evictable pages a lock on `node` would pin."""
        count = 0
        while node is not None and node.ref_count == 0:
            count += len(node.pages)
            node = node.parent
        return count

    @staticmethod
    def shared_pages(node: TreeNode | None) -> int:
        """How many pages of the path stay locked when one holder lets go."""
        while node is not None and node.ref_count <= 1:
            node = node.parent
        return 0 if node is None else node.end

    def forget_if_empty(self, node: TreeNode | None) -> None:
        """`node` came from `root` or `match` and was not locked: drop it if it is a bare root."""
        if node is not None and node.parent is None:
            self.residency.settle(node)

    # ---- growth --------------------------------------------------------------------------------

    def extend(
        self, node: TreeNode, tokens: bytes, pages: list[int], end: int, priority: int = 0
    ) -> TreeNode:
        """Publish a running request's pages [node.end, end) below its locked `node`.

        Stops where another request's copy is on the device already (`accepts`): a running request
        keeps its own pages, since its page table is never rewritten. The tree owns what it takes
        from now on, and the caller's lock moves to the node returned, which ends there.
        """
        while node.end < end:
            child = node.children.get(self._structure.page(tokens, node.end))
            if child is None:
                return self._attach(node, tokens, pages[node.end : end], end, priority)
            if not self._gives_way(child):
                break
            child = self._structure.common_part(child, tokens, end)
            self.residency.pin(child)
            its = pages[child.start : child.end]
            if child.pages:
                self.residency.replace(child, its)
            else:
                self.residency.fill(child, its)
            node = child
        return node

    def accepts(self, node: TreeNode, page: bytes) -> bool:
        """Whether `extend` takes pages of a running request that go on with `page` below `node`."""
        child = node.children.get(page)
        return child is None or self._gives_way(child)

    def _gives_way(self, node: TreeNode) -> bool:
        """Whether a running request's pages may take the place of a node's own, if it has any.

        A request that computes what is cached does so for want of window pages, which its own pages
        have: others that wait for them are spared the same.
        """
        return not node.pages or (self._windows is not None and not node.ref_count)

    def insert(
        self, node: TreeNode, tokens: bytes, pages: list[int], end: int, priority: int = 0
    ) -> list[int]:
        """A request leaves: keep what is new of its computed pages [node.end, end), drop its lock.

        Returns:
            Its duplicates of pages that the tree holds already; they stay the caller's.
        """
        duplicates: list[int] = []
        reached = node
        while reached.end < end:
            child = reached.children.get(self._structure.page(tokens, reached.end))
            if child is None:
                break
            child = self._structure.common_part(child, tokens, end)
            its = pages[child.start : child.end]
            if child.pages:
                duplicates += its
                if self._windows is not None:
                    self._windows.hand_over(its, child.pages)
            else:
                self.residency.fill(child, its)
            reached = child
        self.residency.lock(reached)
        self.residency.unlock(node)
        if reached.end < end:
            reached = self._attach(reached, tokens, pages[reached.end : end], end, priority)
        self.residency.unlock(reached)
        return duplicates

    def _attach(
        self, node: TreeNode, tokens: bytes, pages: list[int], end: int, priority: int
    ) -> TreeNode:
        """Hang pages [node.end, end) below `node`, which the caller has locked; moves the lock."""
        size = self._structure.page_bytes
        start = node.end
        key = tokens[start * size : end * size]
        self.residency.adopt(pages)
        if node.parent is not None and node.ref_count == 1 and not node.children and not node.host:
            # No other request uses this leaf: growing it keeps a long prefill from leaving a chain.
            self._structure.grow(node, key, pages)
        else:
            if self._host is not None:
                self._host.full_grown(node)
            node = self._structure.hang(node, key, pages, priority)
        self._index.grown(node, tokens, start)
        if self._host is not None:
            self._host.computed(node)
        return node


def _on_host(node: TreeNode) -> bool:
    return not node.pages


def _anywhere(node: TreeNode) -> bool:
    return True

"""The bare radix tree: nodes under one root per namespace and sharing domain, found and cut.

Page-granular: a node's tokens are a whole number of pages, and its children are keyed by their
first page's tokens, so that nodes split at page boundaries only.

Token ids are int32 little-endian bytes throughout; comparing slices of them is a `memcmp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from radixgrove.protocol.blocks import TOKEN_BYTES
from radixgrove.worker.cache.host_tier import HostTier
from radixgrove.worker.cache.index import BlockIndex
from radixgrove.worker.cache.node import CacheScope, TreeNode
from radixgrove.worker.messages import Tier


class TreeStructure:
    """Which node hangs where; `index` and `host` keep up with what is cut and taken out."""

    def __init__(self, page_size: int, index: BlockIndex, host: HostTier | None) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self.version = 0  # changes whenever a match may, by a move of pages as well
        self.index = index
        self._host = host
        self._roots: dict[CacheScope, TreeNode] = {}
        self._tick = 0

    def tick(self) -> int:
        """Logical time: orders what happens to nodes."""
        self._tick += 1
        return self._tick

    # ---- finding -------------------------------------------------------------------------------

    def find_root(self, scope: CacheScope) -> TreeNode | None:
        return self._roots.get(scope)

    def root(self, scope: CacheScope) -> TreeNode:
        """The root of a scope; it lives while locked or while something hangs from it."""
        node = self._roots.get(scope)
        if node is None:
            node = self._roots[scope] = TreeNode(scope, None, b"", [], self.index.root(scope))
        return node

    def forget_if_bare(self, root: TreeNode) -> None:
        """Drop a root from which nothing hangs."""
        if not root.children and self._roots.get(root.scope) is root:
            del self._roots[root.scope]

    def descend(
        self, node: TreeNode, tokens: bytes, limit: int, enters: Callable[[TreeNode], bool]
    ) -> tuple[TreeNode, int]:
        """The deepest node that `tokens` reach from `node` on, and how many pages match.

        Args:
            limit: most pages to match. The match may end inside the node.
            enters: whether a child may be on the way.
        """
        size = self.page_bytes
        depth = node.end
        while depth < limit:
            child = node.children.get(tokens[depth * size : (depth + 1) * size])
            if child is None or not enters(child):
                break
            count = min(child.size, limit - depth)
            same = common_pages(child.key, 0, tokens, depth, count, size)
            depth += same
            node = child
            if same < child.size:
                break
        return node, depth

    def page(self, tokens: bytes, depth: int) -> bytes:
        """The tokens of page `depth`."""
        return tokens[depth * self.page_bytes : (depth + 1) * self.page_bytes]

    def blocks(self) -> Iterator[tuple[Tier, str, bytes]]:
        """(where, domain, packed hashes) of everything cached, parents first."""
        for node in self.nodes():
            if node.hashes:
                yield Tier.GPU if node.pages else Tier.HOST, node.scope.domain, node.hashes

    def nodes(self) -> Iterator[TreeNode]:
        """Every node, parents first, roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    # ---- changing ------------------------------------------------------------------------------

    def grow(self, leaf: TreeNode, key: bytes, pages: list[int]) -> None:
        """Pages of the device that follow those of a leaf, which is on the device alone."""
        leaf.key += key
        leaf.pages += pages
        leaf.size += len(pages)
        self.version += 1

    def hang(self, node: TreeNode, key: bytes, pages: list[int], priority: int) -> TreeNode:
        """A new child of `node`, on the device and locked once."""
        child = TreeNode(node.scope, node, key, pages, node.tail)
        child.created = child.used = self.tick()
        child.hits = 1
        child.priority = priority
        child.ref_count = 1
        node.children[key[: self.page_bytes]] = child
        node.device_children += 1
        self.version += 1
        return child

    def common_part(self, child: TreeNode, tokens: bytes, end: int) -> TreeNode:
        """What of `child` the first `end` pages of `tokens` share, split off if need be."""
        count = min(child.size, end - child.start)
        same = common_pages(child.key, 0, tokens, child.start, count, self.page_bytes)
        return self.split(child, child.start + same) if same < child.size else child

    def split(self, node: TreeNode, depth: int) -> TreeNode:
        """Cut a node at page `depth`; returns the new upper part.

        The lower part keeps its identity: locks are held on nodes by their end.
        """
        parent = node.parent
        assert parent is not None, "a root has no pages to split"
        size = self.page_bytes
        head = depth - node.start
        upper = TreeNode(
            node.scope, parent, node.key[: head * size], node.pages[:head], parent.tail
        )
        upper.size = head
        upper.ref_count, upper.hits, upper.priority = node.ref_count, node.hits, node.priority
        upper.created, upper.used, upper.fence = node.created, node.used, node.fence
        upper.loaded_by = node.loaded_by
        upper.spoiled = node.spoiled
        upper.device_children = int(bool(node.pages))
        parent.children[node.key[:size]] = upper
        self.index.split(upper, node, parent)

        node.parent = upper
        node.start = depth
        node.size -= head
        node.key = node.key[head * size :]
        node.pages = node.pages[head:]
        upper.children[node.key[:size]] = node
        if self._host is not None:
            self._host.split(upper, node, head)
        self.version += 1
        return upper

    def remove(self, node: TreeNode) -> None:
        """Unhang a node without children, and forget its copy on the host."""
        parent = node.parent
        assert parent is not None, "roots are forgotten, not removed"
        if self._host is not None:
            parent.host_children -= bool(node.host)
            self._host.release(node)
        del parent.children[self.page(node.key, 0)]


def common_pages(
    one: bytes, one_start: int, two: bytes, two_start: int, count: int, page_bytes: int
) -> int:
    """How many of `count` pages from page `one_start` and `two_start` on are equal, from the first.

    Both hold at least that many, of `page_bytes` each. Bisects on equality of slices: O(bytes)
    compared by `memcmp`.
    """
    low, high = 0, count  # pages before `low` are equal; all pages up to `high` may be
    while low < high:
        # Try all that is left first: most comparisons succeed as a whole.
        middle = high if low == 0 and high == count else (low + high + 1) // 2
        a = one[(one_start + low) * page_bytes : (one_start + middle) * page_bytes]
        if a == two[(two_start + low) * page_bytes : (two_start + middle) * page_bytes]:
            low = middle
        else:
            high = middle - 1
    return low

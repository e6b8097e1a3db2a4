"""Sharing a prefix before it is cached: one request computes it, the others wait for its pages."""

from __future__ import annotations

from radixgrove.protocol.blocks import TOKEN_BYTES
from radixgrove.worker.cache.node import TreeNode
from radixgrove.worker.cache.structure import common_pages
from radixgrove.worker.cache.tree import RadixTree
from radixgrove.worker.scheduler.request import RunningRequest

# Fewer shared tokens are computed twice sooner than waited for.
_WORTH_WAITING = 32


class InFlightPrefixes:
    """Rows in prefill, by the node their pages will hang from and the first page to come.

    A waiting request shares that page if its match ends at the node and goes on with the page.
    """

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._page_size = tree.page_size
        self._page_bytes = tree.page_size * TOKEN_BYTES
        self._leaders: dict[tuple[TreeNode, bytes], RunningRequest] = {}

    def update(self, active: RunningRequest) -> None:
        """The row was admitted, or its node moved: list it where its next page will appear."""
        self.drop(active)
        node = active.node
        if node is None or node.end >= active.length // self._page_size:
            return
        page = active.tokens[node.end * self._page_bytes : (node.end + 1) * self._page_bytes]
        if not self._tree.accepts(node, page):  # another copy is cached already; this one never is
            return
        claim = (node, page)
        if self._leaders.setdefault(claim, active) is active:
            active.claim = claim

    def drop(self, active: RunningRequest) -> None:
        if active.claim is not None:
            del self._leaders[active.claim]
            active.claim = None

    def worth_waiting(
        self, node: TreeNode, depth: int, tokens: bytes, limit: int, waiting: bool
    ) -> bool:
        """Whether a row in prefill computes enough of `tokens`' pages [depth, limit).

        Args:
            node, depth: the deepest node that `tokens` reach and the pages matched, as `peek` says.
            waiting: it was worth it before. Then it is until the last shared page is there.
        """
        shared = self.shared_pages(node, depth, tokens, limit)
        return shared * self._page_size >= (1 if waiting else _WORTH_WAITING)

    def shared_pages(self, node: TreeNode, depth: int, tokens: bytes, limit: int) -> int:
        """How many of `tokens`' pages [depth, limit) a row in prefill computes."""
        if depth != node.end or depth >= limit:
            return 0
        page = tokens[depth * self._page_bytes : (depth + 1) * self._page_bytes]
        leader = self._leaders.get((node, page))
        if leader is None:
            return 0
        most = min(limit, leader.length // self._page_size) - depth
        return common_pages(tokens, depth, leader.tokens, depth, most, self._page_bytes)

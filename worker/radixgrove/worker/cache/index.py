"""The routers' view of the tree: hashes of its index blocks, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable

from radixgrove.protocol.blocks import HASH_BYTES, TOKEN_BYTES, BlockHasher
from radixgrove.worker.cache.events import EventLog
from radixgrove.worker.cache.node import CacheScope, TreeNode
from radixgrove.worker.messages import Tier


class BlockIndex:
    """Keeps `Node.hashes` and `Node.tail`: a block belongs to the node in which it ends.

    `make_hasher` makes the chain hashes of a namespace's index blocks; None when nothing follows
    the cache's events. Their size must be a multiple of the page's.
    """

    def __init__(self, page_size: int, make_hasher: Callable[[str], BlockHasher] | None) -> None:
        self.events = EventLog()
        self._page_size = page_size
        self._make_hasher = make_hasher
        self._hashers: dict[str, BlockHasher] = {}

    def root(self, scope: CacheScope) -> bytes:
        """What the first block of a scope is chained to."""
        hasher = self._hasher(scope)
        return b"" if hasher is None else hasher.root

    def grown(self, node: TreeNode, tokens: bytes, start: int) -> None:
        """Pages [start, node.end) are new to the tree; `tokens` holds them and all before."""
        hasher = self._hasher(node.scope)
        if hasher is None:
            return
        block = hasher.block_size * TOKEN_BYTES
        first = self._blocks_before(node.scope, start)
        last = self._blocks_before(node.scope, node.end)
        if first == last:
            return
        hashes = hasher.chain(tokens[first * block : last * block], node.tail)
        node.hashes += hashes
        node.tail = hashes[-HASH_BYTES:]
        self.events.stored(Tier.GPU, node.scope.domain, hashes)

    def split(self, upper: TreeNode, lower: TreeNode, above: TreeNode) -> None:
        """`upper`, which hangs from `above`, took the first pages of `lower`; both are cut."""
        count = self._blocks_before(upper.scope, upper.end)
        count -= self._blocks_before(upper.scope, upper.start)
        upper.hashes = lower.hashes[: count * HASH_BYTES]
        upper.tail = upper.hashes[-HASH_BYTES:] or above.tail
        lower.hashes = lower.hashes[count * HASH_BYTES :]

    def removed(self, node: TreeNode, tier: Tier) -> None:
        self.events.removed(tier, node.scope.domain, node.hashes)

    def moved(self, node: TreeNode, target: Tier) -> None:
        """Added there before it is removed here: no moment without it."""
        source = Tier.HOST if target is Tier.GPU else Tier.GPU
        self.events.stored(target, node.scope.domain, node.hashes)
        self.events.removed(source, node.scope.domain, node.hashes)

    def _hasher(self, scope: CacheScope) -> BlockHasher | None:
        if self._make_hasher is None:
            return None
        hasher = self._hashers.get(scope.namespace)
        if hasher is None:
            hasher = self._make_hasher(scope.namespace)
            if hasher.block_size % self._page_size:
                raise ValueError(
                    f"an index block of {hasher.block_size} tokens is no multiple of the page of "
                    f"{self._page_size}"
                )
            self._hashers[scope.namespace] = hasher
        return hasher

    def _blocks_before(self, scope: CacheScope, depth: int) -> int:
        """Index blocks that end within the first `depth` pages."""
        hasher = self._hasher(scope)
        return 0 if hasher is None else depth * self._page_size // hasher.block_size

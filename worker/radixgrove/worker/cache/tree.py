"""The radix tree of cached prefixes, one root per namespace and sharing domain.

Page-granular: a node's tokens are a whole number of pages, and its children are keyed by their
first page's tokens, so that nodes split at page boundaries only. Locks count the requests whose
prefix ends at or below a node: a parent has at least as many as each child, hence what is unlocked
can always be evicted leaf by leaf.

Token ids are int32 little-endian bytes throughout; comparing slices of them is a `memcmp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from radixgrove.protocol.blocks import HASH_BYTES, TOKEN_BYTES, BlockHasher
from radixgrove.protocol.settings import EvictionPolicy
from radixgrove.worker.cache.events import EventLog
from radixgrove.worker.cache.eviction import EvictionQueue
from radixgrove.worker.cache.node import Node, Scope
from radixgrove.worker.cache.pool import Owner, PagePool, StepClock


class RadixTree:
    """Which prefixes the pool holds. It owns the pages of its nodes, and gives them up by `evict`.

    `hasher` makes the chain hashes of a namespace's index blocks; None when nobody listens to
    cache events. Its block size must be a multiple of the page size.
    """

    def __init__(
        self,
        pool: PagePool,
        clock: StepClock,
        page_size: int,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        hasher: Callable[[str], BlockHasher] | None = None,
    ) -> None:
        self.page_size = page_size
        self.evictable = 0  # pages of unlocked nodes
        self.num_pages = 0
        self.evicted = 0  # pages, since the start
        self.version = 0  # changes whenever a match may
        self.events = EventLog()
        self._page_bytes = page_size * TOKEN_BYTES
        self._pool = pool
        self._clock = clock
        self._queue = EvictionQueue(policy)
        self._make_hasher = hasher
        self._hashers: dict[str, BlockHasher] = {}
        self._roots: dict[Scope, Node] = {}
        self._tick = 0

    # ---- matching ------------------------------------------------------------------------------

    def root(self, scope: Scope) -> Node:
        """The root of a scope; it lives while locked or while something hangs from it."""
        node = self._roots.get(scope)
        if node is None:
            hasher = self._hasher(scope)
            node = Node(scope, None, b"", [], b"" if hasher is None else hasher.root)
            self._roots[scope] = node
        return node

    def peek(self, scope: Scope, tokens: bytes, limit: int) -> tuple[Node | None, int]:
        """The deepest node that `tokens` reach, and how many pages match; changes nothing.

        Args:
            limit: most pages to match. The match may end inside the node.
        """
        root = self._roots.get(scope)
        if root is None:
            return None, 0
        return self._descend(root, tokens, limit)

    def match(self, scope: Scope, tokens: bytes, limit: int) -> Node:
        """The node that ends where the match of at most `limit` pages ends; split off if need be.

        The caller locks it before anything else may evict.
        """
        node, depth = self._descend(self.root(scope), tokens, limit)
        return self._split(node, depth) if depth < node.end else node

    def _descend(self, node: Node, tokens: bytes, limit: int) -> tuple[Node, int]:
        size = self._page_bytes
        depth = node.end
        while depth < limit:
            child = node.children.get(tokens[depth * size : (depth + 1) * size])
            if child is None:
                break
            count = min(len(child.pages), limit - depth)
            same = common_pages(child.key, 0, tokens, depth, count, size)
            depth += same
            node = child
            if same < len(child.pages):
                break
        return node, depth

    @staticmethod
    def path_pages(node: Node) -> list[int]:
        """The pages of a node and its ancestors, in token order."""
        parts = [node.pages]
        while node.parent is not None:
            node = node.parent
            parts.append(node.pages)
        return [page for part in reversed(parts) for page in part]

    @staticmethod
    def unlocked_pages(node: Node | None) -> int:
        """How many evictable pages a lock on `node` would pin."""
        count = 0
        while node is not None and node.locks == 0:
            count += len(node.pages)
            node = node.parent
        return count

    @staticmethod
    def shared_pages(node: Node | None) -> int:
        """How many pages of the path stay locked when one holder lets go."""
        while node is not None and node.locks <= 1:
            node = node.parent
        return 0 if node is None else node.end

    # ---- locks ---------------------------------------------------------------------------------

    def lock(self, node: Node) -> None:
        """Pin a path: none of its pages can be evicted until as many `unlock`s."""
        step: Node | None = node
        while step is not None:
            if step.locks == 0:
                self.evictable -= len(step.pages)
                self._queue.discard(step)
            step.locks += 1
            step = step.parent

    @staticmethod
    def record_hit(node: Node, priority: int) -> None:
        """A request reuses a locked path; LFU and priority eviction remember."""
        step: Node | None = node
        while step is not None:
            step.hits += 1
            step.priority = max(step.priority, priority)
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Let a path go. Steps launched so far may still read its pages."""
        self._tick += 1
        step: Node | None = node
        while step is not None:
            step.locks -= 1
            step.used = self._tick
            step.fence = self._clock.launched
            if step.locks == 0:
                self.evictable += len(step.pages)
                self._settle(step)
            step = step.parent

    def forget_if_empty(self, node: Node | None) -> None:
        """`node` came from `root` or `match` and was not locked: drop it if it is a bare root."""
        if node is not None and node.parent is None:
            self._settle(node)

    def _settle(self, node: Node) -> None:
        """Queue an unlocked leaf for eviction; forget a root that nobody needs."""
        if node.children or node.locks:
            return
        if node.parent is not None:
            self._queue.add(node)
        elif self._roots.get(node.scope) is node:
            del self._roots[node.scope]

    # ---- growth --------------------------------------------------------------------------------

    def extend(
        self, node: Node, tokens: bytes, pages: list[int], end: int, priority: int = 0
    ) -> Node:
        """Publish a running request's pages [node.end, end) below its locked `node`.

        Stops (returns `node`) where another request's copy is already there: a running request
        keeps its own pages, since its page table is never rewritten. Otherwise the tree owns them
        from now on, and the caller's lock moves to the node returned, which ends at `end`.
        """
        start = node.end
        size = self._page_bytes
        if end <= start or tokens[start * size : (start + 1) * size] in node.children:
            return node
        return self._attach(node, tokens, pages[start:end], end, priority)

    def absorb(
        self, node: Node, tokens: bytes, pages: list[int], end: int, priority: int = 0
    ) -> list[int]:
        """A request leaves: keep what is new of its computed pages [node.end, end), drop its lock.

        Returns:
            Its duplicates of pages that the tree holds already; they stay the caller's.
        """
        reached, depth = self._descend(node, tokens, end)
        if depth < reached.end:
            reached = self._split(reached, depth)
        duplicates = pages[node.end : depth]
        self.lock(reached)
        self.unlock(node)
        if depth < end:
            reached = self._attach(reached, tokens, pages[depth:end], end, priority)
        self.unlock(reached)
        return duplicates

    def _attach(self, node: Node, tokens: bytes, pages: list[int], end: int, priority: int) -> Node:
        """Hang pages [node.end, end) below `node`, which the caller has locked; moves the lock."""
        size = self._page_bytes
        start = node.end
        key = tokens[start * size : end * size]
        self._pool.adopt(pages)
        self.num_pages += len(pages)
        self.version += 1
        if node.parent is not None and node.locks == 1 and not node.children:
            # Nobody else knows this leaf: growing it keeps a long prefill from leaving a chain.
            node.key += key
            node.pages += pages
        else:
            child = Node(node.scope, node, key, pages, node.tail)
            self._tick += 1
            child.created = child.used = self._tick
            child.hits = 1
            child.priority = priority
            child.locks = 1
            node.children[key[:size]] = child
            node = child
        self._hash(node, tokens, start)
        return node

    def _split(self, node: Node, depth: int) -> Node:
        """Cut a node at page `depth`; returns the new upper part.

        The lower part keeps its identity: locks are held on nodes by their end.
        """
        parent = node.parent
        assert parent is not None, "a root has no pages to split"
        size = self._page_bytes
        head = depth - node.start
        upper = Node(node.scope, parent, node.key[: head * size], node.pages[:head], parent.tail)
        upper.locks, upper.hits, upper.priority = node.locks, node.hits, node.priority
        upper.created, upper.used, upper.fence = node.created, node.used, node.fence
        parent.children[node.key[:size]] = upper

        hashed = self._blocks_before(node.scope, depth) - self._blocks_before(
            node.scope, node.start
        )
        upper.hashes = node.hashes[: hashed * HASH_BYTES]
        upper.tail = upper.hashes[-HASH_BYTES:] or parent.tail
        node.hashes = node.hashes[hashed * HASH_BYTES :]

        node.parent = upper
        node.start = depth
        node.key = node.key[head * size :]
        node.pages = node.pages[head:]
        upper.children[node.key[:size]] = node
        self.version += 1
        return upper

    # ---- eviction ------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        """Give up to `count` pages back to the pool, the policy's first, tail pages first.

        Returns:
            How many left the tree; those that a running step may read are retired, not yet free.
        """
        left = count
        while left > 0 and (node := self._queue.pop()) is not None:
            gone = min(left, len(node.pages))
            self._trim(node, gone)
            left -= gone
            parent = node.parent
            if node.pages:
                self._queue.add(node)
            elif parent is not None:
                # The children are keyed by their first page, which `_trim` leaves to us.
                self._drop(node, parent)
        if left < count:
            self.evicted += count - left
            self.version += 1
        return count - left

    def is_queued(self, node: Node) -> bool:
        """Whether `node` is among the candidates for eviction."""
        return node in self._queue

    def _trim(self, node: Node, count: int) -> None:
        gone = node.pages[-count:]
        end = node.end - count
        kept = self._blocks_before(node.scope, end) - self._blocks_before(node.scope, node.start)
        self.events.removed(node.scope.domain, node.hashes[kept * HASH_BYTES :])
        node.hashes = node.hashes[: kept * HASH_BYTES]
        if node.parent is not None:
            node.tail = node.hashes[-HASH_BYTES:] or node.parent.tail
        del node.pages[-count:]
        if node.pages:
            node.key = node.key[: len(node.pages) * self._page_bytes]
        self.num_pages -= count
        self.evictable -= count
        self._pool.release(gone, Owner.TREE, node.fence)

    def _drop(self, node: Node, parent: Node) -> None:
        del parent.children[node.key[: self._page_bytes]]
        if parent.locks == 0:
            self._settle(parent)

    # ---- index blocks --------------------------------------------------------------------------

    def _hasher(self, scope: Scope) -> BlockHasher | None:
        if self._make_hasher is None:
            return None
        hasher = self._hashers.get(scope.namespace)
        if hasher is None:
            hasher = self._make_hasher(scope.namespace)
            if hasher.block_size % self.page_size:
                raise ValueError(
                    f"an index block of {hasher.block_size} tokens is no multiple of the page of "
                    f"{self.page_size}"
                )
            self._hashers[scope.namespace] = hasher
        return hasher

    def _blocks_before(self, scope: Scope, depth: int) -> int:
        """Index blocks that end within the first `depth` pages."""
        hasher = self._hasher(scope)
        return 0 if hasher is None else depth * self.page_size // hasher.block_size

    def _hash(self, node: Node, tokens: bytes, start: int) -> None:
        """Hash the blocks that end in pages [start, node.end), new to the tree."""
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
        self.events.stored(node.scope.domain, hashes)

    def blocks(self) -> Iterator[tuple[str, bytes]]:
        """(domain, packed hashes) of everything cached, parents first."""
        for node in self.nodes():
            if node.hashes:
                yield node.scope.domain, node.hashes

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first, roots included."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


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

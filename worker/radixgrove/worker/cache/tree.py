"""The radix tree of cached prefixes, one root per namespace and sharing domain.

Page-granular: a node's tokens are a whole number of pages, and its children are keyed by their
first page's tokens, so that nodes split at page boundaries only. Locks count the requests whose
prefix ends at or below a node: a parent has at least as many as each child, hence what is unlocked
can always be evicted leaf by leaf.

With a host tier, what leaves the device stays in the tree if the host has, or gets, a copy. Such
nodes hang below those on the device; they come back by a load, or when a request computes their
tokens anew. A node that is being loaded is not matched before the load has ended.

Token ids are int32 little-endian bytes throughout; comparing slices of them is a `memcmp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from radixgrove.protocol.blocks import TOKEN_BYTES, BlockHasher
from radixgrove.protocol.settings import EvictionPolicy
from radixgrove.worker.cache.events import EventLog
from radixgrove.worker.cache.eviction import EvictionQueue
from radixgrove.worker.cache.host_tier import HostTier
from radixgrove.worker.cache.index import BlockIndex
from radixgrove.worker.cache.node import CacheScope, TreeNode
from radixgrove.worker.cache.pool import Owner, PagePool
from radixgrove.worker.cache.timeline import Fence, Timeline
from radixgrove.worker.messages import Tier

# Of a node that moves to the host at least so many pages go at once, and such a share: shorter
# pieces would leave long chains of small nodes, and a look at each takes its time.
_PAGES_A_MOVE = 32
_MOVES_A_NODE = 16


class RadixTree:
    """Which prefixes the pool holds. It owns the pages of its nodes, and gives them up by `evict`.

    `hasher` makes the chain hashes of a namespace's index blocks; None when nobody listens to
    cache events. Its block size must be a multiple of the page size.
    """

    def __init__(
        self,
        pool: PagePool,
        timeline: Timeline,
        page_size: int,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        hasher: Callable[[str], BlockHasher] | None = None,
        host: HostTier | None = None,
    ) -> None:
        self.page_size = page_size
        self.evictable = 0  # device pages of unlocked nodes
        self.num_pages = 0  # on the device
        self.evicted = 0  # pages that left the device, since the start
        self.version = 0  # changes whenever a match may
        self._page_bytes = page_size * TOKEN_BYTES
        self._pool = pool
        self._clock = timeline
        self._queue = EvictionQueue(policy)  # unlocked nodes whose children are not on the device
        self._index = BlockIndex(page_size, hasher)
        self._host = host
        self._roots: dict[CacheScope, TreeNode] = {}
        self._tick = 0

    @property
    def events(self) -> EventLog:
        return self._index.events

    # ---- matching ------------------------------------------------------------------------------

    def root(self, scope: CacheScope) -> TreeNode:
        """The root of a scope; it lives while locked or while something hangs from it."""
        node = self._roots.get(scope)
        if node is None:
            node = self._roots[scope] = TreeNode(scope, None, b"", [], self._index.root(scope))
        return node

    def peek(self, scope: CacheScope, tokens: bytes, limit: int) -> tuple[TreeNode | None, int]:
        """The deepest node on the device that `tokens` reach, and how many pages match; changes
        nothing.

        Args:
            limit: most pages to match. The match may end inside the node.
        """
        root = self._roots.get(scope)
        if root is None:
            return None, 0
        return self._descend(root, tokens, limit, self._on_device)

    def peek_below(self, node: TreeNode, depth: int, tokens: bytes, limit: int) -> int:
        """How many pages match once those on the host, and those on their way, are counted too.

        Args:
            node, depth: as `peek` answered.
        """
        if depth < node.end:
            return depth
        return self._descend(node, tokens, limit, _anywhere)[1]

    def awaits_load(self, node: TreeNode, depth: int, tokens: bytes, limit: int) -> bool:
        """Whether the first page that `peek` did not match is being loaded."""
        if depth < node.end or depth >= limit:
            return False
        child = node.children.get(self._page(tokens, depth))
        return child is not None and bool(child.pages) and not self._on_device(child)

    def match(self, scope: CacheScope, tokens: bytes, limit: int) -> TreeNode:
        """The node that ends where the match of at most `limit` pages ends; split off if need be.

        The caller locks it before anything else may evict.
        """
        node, depth = self._descend(self.root(scope), tokens, limit, self._on_device)
        return self._split(node, depth) if depth < node.end else node

    def match_host(self, node: TreeNode, tokens: bytes, limit: int) -> TreeNode:
        """Where the match of `tokens`, which end at `node` on the device, ends on the host.

        Between the two are nodes on the host alone, for `load`. `node` itself when there are none.
        """
        below, depth = self._descend(node, tokens, limit, _on_host)
        return self._split(below, depth) if depth < below.end else below

    def _descend(
        self, node: TreeNode, tokens: bytes, limit: int, enters: Callable[[TreeNode], bool]
    ) -> tuple[TreeNode, int]:
        size = self._page_bytes
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

    def _on_device(self, node: TreeNode) -> bool:
        return bool(node.pages) and node.loaded_by <= self._clock.loads_ended

    def _page(self, tokens: bytes, depth: int) -> bytes:
        """The tokens of page `depth`."""
        return tokens[depth * self._page_bytes : (depth + 1) * self._page_bytes]

    @staticmethod
    def path_pages(node: TreeNode) -> list[int]:
        """The device pages of a node and its ancestors, in token order."""
        parts = [node.pages]
        while node.parent is not None:
            node = node.parent
            parts.append(node.pages)
        return [page for part in reversed(parts) for page in part]

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

    # ---- locks ---------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """Pin a path: none of its pages can be evicted until as many `unlock`s."""
        step: TreeNode | None = node
        while step is not None:
            self._pin(step)
            step = step.parent

    def _pin(self, node: TreeNode) -> None:
        """One lock more on a node, of which its ancestors have theirs."""
        if node.ref_count == 0:
            self.evictable -= len(node.pages)
            self._queue.discard(node)
            if self._host is not None:
                self._host.queue.discard(node)
        node.ref_count += 1

    def record_hit(self, node: TreeNode, priority: int) -> None:
        """A request reuses a locked path; LFU, priority eviction and selective saves remember."""
        step: TreeNode | None = node
        while step is not None:
            step.hits += 1
            step.priority = max(step.priority, priority)
            if self._host is not None and step.parent is not None:
                self._host.used_again(step)
            step = step.parent

    def unlock(self, node: TreeNode) -> None:
        """Let a path go. Steps launched so far may still read its pages."""
        self._tick += 1
        step: TreeNode | None = node
        while step is not None:
            step.ref_count -= 1
            step.used = self._tick
            step.fence = self._clock.launched
            if step.ref_count == 0:
                self.evictable += len(step.pages)
                self._settle(step)
            step = step.parent

    def forget_if_empty(self, node: TreeNode | None) -> None:
        """`node` came from `root` or `match` and was not locked: drop it if it is a bare root."""
        if node is not None and node.parent is None:
            self._settle(node)

    def _settle(self, node: TreeNode) -> None:
        """Queue a node for eviction from where it may go; forget a root that nobody needs."""
        if node.ref_count:
            return
        if node.parent is None:
            if not node.children and self._roots.get(node.scope) is node:
                del self._roots[node.scope]
            return
        if node.pages and not node.device_children and node not in self._queue:
            self._queue.add(node)
        host = self._host
        if host is not None:
            host.full_grown(node)
            if node.host and not node.host_children and node not in host.queue:
                host.queue.add(node)

    # ---- growth --------------------------------------------------------------------------------

    def extend(
        self, node: TreeNode, tokens: bytes, pages: list[int], end: int, priority: int = 0
    ) -> TreeNode:
        """Publish a running request's pages [node.end, end) below its locked `node`.

        Stops where another request's copy is on the device already: a running request keeps its
        own pages, since its page table is never rewritten. The tree owns what it takes from now on,
        and the caller's lock moves to the node returned, which ends there.
        """
        while node.end < end:
            child = node.children.get(self._page(tokens, node.end))
            if child is None:
                return self._attach(node, tokens, pages[node.end : end], end, priority)
            if child.pages:
                break
            child = self._common_part(child, tokens, end)
            self._pin(child)
            self._fill(child, pages[child.start : child.end])
            node = child
        return node

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
            child = reached.children.get(self._page(tokens, reached.end))
            if child is None:
                break
            child = self._common_part(child, tokens, end)
            its = pages[child.start : child.end]
            if child.pages:
                duplicates += its
            else:
                self._fill(child, its)
            reached = child
        self.lock(reached)
        self.unlock(node)
        if reached.end < end:
            reached = self._attach(reached, tokens, pages[reached.end : end], end, priority)
        self.unlock(reached)
        return duplicates

    def _common_part(self, child: TreeNode, tokens: bytes, end: int) -> TreeNode:
        """What of `child` the first `end` pages of `tokens` share, split off if need be."""
        count = min(child.size, end - child.start)
        same = common_pages(child.key, 0, tokens, child.start, count, self._page_bytes)
        return self._split(child, child.start + same) if same < child.size else child

    def _attach(
        self, node: TreeNode, tokens: bytes, pages: list[int], end: int, priority: int
    ) -> TreeNode:
        """Hang pages [node.end, end) below `node`, which the caller has locked; moves the lock."""
        size = self._page_bytes
        start = node.end
        key = tokens[start * size : end * size]
        self._pool.adopt(pages)
        self.num_pages += len(pages)
        self.version += 1
        if node.parent is not None and node.ref_count == 1 and not node.children and not node.host:
            # Nobody else knows this leaf: growing it keeps a long prefill from leaving a chain.
            node.key += key
            node.pages += pages
            node.size += len(pages)
        else:
            child = TreeNode(node.scope, node, key, pages, node.tail)
            self._tick += 1
            child.created = child.used = self._tick
            child.hits = 1
            child.priority = priority
            child.ref_count = 1
            node.children[key[:size]] = child
            node.device_children += 1
            if self._host is not None:
                self._host.full_grown(node)
            node = child
        self._index.grown(node, tokens, start)
        if self._host is not None:
            self._host.computed(node)
        return node

    def _fill(self, node: TreeNode, pages: list[int]) -> None:
        """A request computed what only the host had: its pages bring the node back."""
        self._pool.adopt(pages)
        self._arrive(node, pages)

    def _arrive(self, node: TreeNode, pages: list[int]) -> None:
        """A node of the host is on the device too, in `pages`, which the tree owns."""
        parent = node.parent
        assert parent is not None, "a root has no pages"
        node.pages = pages
        parent.device_children += 1
        self._queue.discard(parent)
        self.num_pages += len(pages)
        self.version += 1
        self._index.moved(node, Tier.GPU)
        if node.ref_count == 0:
            self.evictable += len(pages)
            self._settle(node)

    def _split(self, node: TreeNode, depth: int) -> TreeNode:
        """Cut a node at page `depth`; returns the new upper part.

        The lower part keeps its identity: locks are held on nodes by their end.
        """
        parent = node.parent
        assert parent is not None, "a root has no pages to split"
        size = self._page_bytes
        head = depth - node.start
        upper = TreeNode(
            node.scope, parent, node.key[: head * size], node.pages[:head], parent.tail
        )
        upper.size = head
        upper.ref_count, upper.hits, upper.priority = node.ref_count, node.hits, node.priority
        upper.created, upper.used, upper.fence = node.created, node.used, node.fence
        upper.loaded_by = node.loaded_by
        upper.device_children = int(bool(node.pages))
        parent.children[node.key[:size]] = upper
        self._index.split(upper, node, parent)

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

    # ---- eviction ------------------------------------------------------------------------------

    def evict(self, count: int, *, keep: bool = True) -> int:
        """Give up to `count` device pages back to the pool, the policy's first, tail pages first.

        Args:
            keep: what the host holds, or is to hold, stays in the tree. Then somewhat more than
                `count` may go, to move in pieces worth their while.

        Returns:
            How many left; those that a step or a copy may touch are retired, not yet free.
        """
        gone = 0
        moves = keep and self._host is not None
        while gone < count and (node := self._queue.pop()) is not None:
            wanted = _piece(node, count - gone) if moves else count - gone
            if wanted < node.size:
                self._split(node, node.end - wanted)
            gone += node.size
            self._leave_device(node, keep)
        self.evicted += gone
        return gone

    def drop_host(self, count: int) -> None:
        """Give up to `count` of the host's pages back, the policy's first, tail pages first."""
        host = self._host
        while host is not None and count > 0 and (node := host.queue.pop()) is not None:
            wanted = _piece(node, count)
            if wanted < node.size:
                self._split(node, node.end - wanted)
            count -= node.size
            self._leave_host(node)

    def clear(self) -> None:
        """Drop every page that nobody has locked, wherever it is."""
        self.evict(self.evictable, keep=False)
        if self._host is not None:
            self.drop_host(self._host.pool.num_pages)

    def is_queued(self, node: TreeNode) -> bool:
        """Whether `node` is among the candidates for eviction from the device."""
        return node in self._queue

    def _leave_device(self, node: TreeNode, keep: bool) -> None:
        """An unlocked node, whose children have left already."""
        parent = node.parent
        assert parent is not None, "a root has no pages"
        host = self._host
        # A load may outlive the host's copy; until it has ended there is nothing to save.
        savable = keep and not node.host and self._on_device(node)
        if savable and host is not None and host.saves_on_leaving(node):
            self._save(node)
        stays = keep and bool(node.host)
        if not stays:
            for child in list(node.children.values()):
                self._drop_below(child)
        self._queue.discard(node)  # making room on the host may have put it back
        fence = Fence(node.fence, node.saved_by, node.loaded_by)
        self._pool.release(node.pages, Owner.TREE, fence)
        self.num_pages -= node.size
        self.evictable -= node.size
        parent.device_children -= 1
        self.version += 1
        if stays:
            self._index.moved(node, Tier.HOST)
            node.pages = []
            self._settle(node)
        else:
            self._index.removed(node, Tier.GPU)
            self._remove(node)
        self._settle(parent)

    def _leave_host(self, node: TreeNode) -> None:
        """An unlocked node without children on the host."""
        assert self._host is not None
        parent = node.parent
        assert parent is not None, "a root has no pages"
        self.version += 1
        if node.pages:
            self._host.release(node)
            parent.host_children -= 1
        else:
            self._index.removed(node, Tier.HOST)
            self._remove(node)
        self._settle(parent)

    def _drop_below(self, node: TreeNode) -> None:
        """Take a subtree that is on the host alone out of the tree, leaves first."""
        subtree = [node]
        for step in subtree:  # grows meanwhile; a chain may be deeper than Python's stack
            subtree.extend(step.children.values())
        for step in reversed(subtree):
            self._index.removed(step, Tier.HOST)
            self._remove(step)

    def _remove(self, node: TreeNode) -> None:
        """Unhang a node without children, and forget its copy on the host."""
        parent = node.parent
        assert parent is not None, "roots are forgotten, not removed"
        if self._host is not None:
            parent.host_children -= bool(node.host)
            self._host.release(node)
        del parent.children[self._page(node.key, 0)]

    # ---- host ----------------------------------------------------------------------------------

    def load(self, node: TreeNode, below: TreeNode, pages: list[int]) -> int:
        """Bring the nodes between `node` and `below`, which `match_host` found, back to the device.

        Args:
            below: locked by the caller.
            pages: as many of the device as these nodes hold, allocated for this.

        Returns:
            The load's id; the nodes match once it has ended.
        """
        assert self._host is not None
        path = []
        while below is not node:
            path.append(below)
            assert below.parent is not None, "`node` is an ancestor"
            below = below.parent
        path.reverse()
        self._pool.adopt(pages)
        first = node.end
        for step in path:
            self._arrive(step, pages[step.start - first : step.end - first])
        return self._host.load(path)

    def save_wanted(self) -> None:
        """Copy nodes to the host ahead of need, as the write policy wants, while there is room."""
        host = self._host
        while host is not None and (node := host.next_wanted()) is not None:
            if node.size > host.room_in_save:
                node = self._split(node, node.start + host.room_in_save)
            if not self._save(node):
                return

    def _save(self, node: TreeNode) -> bool:
        """Copy a node to the host if it has, or can make, room."""
        host = self._host
        assert host is not None
        short = node.size - host.pool.free - host.pool.retired
        if short > 0 and node.size <= host.pool.num_pages:
            self.drop_host(short)
        if host.pool.free < node.size:
            return False
        host.save(node)
        parent = node.parent
        assert parent is not None, "a root has no pages"
        parent.host_children += 1
        host.queue.discard(parent)
        self._settle(node)
        return True

    # ---- contents ------------------------------------------------------------------------------

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


def _piece(node: TreeNode, count: int) -> int:
    """How many pages of a node move at once when `count` must."""
    return max(count, _PAGES_A_MOVE, node.size // _MOVES_A_NODE)


def _on_host(node: TreeNode) -> bool:
    return not node.pages


def _anywhere(node: TreeNode) -> bool:
    return True


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

"""Where the nodes of the radix tree are, and what moves them: the device, the host, or nowhere.

Locks count the requests with a prefix that ends at or below a node: a parent has at least as many
as each child, hence what is unlocked can always be evicted leaf by leaf.

With a host tier, what leaves the device stays in the tree if the host has, or gets, a copy. Such
nodes hang below those on the device; they come back by a load, or when a request computes their
tokens anew. A node that is being loaded is not matched before the load has ended.
"""

from __future__ import annotations

from radixgrove.protocol.settings import EvictionPolicy
from radixgrove.worker.cache.eviction import EvictionQueue
from radixgrove.worker.cache.host_tier import HostTier
from radixgrove.worker.cache.node import TreeNode
from radixgrove.worker.cache.pool import Owner, PagePool
from radixgrove.worker.cache.structure import TreeStructure
from radixgrove.worker.cache.timeline import Fence, Timeline
from radixgrove.worker.messages import Tier

# Of a node that moves to the host at least so many pages go at once, and such a share: shorter
# pieces would leave long chains of small nodes, and a look at each takes its time.
_PAGES_A_MOVE = 32
_MOVES_A_NODE = 16


class Residency:
    """Owns the pages of a tree's nodes on the device, and gives them up by `evict`."""

    def __init__(
        self,
        structure: TreeStructure,
        pool: PagePool,
        timeline: Timeline,
        policy: EvictionPolicy,
        host: HostTier | None,
    ) -> None:
        self.evictable = 0  # device pages of unlocked nodes
        self.num_pages = 0  # on the device
        self.evicted = 0  # pages that left the device, since the start
        self._structure = structure
        self._pool = pool
        self._clock = timeline
        self._queue = EvictionQueue(policy)  # unlocked nodes without children on the device
        self._host = host

    def on_device(self, node: TreeNode) -> bool:
        return bool(node.pages) and node.loaded_by <= self._clock.loads_ended

    # ---- locks ---------------------------------------------------------------------------------

    def lock(self, node: TreeNode) -> None:
        """Pin a path: none of its pages can be evicted until as many `unlock`s."""
        step: TreeNode | None = node
        while step is not None:
            self.pin(step)
            step = step.parent

    def pin(self, node: TreeNode) -> None:
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
        now = self._structure.tick()
        step: TreeNode | None = node
        while step is not None:
            step.ref_count -= 1
            step.used = now
            step.fence = self._clock.launched
            if step.ref_count == 0:
                self.evictable += len(step.pages)
                self.settle(step)
            step = step.parent

    def settle(self, node: TreeNode) -> None:
        """Queue a node for eviction from where it may go; forget a root without a use."""
        if node.ref_count:
            return
        if node.parent is None:
            self._structure.forget_if_bare(node)
            return
        if node.pages and not node.device_children and node not in self._queue:
            self._queue.add(node)
        host = self._host
        if host is not None:
            host.full_grown(node)
            if node.host and not node.host_children and node not in host.queue:
                host.queue.add(node)

    # ---- arriving ------------------------------------------------------------------------------

    def adopt(self, pages: list[int]) -> None:
        """Pages that a request has filled become those of a node that it holds."""
        self._pool.adopt(pages)
        self.num_pages += len(pages)

    def fill(self, node: TreeNode, pages: list[int]) -> None:
        """A request computed what only the host had: its pages bring the node back."""
        self._pool.adopt(pages)
        self._arrive(node, pages)

    def replace(self, node: TreeNode, pages: list[int]) -> None:
        """A request's pages take the place of those of a node that it alone holds."""
        self._pool.adopt(pages)
        self._pool.release(node.pages, Owner.TREE, Fence(node.fence))
        node.pages = pages
        self._structure.version += 1

    def _arrive(self, node: TreeNode, pages: list[int]) -> None:
        """A node of the host is on the device too, in `pages`, which the tree owns."""
        parent = node.parent
        assert parent is not None, "a root has no pages"
        node.pages = pages
        parent.device_children += 1
        self._queue.discard(parent)
        self.num_pages += len(pages)
        self._structure.version += 1
        self._structure.index.moved(node, Tier.GPU)
        if node.ref_count == 0:
            self.evictable += len(pages)
            self.settle(node)

    # ---- leaving -------------------------------------------------------------------------------

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
                self._structure.split(node, node.end - wanted)
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
                self._structure.split(node, node.end - wanted)
            count -= node.size
            self._leave_host(node)

    def clear(self) -> None:
        """Drop every unlocked page, of the device and of the host."""
        self.evict(self.evictable, keep=False)
        if self._host is not None:
            self.drop_host(self._host.pool.num_pages)

    def drop_spoiled(self, node: TreeNode, start: int) -> None:
        """Drop pages from `start` on of the path that ends at `node`, and all below: they hold NaN.

        What others have locked stays until one of them calls this: they come to hold NaN as well.
        """
        doomed: TreeNode | None = None
        step = node
        while step.parent is not None:
            if step.start < start < step.end:
                self._structure.split(step, start)
            if step.start >= start or step.spoiled:
                doomed = step
            step = step.parent
        if doomed is None:
            return
        subtree = [doomed]
        for step in subtree:  # grows meanwhile
            subtree.extend(step.children.values())
        for step in reversed(subtree):
            if step.ref_count:
                step.spoiled = True
            elif step.pages:
                self._leave_device(step, keep=False)
            else:
                self._leave_host(step)

    def is_queued(self, node: TreeNode) -> bool:
        """Whether `node` is among the candidates for eviction from the device."""
        return node in self._queue

    def _leave_device(self, node: TreeNode, keep: bool) -> None:
        """An unlocked node; its children have left already."""
        parent = node.parent
        assert parent is not None, "a root has no pages"
        host = self._host
        # A load may outlive the host's copy; until it has ended there is nothing to save.
        savable = keep and not node.host and self.on_device(node)
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
        self._structure.version += 1
        if stays:
            self._structure.index.moved(node, Tier.HOST)
            node.pages = []
            self.settle(node)
        else:
            self._structure.index.removed(node, Tier.GPU)
            self._structure.remove(node)
        self.settle(parent)

    def _leave_host(self, node: TreeNode) -> None:
        """An unlocked node without children on the host."""
        assert self._host is not None
        parent = node.parent
        assert parent is not None, "a root has no pages"
        self._structure.version += 1
        if node.pages:
            self._host.release(node)
            parent.host_children -= 1
        else:
            self._structure.index.removed(node, Tier.HOST)
            self._structure.remove(node)
        self.settle(parent)

    def _drop_below(self, node: TreeNode) -> None:
        """Take a subtree that is on the host alone out of the tree, leaves first."""
        subtree = [node]
        for step in subtree:  # grows meanwhile; a chain may be deeper than Python's stack
            subtree.extend(step.children.values())
        for step in reversed(subtree):
            self._structure.index.removed(step, Tier.HOST)
            self._structure.remove(step)

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
                node = self._structure.split(node, node.start + host.room_in_save)
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
        self.settle(node)
        return True


def _piece(node: TreeNode, count: int) -> int:
    """How many pages of a node move at once when `count` must."""
    return max(count, _PAGES_A_MOVE, node.size // _MOVES_A_NODE)

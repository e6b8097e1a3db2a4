"""The second tier: which cached pages the host holds, and the copies to and from it.

The tree decides what leaves the device and what comes back; this module knows where it lies on the
host, what goes first there, and what the next plan must launch. Saves and loads made out here are
launched by `take`, each kind in the order of its ids.
"""

from __future__ import annotations

from collections import OrderedDict

from radixgrove.protocol.settings import EvictionPolicy, HostWritePolicy
from radixgrove.worker.cache.eviction import EvictionQueue
from radixgrove.worker.cache.node import TreeNode
from radixgrove.worker.cache.pool import Owner, PagePool
from radixgrove.worker.cache.timeline import Fence, Timeline
from radixgrove.worker.plan import PageCopies

# Saves ahead of need are kept short, so that what they read is soon free to go.
_PAGES_A_SAVE = 256
_SAVES_IN_FLIGHT = 2
_HITS_WORTH_SAVING = 2  # the first is the request that computed it


class HostTier:
    """Owns the host's pages and hands them to nodes."""

    def __init__(
        self, num_pages: int, timeline: Timeline, policy: HostWritePolicy, eviction: EvictionPolicy
    ) -> None:
        self.pool = PagePool(num_pages, timeline)
        self.queue = EvictionQueue(eviction)  # unlocked nodes without children here
        self.saved = 0  # pages, since the start
        self.loaded = 0
        self._policy = policy
        self._clock = timeline
        self._pages_a_save = max(1, min(_PAGES_A_SAVE, num_pages // 4))  # room for several
        self._growing: set[TreeNode] = set()  # leaves in use: cut up now, they would leave chains
        # To be saved, the oldest wish first. A dict is slow to find its first after many have left.
        self._wanted: OrderedDict[TreeNode, None] = OrderedDict()
        self._save = PageCopies(0, [], [])
        self._loads: list[PageCopies] = []

    # ---- what to save --------------------------------------------------------------------------

    def computed(self, node: TreeNode) -> None:
        """A request filled pages of a leaf that it holds."""
        if self._policy is HostWritePolicy.WRITE_THROUGH:
            self._want(node)

    def used_again(self, node: TreeNode) -> None:
        """A request that holds the node met it in the cache."""
        selective = self._policy is HostWritePolicy.WRITE_THROUGH_SELECTIVE
        if selective and not node.host and node.hits >= _HITS_WORTH_SAVING:
            self._want(node)

    def _want(self, node: TreeNode) -> None:
        if node.children:
            self._wanted[node] = None
        else:
            self._wanted.pop(node, None)
            self._growing.add(node)

    def full_grown(self, node: TreeNode) -> None:
        """The node has no holder left, or it has a child."""
        if node in self._growing:
            self._growing.remove(node)
            self._wanted[node] = None

    def saves_on_leaving(self, node: TreeNode) -> bool:
        """Whether a node that has no copy here yet must get one before the device forgets it."""
        return self._policy is HostWritePolicy.WRITE_BACK or node in self._wanted

    def split(self, upper: TreeNode, lower: TreeNode, head: int) -> None:
        """`upper` took the first `head` pages of `lower`."""
        upper.host, lower.host = lower.host[:head], lower.host[head:]
        upper.saved_by = lower.saved_by
        upper.host_children = int(bool(lower.host))
        if lower in self._wanted or lower in self._growing:
            self._wanted[upper] = None

    def next_wanted(self) -> TreeNode | None:
        """A node to save ahead of need; None when there is none, or enough is under way."""
        in_flight = self._clock.saves_launched - self._clock.saves_ended
        if in_flight >= _SAVES_IN_FLIGHT or self.room_in_save == 0:
            return None
        return next(iter(self._wanted), None)

    @property
    def room_in_save(self) -> int:
        return max(0, self._pages_a_save - len(self._save.pages))

    # ---- copies --------------------------------------------------------------------------------

    def save(self, node: TreeNode) -> None:
        """Copy the node's pages here with the next plan; the pool has as many free."""
        pages = self.pool.allocate(node.size)
        self.pool.adopt(pages)
        node.host = pages
        node.saved_by = self._clock.saves_launched + 1
        self._save.pages += node.pages
        self._save.host_pages += pages
        self._wanted.pop(node, None)
        self.saved += node.size

    def load(self, path: list[TreeNode]) -> int:
        """Fill the new device pages of `path` from here with the next plan; the load's id."""
        load = PageCopies(self._clock.loads_launched + len(self._loads) + 1, [], [])
        for node in path:
            load.pages += node.pages
            load.host_pages += node.host
            load.after = max(load.after, node.saved_by)
            node.loaded_by = load.copy_id
        self._loads.append(load)
        self.loaded += len(load.pages)
        return load.copy_id

    def release(self, node: TreeNode) -> None:
        """Forget the copy of a node; its pages are free once no copy touches them."""
        self._wanted.pop(node, None)
        if node.host:
            self.queue.discard(node)
            self.pool.release(node.host, Owner.TREE, Fence(save=node.saved_by, load=node.loaded_by))
            node.host = []

    def take(self) -> tuple[list[PageCopies], list[PageCopies]]:
        """Saves and loads that the next plan launches."""
        saves, loads = [], self._loads
        if self._save.pages:
            self._clock.saves_launched += 1
            self._save.copy_id = self._clock.saves_launched
            saves = [self._save]
            self._save = PageCopies(0, [], [])
        self._clock.loads_launched += len(loads)
        self._loads = []
        return saves, loads

"""What must hold between any two calls of the scheduler. Tests check it after every step; the
engine does so at its pulse when it logs at debug level."""

from __future__ import annotations

from collections import Counter

from radixgrove.protocol.errors import Defect
from radixgrove.worker.cache.host_tier import HostTier
from radixgrove.worker.cache.node import TreeNode
from radixgrove.worker.cache.pool import Owner
from radixgrove.worker.cache.tree import RadixTree
from radixgrove.worker.cache.windows import WindowPages
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.request import RequestState, RunningRequest


class InvariantError(Defect):
    """The scheduler's books do not balance."""


def check_memory(memory: KVMemory, active: list[RunningRequest], held: list[TreeNode]) -> None:
    """Pages are conserved in each tier, each with one owner; locks are exactly those of `active`
    rows and of nodes `held` for requests that wait for their load.

    O(pages + nodes).

    Raises:
        PoolError, InvariantError: saying what is wrong.
    """
    of_requests: list[int] = []
    for row in active:
        cached = 0 if row.node is None else row.node.end
        of_requests += row.pages[cached:]
        if row.node is not None and memory.tree.path_pages(row.node) != row.pages[:cached]:
            raise InvariantError(f"{row.request.request_id}: its table differs from the tree")
        if not row.computed <= row.launched <= row.capacity == len(row.pages) * memory.page_size:
            raise InvariantError(f"{row.request.request_id}: lengths out of order")
        if row.request.state not in (RequestState.PREFILL, RequestState.DECODE):
            raise InvariantError(f"{row.request.request_id}: a row in state {row.request.state}")
    of_tree = [page for node in memory.tree.nodes() for page in node.pages]
    memory.pool.check(of_requests, of_tree)
    if memory.host is not None:
        memory.host.pool.check([], [page for node in memory.tree.nodes() for page in node.host])
    if memory.windows is not None:
        _check_windows(memory, memory.windows, active)
    ends = [row.node for row in active if row.node is not None]
    check_tree(memory.tree, ends + held, memory.host)


def _check_windows(memory: KVMemory, windows: WindowPages, active: list[RunningRequest]) -> None:
    """Window pages are conserved, and rows pin what they have written or may yet attend to."""
    pins: Counter[int] = Counter()
    for row in active:
        begin, end = row.window_from, row.window_to
        pins.update(row.pages[begin:end])
        if begin > windows.first_read(row.next_query) or end != memory.pages_for(row.launched):
            raise InvariantError(f"{row.request.request_id}: window pages {begin} to {end} only")
    pool = memory.pool
    unowned = (Owner.FREE, Owner.RETIRED)
    windows.check(pins, [page for page in range(pool.num_pages) if pool.owner(page) in unowned])


def check_tree(tree: RadixTree, locked: list[TreeNode], host: HostTier | None) -> None:
    """Raises InvariantError when the tree's structure, locks or counters are inconsistent."""
    ref_count: dict[int, int] = {}
    for end in locked:
        node: TreeNode | None = end
        while node is not None:
            ref_count[id(node)] = ref_count.get(id(node), 0) + 1
            node = node.parent
    evictable = total = 0
    for node in tree.nodes():
        total += len(node.pages)
        if node.ref_count != ref_count.get(id(node), 0):
            raise InvariantError(f"a node at page {node.start} counts {node.ref_count} locks")
        if node.ref_count == 0:
            evictable += len(node.pages)
        if len(node.key) != node.size * tree.page_size * 4:
            raise InvariantError(f"a node at page {node.start}: tokens and pages differ in number")
        for page, child in node.children.items():
            if child.parent is not node or not child.key.startswith(page):
                raise InvariantError(f"a child at page {child.start} is not its parent's")
        if node.device_children != sum(bool(child.pages) for child in node.children.values()):
            raise InvariantError(f"a node at page {node.start} miscounts its device's children")
        if node.host_children != sum(bool(child.host) for child in node.children.values()):
            raise InvariantError(f"a node at page {node.start} miscounts its host's children")
        if node.parent is not None:
            _check_tiers(node, node.parent)
        free = node.ref_count == 0
        if tree.residency.is_queued(node) != (
            free and bool(node.pages) and not node.device_children
        ):
            raise InvariantError(f"a node at page {node.start} is wrongly (un)queued for eviction")
        may_go = free and bool(node.host) and not node.host_children
        if host is not None and (node in host.queue) != may_go:
            raise InvariantError(f"a node at page {node.start} is wrongly (un)queued on the host")
    if (evictable, total) != (tree.residency.evictable, tree.residency.num_pages):
        raise InvariantError("the tree's page counters are off")


def _check_tiers(node: TreeNode, parent: TreeNode) -> None:
    if not node.size or node.start != parent.end:
        raise InvariantError(f"a node at page {node.start} does not follow its parent")
    if len(node.pages) not in (0, node.size) or len(node.host) not in (0, node.size):
        raise InvariantError(f"a node at page {node.start} is only partly in a tier")
    if not node.pages and not node.host:
        raise InvariantError(f"a node at page {node.start} is nowhere")
    if node.pages and not parent.pages and parent.parent is not None:
        raise InvariantError(f"a node at page {node.start} is on the device, its parent is not")

"""What must hold between any two calls of the scheduler. Tests check it after every step; the
engine does so at its pulse when it logs at debug level."""

from __future__ import annotations

from radixgrove.worker.cache.tree import RadixTree
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.request import ActiveRow, State


class InvariantError(Exception):
    """The scheduler's books do not balance."""


def check_memory(memory: KVMemory, active: list[ActiveRow]) -> None:
    """Pages are conserved, each with one owner; locks are exactly those of `active` rows.

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
        if row.request.state not in (State.PREFILL, State.DECODE):
            raise InvariantError(f"{row.request.request_id}: a row in state {row.request.state}")
    of_tree = [page for node in memory.tree.nodes() for page in node.pages]
    memory.pool.check(of_requests, of_tree)
    check_tree(memory.tree, active)


def check_tree(tree: RadixTree, active: list[ActiveRow]) -> None:
    """Raises InvariantError when the tree's structure, locks or counters are inconsistent."""
    locks: dict[int, int] = {}
    for row in active:
        node = row.node
        while node is not None:
            locks[id(node)] = locks.get(id(node), 0) + 1
            node = node.parent
    evictable = total = 0
    for node in tree.nodes():
        total += len(node.pages)
        if node.locks != locks.get(id(node), 0):
            raise InvariantError(f"a node at page {node.start} counts {node.locks} locks")
        if node.locks == 0:
            evictable += len(node.pages)
        if node.parent is not None and (not node.pages or node.start != node.parent.end):
            raise InvariantError(f"a node at page {node.start} does not follow its parent")
        if len(node.key) != len(node.pages) * tree.page_size * 4:
            raise InvariantError(f"a node at page {node.start}: tokens and pages differ in number")
        for page, child in node.children.items():
            if child.parent is not node or not child.key.startswith(page):
                raise InvariantError(f"a child at page {child.start} is not its parent's")
        is_leaf = not node.children and node.locks == 0 and node.parent is not None
        if is_leaf != tree.is_queued(node):
            raise InvariantError(f"a node at page {node.start} is wrongly (un)queued for eviction")
    if (evictable, total) != (tree.evictable, tree.num_pages):
        raise InvariantError("the tree's page counters are off")

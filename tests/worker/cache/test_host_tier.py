"""The radix tree with a host tier, by example."""

from __future__ import annotations

import sys

from radixgrove.protocol.settings import EvictionPolicy, HostWritePolicy
from radixgrove.worker.cache.host_tier import HostTier
from radixgrove.worker.cache.node import CacheScope, TreeNode
from radixgrove.worker.cache.pool import PagePool
from radixgrove.worker.cache.timeline import Timeline
from radixgrove.worker.cache.tree import RadixTree
from radixgrove.worker.plan import PageCopies
from radixgrove.worker.scheduler.invariants import check_tree
from tests.worker.scheduler.harness import pack

PUBLIC = CacheScope("model", "public")


class Tiers:
    """A tree of one-token pages over two pools. Copies end when a test says so."""

    def __init__(self, pages: int, host_pages: int, policy: HostWritePolicy) -> None:
        self.timeline = Timeline()
        self.pool = PagePool(pages, self.timeline)
        self.host = HostTier(host_pages, self.timeline, policy, EvictionPolicy.LRU)
        self.tree = RadixTree(self.pool, self.timeline, 1, host=self.host)

    def insert(self, tokens: list[int]) -> None:
        """Cache `tokens` as one finished request does."""
        node = self.hold(tokens)
        pages = self.tree.path_pages(node) + self.pool.allocate(len(tokens) - node.end)
        self.tree.insert(node, pack(tokens), pages, len(tokens))

    def hold(self, tokens: list[int]) -> TreeNode:
        node = self.tree.match(PUBLIC, pack(tokens), len(tokens))
        self.tree.residency.lock(node)
        return node

    def load(self, tokens: list[int]) -> TreeNode:
        """Begin to load all of `tokens` that the host has; the node is locked."""
        node = self.tree.match(PUBLIC, pack(tokens), len(tokens))
        below = self.tree.match_host(node, pack(tokens), len(tokens))
        self.tree.residency.lock(below)
        self.tree.residency.load(node, below, self.pool.allocate(below.end - node.end))
        return below

    def saves(self) -> list[PageCopies]:
        """Launch what is to be copied; the saves among it."""
        return self.host.take()[0]

    def end_copies(self) -> None:
        self.saves()
        self.timeline.saves_ended = self.timeline.saves_launched
        self.timeline.loads_ended = self.timeline.loads_launched
        self.pool.reclaim()
        self.host.pool.reclaim()

    def check(self) -> None:
        check_tree(self.tree, [], self.host)
        self.pool.check([], [page for node in self.tree.nodes() for page in node.pages])
        self.host.pool.check([], [page for node in self.tree.nodes() for page in node.host])


def test_a_prompt_in_more_pieces_than_python_has_frames_can_be_dropped() -> None:
    count = sys.getrecursionlimit() + 100
    tokens = [i % 7 for i in range(count)]
    tiers = Tiers(count, count, HostWritePolicy.WRITE_THROUGH)
    for turn in range(1, count + 1):
        tiers.insert(tokens[:turn])
        tiers.tree.residency.save_wanted()
        tiers.end_copies()
    tiers.tree.residency.evict(count - 1)
    tiers.end_copies()
    assert sum(1 for _ in tiers.tree.nodes()) > count
    tiers.tree.residency.clear()
    tiers.check()
    assert tiers.pool.free == tiers.host.pool.free == count


def test_a_long_prompt_leaves_the_device_in_few_pieces() -> None:
    tiers = Tiers(8192, 8192, HostWritePolicy.WRITE_BACK)
    tiers.insert([i % 7 for i in range(8192)])
    while tiers.tree.residency.num_pages:
        tiers.tree.residency.evict(1)
    tiers.end_copies()
    assert sum(1 for _ in tiers.tree.nodes()) < 70
    tiers.check()


def test_what_is_still_being_loaded_is_not_saved() -> None:
    tiers = Tiers(16, 8, HostWritePolicy.WRITE_BACK)
    tokens = [1, 2, 3, 4]
    tiers.insert(tokens)
    tiers.tree.residency.evict(4)
    tiers.end_copies()
    node = tiers.load(tokens)
    loaded = set(node.pages)
    tiers.saves()
    tiers.tree.residency.unlock(node)  # its request was aborted
    tiers.tree.residency.drop_host(4)  # others need its place on the host
    tiers.tree.residency.evict(4)
    assert not loaded & {page for save in tiers.saves() for page in save.pages}
    tiers.end_copies()
    tiers.check()


def test_a_prompt_longer_than_the_host_is_saved_in_part_and_holds_nobody_up() -> None:
    tiers = Tiers(64, 8, HostWritePolicy.WRITE_THROUGH)
    tiers.insert([1] * 20)
    tiers.insert([2, 2])
    for _ in range(20):
        tiers.tree.residency.save_wanted()
        tiers.end_copies()
    assert tiers.host.next_wanted() is None
    assert tiers.host.pool.free < 4
    node = tiers.tree.match(PUBLIC, pack([2, 2]), 2)
    assert node.host
    tiers.check()


def test_a_node_larger_than_the_host_displaces_nothing() -> None:
    tiers = Tiers(64, 8, HostWritePolicy.WRITE_BACK)
    tiers.insert([2, 2])
    tiers.tree.residency.evict(2)
    tiers.end_copies()
    tiers.insert([1] * 20)
    tiers.tree.residency.evict(20)
    assert tiers.host.pool.free == 6
    tiers.check()


def test_a_leaf_that_a_request_holds_is_saved_once_it_ends_or_branches() -> None:
    tiers = Tiers(64, 64, HostWritePolicy.WRITE_THROUGH)
    tokens = pack([1] * 8)
    root = tiers.hold([])
    pages = tiers.pool.allocate(8)
    node = tiers.tree.extend(root, tokens, pages, 4)
    tiers.tree.residency.save_wanted()
    assert not tiers.saves()
    node = tiers.tree.extend(node, tokens, pages, 6)
    tiers.insert([1] * 6 + [2])  # another goes on from where the first is
    tiers.tree.residency.save_wanted()
    assert [len(save.pages) for save in tiers.saves()] == [7]
    tiers.tree.insert(node, tokens, pages, 8)
    tiers.tree.residency.save_wanted()
    assert [save.pages for save in tiers.saves()] == [pages[6:]]
    tiers.end_copies()
    tiers.check()

"""The radix tree, by example."""

from __future__ import annotations

import pytest

from radixgrove.protocol.blocks import HASH_BYTES, BlockHasher
from radixgrove.protocol.settings import EvictionPolicy
from radixgrove.worker.cache.node import CacheScope, TreeNode
from radixgrove.worker.cache.pool import Owner, PagePool
from radixgrove.worker.cache.structure import common_pages
from radixgrove.worker.cache.timeline import Timeline
from radixgrove.worker.cache.tree import RadixTree
from tests.worker.scheduler.harness import pack

PAGE = 2
PUBLIC = CacheScope("model", "public")


class Cache:
    """A tree with its pool, and short ways to fill it."""

    def __init__(
        self, policy: EvictionPolicy = EvictionPolicy.LRU, index_block: int | None = None
    ) -> None:
        self.timeline = Timeline()
        self.pool = PagePool(32, self.timeline)
        self.hasher = BlockHasher(b"secret", "model", index_block or PAGE)
        hashers = (lambda _: self.hasher) if index_block else None
        self.tree = RadixTree(self.pool, self.timeline, PAGE, policy, hashers)

    def hold(
        self, tokens: list[int], scope: CacheScope = PUBLIC, limit: int | None = None
    ) -> TreeNode:
        limit = len(tokens) // PAGE if limit is None else limit
        node = self.tree.match(scope, pack(tokens), limit)
        self.tree.residency.lock(node)
        return node

    def insert(
        self, tokens: list[int], scope: CacheScope = PUBLIC, priority: int = 0
    ) -> tuple[list[int], list[int]]:
        """Cache `tokens` as one finished request does; its table and its duplicates."""
        node = self.hold(tokens, scope)
        self.tree.residency.record_hit(node, priority)
        count = len(tokens) // PAGE
        pages = self.tree.path_pages(node) + self.pool.allocate(count - node.end)
        duplicates = self.tree.insert(node, pack(tokens), pages, count, priority)
        return pages, duplicates

    def cached(self, tokens: list[int], scope: CacheScope = PUBLIC) -> int:
        return self.tree.peek(scope, pack(tokens), len(tokens) // PAGE)[1]


def test_a_match_returns_the_pages_that_were_inserted() -> None:
    cache = Cache()
    pages, duplicates = cache.insert([1, 2, 3, 4, 5, 6])
    assert duplicates == []
    node = cache.hold([1, 2, 3, 4, 9, 9])
    assert cache.tree.path_pages(node) == pages[:2]
    assert node.end == 2


def test_a_match_stops_at_the_limit_and_at_whole_pages() -> None:
    cache = Cache()
    cache.insert([1, 2, 3, 4])
    assert cache.hold([1, 2, 3, 4], limit=1).end == 1
    assert cache.cached([1, 2, 3]) == 1
    assert cache.cached([1, 9, 3, 4]) == 0


def test_scopes_share_nothing() -> None:
    cache = Cache()
    cache.insert([1, 2, 3, 4])
    assert cache.cached([1, 2, 3, 4], CacheScope("model", "someone")) == 0
    assert cache.cached([1, 2, 3, 4], CacheScope("other model", "public")) == 0
    assert cache.cached([1, 2, 3, 4]) == 2


def test_a_split_keeps_the_locks_of_the_lower_part() -> None:
    cache = Cache()
    cache.insert([1, 2, 3, 4, 5, 6, 7, 8])
    lower = cache.hold([1, 2, 3, 4, 5, 6, 7, 8])
    upper = cache.hold([1, 2, 3, 4, 0, 0])
    assert (upper.end, lower.start, lower.end) == (2, 2, 4)
    assert (upper.ref_count, lower.ref_count) == (2, 1)
    cache.tree.residency.unlock(lower)
    assert cache.tree.residency.evictable == 2
    assert cache.tree.residency.evict(99) == 2
    assert cache.cached([1, 2, 3, 4]) == 2


def test_a_leaving_request_keeps_duplicates_and_gives_the_rest() -> None:
    cache = Cache()
    first = cache.hold([1, 2, 3, 4, 5, 6])  # both start from nothing
    second = cache.hold([1, 2, 3, 4, 7, 8])
    mine, others = cache.pool.allocate(3), cache.pool.allocate(3)
    assert cache.tree.insert(first, pack([1, 2, 3, 4, 5, 6]), mine, 3) == []
    duplicates = cache.tree.insert(second, pack([1, 2, 3, 4, 7, 8]), others, 3)
    assert duplicates == others[:2]
    assert [cache.pool.owner(page) for page in others] == [
        Owner.REQUEST,
        Owner.REQUEST,
        Owner.TREE,
    ]
    reached = cache.hold([1, 2, 3, 4, 7, 8])
    assert cache.tree.path_pages(reached) == [*mine[:2], others[2]]


def test_a_running_request_publishes_until_it_meets_a_copy() -> None:
    cache = Cache()
    tokens = [1, 2, 3, 4, 5, 6]
    node = cache.hold(tokens)
    pages = cache.pool.allocate(3)
    node = cache.tree.extend(node, pack(tokens), pages, 1)
    assert cache.cached(tokens) == 1
    cache.insert([1, 2, 3, 4])  # someone else was faster with the second page
    assert cache.tree.extend(node, pack(tokens), pages, 3) is node
    assert node.end == 1
    assert cache.pool.owner(pages[1]) is Owner.REQUEST
    assert cache.tree.insert(node, pack(tokens), pages, 3) == [pages[1]]
    assert cache.cached(tokens) == 3


def test_a_long_prefill_grows_one_node_not_a_chain() -> None:
    cache = Cache()
    tokens = list(range(20))
    node = cache.hold(tokens)
    pages = cache.pool.allocate(10)
    for end in range(1, 11):
        node = cache.tree.extend(node, pack(tokens), pages, end)
    assert sum(1 for _ in cache.tree.nodes()) == 2  # the root and one leaf
    assert node.pages == pages


def test_pages_of_a_path_in_use_are_not_evicted() -> None:
    cache = Cache()
    cache.insert([1, 2, 3, 4])
    cache.insert([5, 6])
    node = cache.hold([1, 2, 3, 4])
    assert cache.tree.residency.evict(99) == 1
    assert cache.cached([5, 6]) == 0
    cache.tree.residency.unlock(node)
    assert cache.tree.residency.evict(99) == 2
    assert cache.tree.residency.evicted == 1 + 2
    assert cache.pool.free == 32
    assert list(cache.tree.nodes()) == []


def test_evicted_pages_wait_for_the_step_that_may_read_them() -> None:
    cache = Cache()
    cache.insert([1, 2])
    cache.timeline.launched = 1
    cache.insert([3, 4])  # its request was part of step 1
    assert cache.tree.residency.evict(99) == 2
    assert (cache.pool.free, cache.pool.retired) == (31, 1)
    cache.timeline.collected = 1
    cache.pool.reclaim()
    assert cache.pool.free == 32


def test_eviction_takes_the_tail_first() -> None:
    cache = Cache()
    cache.insert([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.tree.residency.evict(1) == 1
    assert cache.cached([1, 2, 3, 4, 5, 6, 7, 8]) == 3


A, B, C = [1, 1], [2, 2], [3, 3]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (EvictionPolicy.LRU, [C, A, B]),  # B was used last
        (EvictionPolicy.LFU, [C, B, A]),  # A was used most
        (EvictionPolicy.FIFO, [A, B, C]),
        (EvictionPolicy.PRIORITY, [B, C, A]),
    ],
)
def test_eviction_follows_its_policy(policy: EvictionPolicy, order: list[list[int]]) -> None:
    cache = Cache(policy)
    cache.insert(A, priority=5)
    cache.insert(B, priority=0)
    cache.insert(C, priority=3)
    cache.insert(A)
    cache.insert(A)
    cache.insert(B)
    for gone in order:
        assert cache.cached(gone) == 1
        cache.tree.residency.evict(1)
        assert cache.cached(gone) == 0


def test_a_parent_is_evicted_only_after_its_children() -> None:
    cache = Cache(EvictionPolicy.FIFO)
    cache.insert([1, 1])
    cache.insert([1, 1, 2, 2])
    cache.insert([1, 1, 3, 3])
    cache.tree.residency.evict(2)
    assert cache.cached([1, 1]) == 1
    cache.tree.residency.evict(1)
    assert cache.cached([1, 1]) == 0


def test_events_name_blocks_that_became_matchable_and_those_that_left() -> None:
    cache = Cache(index_block=2 * PAGE)
    tokens = list(range(12))
    chain = cache.hasher.chain(pack(tokens))
    cache.insert(tokens[:6])  # one block and a half
    (stored,) = cache.tree.events.take()
    assert (stored.stored, stored.domain, stored.hashes) == (True, "public", chain[:HASH_BYTES])
    cache.insert(tokens)
    (stored,) = cache.tree.events.take()
    assert stored.hashes == chain[HASH_BYTES:]
    cache.tree.residency.evict(2)  # only the last block, and then the second loses its tail
    cache.tree.residency.evict(1)
    (removed,) = cache.tree.events.take()
    assert not removed.stored
    assert removed.hashes == chain[2 * HASH_BYTES :] + chain[HASH_BYTES : 2 * HASH_BYTES]
    assert b"".join(hashes for _, _, hashes in cache.tree.blocks()) == chain[:HASH_BYTES]


def test_a_block_cut_by_a_split_hashes_alike_on_both_branches() -> None:
    cache = Cache(index_block=2 * PAGE)
    one, two = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 9, 9, 5, 6, 7, 8]
    cache.insert(one)
    cache.insert(two)  # splits inside the first block
    events = cache.tree.events.take()
    hashes = b"".join(event.hashes for event in events)
    assert hashes == cache.hasher.chain(pack(one)) + cache.hasher.chain(pack(two))


def test_an_index_block_must_be_made_of_pages() -> None:
    cache = Cache(index_block=3)
    with pytest.raises(ValueError, match="no multiple of the page"):
        cache.insert([1, 2])


@pytest.mark.parametrize("equal", range(6))
def test_common_pages_counts_up_to_the_first_difference(equal: int) -> None:
    one = [7, 7, *range(10)]
    two = list(range(10))
    if equal < 5:
        two[equal * PAGE + 1] = -1
    assert common_pages(pack(one), 1, pack(two), 0, 5, PAGE * 4) == min(equal, 5)

"""The radix tree against a plain dict of prefixes, under random use."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from radixgrove.protocol.blocks import HASH_BYTES, BlockHasher
from radixgrove.protocol.settings import EvictionPolicy
from radixgrove.worker.cache.node import CacheScope, TreeNode
from radixgrove.worker.cache.pool import Owner, PagePool
from radixgrove.worker.cache.timeline import Fence, Timeline
from radixgrove.worker.cache.tree import RadixTree
from tests.conftest import examples
from tests.worker.scheduler.harness import pack

PAGE = 2
PAGE_BYTES = PAGE * 4
NUM_PAGES = 20
BLOCK = 2 * PAGE

# Runs of equal tokens: long enough for nodes of many pages, alike enough to meet and part.
prompts = st.lists(
    st.tuples(st.sampled_from([0, 0, 1]), st.integers(1, 4 * PAGE)), min_size=1, max_size=4
).map(lambda runs: [token for token, length in runs for _ in range(length)][: 8 * PAGE])


@dataclass(eq=False)
class Holder:
    scope: CacheScope
    tokens: bytes
    pages: list[int]
    node: TreeNode


class TreeMachine(RuleBasedStateMachine):
    """`model` maps (scope, the tokens of whole pages) to the last of those pages."""

    @initialize(policy=st.sampled_from(EvictionPolicy))
    def start(self, policy: EvictionPolicy) -> None:
        self.timeline = Timeline()
        self.pool = PagePool(NUM_PAGES, self.timeline)
        self.hasher = BlockHasher(b"", "n", BLOCK)
        self.tree = RadixTree(self.pool, self.timeline, PAGE, policy, lambda _: self.hasher)
        self.model: dict[tuple[CacheScope, bytes], int] = {}
        self.holders: list[Holder] = []
        self.index: dict[str, set[bytes]] = {}  # built from events alone
        self.parents: dict[bytes, bytes] = {}

    def _matched(self, scope: CacheScope, tokens: bytes, limit: int) -> list[int]:
        pages: list[int] = []
        while len(pages) < limit:
            page = self.model.get((scope, tokens[: (len(pages) + 1) * PAGE_BYTES]))
            if page is None:
                break
            pages.append(page)
        return pages

    @rule(prompt=prompts, domain=st.sampled_from(["public", "alice"]), data=st.data())
    def admit(self, prompt: list[int], domain: str, data: st.DataObject) -> None:
        scope, tokens = CacheScope("n", domain), pack(prompt)
        limit = (len(prompt) - 1) // PAGE
        expected = self._matched(scope, tokens, limit)
        assert self.tree.peek(scope, tokens, limit)[1] == len(expected)
        node = self.tree.match(scope, tokens, limit)
        assert self.tree.path_pages(node) == expected
        self.tree.residency.lock(node)
        fresh = len(prompt) // PAGE - len(expected)
        if fresh > self.pool.free:
            self.tree.residency.unlock(node)
            return
        pages = expected + self.pool.allocate(fresh)
        self.holders.append(Holder(scope, tokens, pages, node))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        end = data.draw(st.integers(0, len(holder.pages)))
        before = holder.node.end
        copied = (holder.scope, holder.tokens[: (before + 1) * PAGE_BYTES]) in self.model
        holder.node = self.tree.extend(holder.node, holder.tokens, holder.pages, end)
        if end <= before or copied:
            assert holder.node.end == before
            return
        assert holder.node.end == end
        for depth in range(before, end):
            self._add(holder, depth)

    def _add(self, holder: Holder, depth: int) -> None:
        key = (holder.scope, holder.tokens[: (depth + 1) * PAGE_BYTES])
        assert key not in self.model
        self.model[key] = holder.pages[depth]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        computed = data.draw(st.integers(holder.node.end, len(holder.pages)))
        present = len(self._matched(holder.scope, holder.tokens, computed))
        expected = holder.pages[holder.node.end : present]
        duplicates = self.tree.insert(holder.node, holder.tokens, holder.pages, computed)
        assert duplicates == expected
        for depth in range(present, computed):
            self._add(holder, depth)
        left = holder.pages[computed:] + duplicates
        self.pool.release(left, Owner.REQUEST, Fence(self.timeline.launched))

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        evictable = self.tree.residency.evictable
        assert self.tree.residency.evict(count) == min(count, evictable)
        kept = self._content()
        gone = {key for key in self.model if key not in kept}
        assert len(gone) == min(count, evictable)
        for scope, tokens in kept:  # prefix-closed: what stays has its parent
            assert len(tokens) == PAGE_BYTES or (scope, tokens[:-PAGE_BYTES]) in kept
        for holder in self.holders:  # no holder lost a page
            for depth in range(holder.node.end):
                assert (holder.scope, holder.tokens[: (depth + 1) * PAGE_BYTES]) not in gone
        self.model = kept

    @precondition(lambda self: self.timeline.in_flight < 2)
    @rule()
    def launch(self) -> None:
        self.timeline.launched += 1

    @precondition(lambda self: self.timeline.in_flight)
    @rule()
    def collect(self) -> None:
        self.timeline.collected += 1
        self.pool.reclaim()

    def _content(self) -> dict[tuple[CacheScope, bytes], int]:
        content: dict[tuple[CacheScope, bytes], int] = {}
        for node in self.tree.nodes():
            prefix, above = b"", node.parent
            while above is not None:
                prefix = above.key + prefix
                above = above.parent
            for depth, page in enumerate(node.pages):
                content[node.scope, prefix + node.key[: (depth + 1) * PAGE_BYTES]] = page
        return content

    @invariant()
    def content_is_the_models(self) -> None:
        assert self._content() == self.model

    @invariant()
    def pages_are_conserved(self) -> None:
        of_requests = [page for h in self.holders for page in h.pages[h.node.end :]]
        self.pool.check(of_requests, list(self.model.values()))
        assert self.tree.residency.num_pages == len(self.model)
        locked = {
            h.tokens[: (d + 1) * PAGE_BYTES] + h.scope.domain.encode()
            for h in self.holders
            for d in range(h.node.end)
        }
        assert self.tree.residency.evictable == len(self.model) - len(locked)

    @invariant()
    def the_index_follows_and_is_always_closed(self) -> None:
        expected: dict[str, set[bytes]] = {}
        for scope, tokens in self.model:
            if len(tokens) % (BLOCK * 4) == 0:
                chain = self.hasher.chain(tokens)
                block = chain[-HASH_BYTES:]
                expected.setdefault(scope.domain, set()).add(block)
                self.parents[block] = chain[-2 * HASH_BYTES : -HASH_BYTES]
        for event in self.tree.events.take():
            blocks = self.index.setdefault(event.domain, set())
            for offset in range(0, len(event.hashes), HASH_BYTES):
                block = event.hashes[offset : offset + HASH_BYTES]
                if event.stored:
                    assert block not in blocks
                    blocks.add(block)
                    parent = self.parents.get(block)
                    assert not parent or parent in blocks
                else:
                    blocks.remove(block)
                    assert all(self.parents[child] != block for child in blocks)
        assert {domain: blocks for domain, blocks in self.index.items() if blocks} == expected
        snapshot: dict[str, set[bytes]] = {}
        for _, domain, hashes in self.tree.blocks():
            seen = snapshot.setdefault(domain, set())
            for offset in range(0, len(hashes), HASH_BYTES):
                block = hashes[offset : offset + HASH_BYTES]
                assert not self.parents[block] or self.parents[block] in seen
                seen.add(block)
        assert snapshot == expected


TreeMachine.TestCase.settings = examples(150, stateful_step_count=40)
TestTree = TreeMachine.TestCase

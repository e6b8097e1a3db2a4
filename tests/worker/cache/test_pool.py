"""The page pool: one owner a page, and nothing reused behind a fence."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixgrove.worker.cache.pool import Owner, PagePool, PoolError
from radixgrove.worker.cache.timeline import Fence, Timeline
from tests.conftest import examples

NUM_PAGES = 12


def test_pages_released_while_a_step_runs_wait_for_it() -> None:
    timeline = Timeline()
    pool = PagePool(4, timeline)
    pages = pool.allocate(3)
    timeline.launched = 2
    pool.release(pages[:1], Owner.REQUEST, Fence(1))
    pool.release(pages[1:], Owner.REQUEST, Fence(2))
    assert (pool.free, pool.retired) == (1, 3)
    timeline.collected = 1
    pool.reclaim()
    assert (pool.free, pool.retired) == (2, 2)
    timeline.collected = 2
    pool.reclaim()
    assert (pool.free, pool.retired) == (4, 0)


def test_a_page_behind_a_passed_fence_is_free_at_once() -> None:
    timeline = Timeline(launched=5, collected=4)
    pool = PagePool(2, timeline)
    pool.release(pool.allocate(1), Owner.REQUEST, Fence(4))
    assert pool.free == 2


def test_a_pool_has_a_page_at_least() -> None:
    assert PagePool(1, Timeline()).allocate(1) == [0]
    with pytest.raises(ValueError, match="at least one page, got 0"):
        PagePool(0, Timeline())


def test_breaking_the_rules_of_ownership_is_an_error() -> None:
    pool = PagePool(3, Timeline())
    with pytest.raises(PoolError, match="4 pages wanted, 3 are free"):
        pool.allocate(4)
    pages = pool.allocate(2)
    with pytest.raises(PoolError, match="is REQUEST, not TREE"):
        pool.release(pages, Owner.TREE, Fence(0))
    pool.release(pages, Owner.REQUEST, Fence(0))
    with pytest.raises(PoolError, match="is FREE, not REQUEST"):
        pool.release(pages, Owner.REQUEST, Fence(0))


def test_the_conservation_check_finds_leaks_and_double_owners() -> None:
    pool = PagePool(3, Timeline())
    one, two = pool.allocate(2)
    pool.adopt([two])
    pool.check([one], [two])
    with pytest.raises(PoolError, match="has no holder"):
        pool.check([], [two])
    with pytest.raises(PoolError, match="held twice"):
        pool.check([one, one], [two])
    with pytest.raises(PoolError, match="held as TREE, recorded as REQUEST"):
        pool.check([], [one, two])


class PoolMachine(RuleBasedStateMachine):
    """Against a dict of page -> owner, and a dict of page -> the step it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.timeline = Timeline()
        self.pool = PagePool(NUM_PAGES, self.timeline)
        self.owner = dict.fromkeys(range(NUM_PAGES), Owner.FREE)
        self.fences: dict[int, int] = {}

    def _of(self, owner: Owner) -> list[int]:
        return [page for page, its in self.owner.items() if its is owner]

    @rule(count=st.integers(0, NUM_PAGES + 1))
    def allocate(self, count: int) -> None:
        free = self._of(Owner.FREE)
        if count > len(free):
            with pytest.raises(PoolError):
                self.pool.allocate(count)
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert set(pages) <= set(free)
        self.owner.update(dict.fromkeys(pages, Owner.REQUEST))

    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(range(NUM_PAGES)), unique=True))
        pages = [page for page in pages if self.owner[page] is Owner.REQUEST]
        self.pool.adopt(pages)
        self.owner.update(dict.fromkeys(pages, Owner.TREE))

    @rule(data=st.data(), owner=st.sampled_from([Owner.REQUEST, Owner.TREE]))
    def release(self, data: st.DataObject, owner: Owner) -> None:
        pages = data.draw(st.lists(st.sampled_from(range(NUM_PAGES)), unique=True))
        pages = [page for page in pages if self.owner[page] is owner]
        fence = data.draw(st.integers(0, self.timeline.launched))
        self.pool.release(pages, owner, Fence(fence))
        if fence <= self.timeline.collected:
            self.owner.update(dict.fromkeys(pages, Owner.FREE))
        else:
            self.owner.update(dict.fromkeys(pages, Owner.RETIRED))
            self.fences.update(dict.fromkeys(pages, fence))

    @precondition(lambda self: self.timeline.in_flight < 3)
    @rule()
    def launch(self) -> None:
        self.timeline.launched += 1

    @precondition(lambda self: self.timeline.in_flight)
    @rule()
    def collect(self) -> None:
        self.timeline.collected += 1
        self.pool.reclaim()
        for page, fence in list(self.fences.items()):
            if fence == self.timeline.collected:
                del self.fences[page]
                self.owner[page] = Owner.FREE

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert {page: self.pool.owner(page) for page in range(NUM_PAGES)} == self.owner
        assert self.pool.free == len(self._of(Owner.FREE))
        assert self.pool.retired == len(self.fences)
        self.pool.check(self._of(Owner.REQUEST), self._of(Owner.TREE))


PoolMachine.TestCase.settings = examples(60, stateful_step_count=40)
TestPool = PoolMachine.TestCase

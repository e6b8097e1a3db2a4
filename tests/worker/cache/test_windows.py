"""Window pages: what is pinned stays, what is cached goes in its order, none behind a fence."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixgrove.worker.cache.pool import Owner, PagePool, PoolError
from radixgrove.worker.cache.timeline import Fence, Timeline
from radixgrove.worker.cache.windows import WindowPages
from tests.conftest import examples

PAGE = 4


def windows_of(
    window: int, num_window_pages: int = 8, timeline: Timeline | None = None
) -> WindowPages:
    return WindowPages(32, num_window_pages, window, PAGE, timeline or Timeline())


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 8, 9, 12, 13])
def test_a_prefix_is_usable_where_all_that_its_next_token_attends_to_is_there(window: int) -> None:
    """By the rule itself, over every choice of six pages."""
    for bits in range(1 << 6):
        windows = windows_of(window)
        windows.assign([page for page in range(6) if bits >> page & 1])
        for depth in range(7):
            usable = [
                d
                for d in range(depth + 1)
                if all(
                    bits >> (position // PAGE) & 1
                    for position in range(max(0, d * PAGE - window + 1), d * PAGE)
                )
            ]
            assert windows.usable(list(range(depth))) == max(usable)


def test_a_row_reads_from_the_page_of_its_windows_first_token_on() -> None:
    windows = windows_of(window=5)
    assert [windows.first_read(position) for position in (0, 4, 7, 8, 11, 12)] == [0, 0, 0, 1, 1, 2]


def test_cold_ones_go_first_then_warm_ones_each_the_oldest_first() -> None:
    windows = windows_of(window=8, num_window_pages=4)
    windows.assign([0, 1, 2, 3])
    windows.unpin(0, warm=True)
    windows.unpin(1, warm=False)
    windows.unpin(2, warm=False)
    assert windows.cached == 3
    for page, gone in [(10, 1), (11, 2), (12, 0)]:
        windows.assign([page])
        with pytest.raises(PoolError, match=f"page {gone} has no window page"):
            windows.find([gone])
    with pytest.raises(PoolError, match="1 window pages wanted, 0 are free"):
        windows.assign([13])


def test_one_that_is_used_again_is_the_last_to_go() -> None:
    windows = windows_of(window=8, num_window_pages=3)
    windows.assign([0, 1, 2])
    for page in (0, 1, 2):
        windows.unpin(page, warm=True)
    windows.pin([0])
    windows.unpin(0, warm=True)
    windows.assign([3])
    assert len(windows.find([0, 2])) == 2
    with pytest.raises(PoolError, match="page 1 has no window page"):
        windows.find([1])


def test_what_a_step_in_flight_reads_is_not_evicted_for_it_would_not_be_free() -> None:
    timeline = Timeline()
    windows = windows_of(window=8, num_window_pages=2, timeline=timeline)
    windows.assign([0])
    timeline.launched = 1
    windows.unpin(0, warm=False)  # cold, but step 1 reads it
    windows.assign([1])
    windows.unpin(1, warm=True)
    with pytest.raises(PoolError, match="wanted"):
        windows.assign([2])
    timeline.collected = 1
    windows.reclaim()
    windows.assign([2])
    assert len(windows.find([1, 2])) == 2


def test_a_page_that_leaves_its_owner_gives_its_window_page_up_behind_its_last_step() -> None:
    timeline = Timeline()
    windows = windows_of(window=8, num_window_pages=2, timeline=timeline)
    pool = PagePool(32, timeline, on_release=windows.drop)
    one, two = pool.allocate(2)
    windows.assign([one, two])
    windows.unpin(one, warm=False)
    timeline.launched = 3
    windows.unpin(two, warm=True)
    pool.release([one, two], Owner.REQUEST, Fence(3))
    assert (windows.free, windows.cached) == (1, 0)  # no step reads the first any more
    timeline.collected = 3
    windows.reclaim()
    assert windows.free == 2


def test_a_pinned_one_is_neither_given_up_nor_unpinned_twice() -> None:
    windows = windows_of(window=8)
    windows.assign([0])
    with pytest.raises(PoolError, match="is given up, but pinned"):
        windows.drop([0])
    with pytest.raises(PoolError, match="page 0 has a window page already"):
        windows.assign([0])
    windows.unpin(0, warm=False)
    with pytest.raises(PoolError, match="unpinned once too often"):
        windows.unpin(0, warm=False)


def test_a_duplicates_window_page_becomes_that_of_the_page_that_lacks_one() -> None:
    windows = windows_of(window=8)
    (place,) = windows.assign([0])
    windows.unpin(0, warm=True)
    version = windows.version
    windows.hand_over([0, 3], [1, 4])
    assert windows.find([1]) == [place]
    assert windows.version > version
    windows.assign([2])
    windows.unpin(2, warm=True)
    windows.hand_over([2], [1])  # has one
    assert windows.find([1]) == [place]
    assert len(windows.find([2])) == 1


NUM_PAGES, NUM_WINDOW_PAGES = 10, 5


class WindowsMachine(RuleBasedStateMachine):
    """Against plain lists: pins of each page that has one; what is cached, first to go first."""

    @initialize(window=st.sampled_from([1, 3, 4, 5, 9]))
    def start(self, window: int) -> None:
        self.timeline = Timeline()
        self.windows = WindowPages(NUM_PAGES, NUM_WINDOW_PAGES, window, PAGE, self.timeline)
        self.pins: dict[int, int] = {}
        self.cached: dict[bool, list[int]] = {False: [], True: []}  # cold, warm
        self.fences: dict[int, int] = {}  # of cached pages
        self.retired: list[int] = []  # fences of what was given up

    @property
    def _free(self) -> int:
        waiting = sum(fence > self.timeline.collected for fence in self.retired)
        return NUM_WINDOW_PAGES - len(self.pins) - len(self.fences) - waiting

    def _uncache(self, page: int) -> int:
        for pages in self.cached.values():
            if page in pages:
                pages.remove(page)
        return self.fences.pop(page)

    @rule(count=st.integers(1, 3), data=st.data())
    def assign(self, count: int, data: st.DataObject) -> None:
        without = [p for p in range(NUM_PAGES) if p not in self.pins and p not in self.fences]
        pages = data.draw(st.permutations(without))[:count]
        for pool in self.cached.values():
            while self._free < len(pages) and pool:
                if self.fences[pool[0]] > self.timeline.collected:
                    break
                self._uncache(pool[0])
        if self._free < len(pages):
            with pytest.raises(PoolError, match="wanted"):
                self.windows.assign(pages)
            return
        assert len(set(self.windows.assign(pages))) == len(pages)
        self.pins.update(dict.fromkeys(pages, 1))

    @precondition(lambda self: self.pins or self.fences)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted({*self.pins, *self.fences})))
        self.windows.pin([page])
        if page in self.fences:
            self._uncache(page)
        self.pins[page] = self.pins.get(page, 0) + 1

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), warm=st.booleans())
    def unpin(self, data: st.DataObject, warm: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.pins)))
        self.windows.unpin(page, warm=warm)
        self.pins[page] -= 1
        if not self.pins[page]:
            del self.pins[page]
            self.cached[warm].append(page)
            self.fences[page] = self.timeline.launched

    @rule(page=st.integers(0, NUM_PAGES - 1))
    def drop(self, page: int) -> None:
        if page not in self.pins:
            self.windows.drop([page])
            if page in self.fences:
                self.retired.append(self._uncache(page))

    @rule(giver=st.integers(0, NUM_PAGES - 1), taker=st.integers(0, NUM_PAGES - 1))
    def hand_over(self, giver: int, taker: int) -> None:
        if giver in self.pins:
            return
        self.windows.hand_over([giver], [taker])
        if giver in self.fences and taker not in self.pins and taker not in self.fences:
            for pages in self.cached.values():
                pages[:] = [taker if page == giver else page for page in pages]
            self.fences[taker] = self.fences.pop(giver)

    @precondition(lambda self: self.timeline.launched - self.timeline.collected < 3)
    @rule()
    def launch(self) -> None:
        self.timeline.launched += 1

    @precondition(lambda self: self.timeline.launched > self.timeline.collected)
    @rule()
    def collect(self) -> None:
        self.timeline.collected += 1
        self.windows.reclaim()

    @invariant()
    def they_are_conserved(self) -> None:
        assert self.windows.free == self._free
        assert self.windows.cached == len(self.fences)
        held = [*self.pins, *self.fences]
        assert len(set(self.windows.find(held))) == len(held)
        self.windows.check(
            Counter(self.pins), [page for page in range(NUM_PAGES) if page not in held]
        )


WindowsMachine.TestCase.settings = examples(60, stateful_step_count=40)
TestWindowPages = WindowsMachine.TestCase

"""Window pages: where layers with a window keep what they still need of a page.

Such layers attend to the last tokens alone. What a page holds of theirs lies in a *window page*, of
which there are fewer than pages: a page has one, or none.

    FREE ──assign──▶ PINNED ──unpin──▶ CACHED ──(evicted)──▶ FREE
                        ▲                │
                        └──────pin───────┘

A row pins the window pages that it writes or may yet read. What no row pins is kept for requests
that begin with the same tokens, as long as there is room, and goes in this order: first what rows'
windows passed by on their way (*cold*: a prefix that ends there may never be asked for), the oldest
first; then where prefixes are known to end (*warm*), the least recently used first. A page that
leaves its owner gives its window page up with it (`drop`, which `PagePool.release` calls).
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from radixgrove.worker.cache.pool import Owner, PagePool, PoolError
from radixgrove.worker.cache.timeline import Fence, Timeline

_NONE = -1


class WindowPages:
    """Owns window pages 0 .. num_window_pages - 1, each held by one page, free, or behind a fence.

    `window` is the longest that layers attend to, in tokens, the query's own included.
    """

    def __init__(
        self, num_pages: int, num_window_pages: int, window: int, page_size: int, timeline: Timeline
    ) -> None:
        self.version = 0  # changes whenever a cached page gets or loses its window page
        self.span = -(-(window - 1) // page_size)  # pages before a border that are read behind it
        self._window = window
        self._page_size = page_size
        self._clock = timeline
        self._pool = PagePool(num_window_pages, timeline)
        self._of = [_NONE] * num_pages  # of each page
        self._page = [_NONE] * num_window_pages  # that holds it
        self._pins = [0] * num_window_pages  # rows
        # The last step that may read it, of each that is held and not pinned. It was not pinned
        # longer than those behind it, so that steps up to theirs have ended later.
        self._cold: OrderedDict[int, int] = OrderedDict()
        self._warm: OrderedDict[int, int] = OrderedDict()

    @property
    def free(self) -> int:
        return self._pool.free

    @property
    def cached(self) -> int:
        """How many are held, but by no row."""
        return len(self._cold) + len(self._warm)

    # ---- what must be there ----------------------------------------------------------------------

    def first_read(self, position: int) -> int:
        """The first page of a row that a query at `position` attends to."""
        return max(0, position - self._window + 1) // self._page_size

    def find(self, pages: list[int]) -> list[int]:
        """The window pages of `pages`, which all have one."""
        return [self._held_by(page) for page in pages]

    def usable(self, pages: list[int]) -> int:
        """How many of a prefix's `pages` a request may begin behind: the most of which the last
        `span` all have window pages."""
        of, end = self._of, len(pages)
        while end > 0:
            for index in range(max(0, end - self.span), end):
                if of[pages[index]] == _NONE:
                    end = index  # what ends later, up to here, needs this one as well
                    break
            else:
                return end
        return 0

    # ---- rows ------------------------------------------------------------------------------------

    def assign(self, pages: list[int]) -> list[int]:
        """Window pages for pages without one, each pinned once by the row that is to write them.

        Raises:
            PoolError: rows and steps in flight hold too many: the pool is smaller than they need.
        """
        self._make_room(len(pages))
        if self._pool.free < len(pages):
            raise PoolError(f"{len(pages)} window pages wanted, {self._pool.free} are free")
        taken = self._pool.allocate(len(pages))
        for page, place in zip(pages, taken, strict=True):
            if self._of[page] != _NONE:
                raise PoolError(f"page {page} has a window page already")
            self._of[page] = place
            self._page[place] = page
            self._pins[place] = 1
        return taken

    def pin(self, pages: list[int]) -> None:
        """One pin more on the window pages of `pages`, which all have one."""
        for place in self.find(pages):
            if not self._pins[place]:
                self._unqueue(place)
            self._pins[place] += 1

    def unpin(self, page: int, *, warm: bool) -> None:
        """A row's later steps do not read this page; those launched so far still may.

        Args:
            warm: whether a prefix ends so soon behind it that a request may begin there.
        """
        place = self._held_by(page)
        pins = self._pins[place] - 1
        if pins < 0:
            raise PoolError(f"window page {place} is unpinned once too often")
        self._pins[place] = pins
        if not pins:
            (self._warm if warm else self._cold)[place] = self._clock.launched

    # ---- leaving ---------------------------------------------------------------------------------

    def drop(self, pages: list[int]) -> None:
        """Take back the window pages of `pages`, those that have one: no row pins them."""
        for page in pages:
            if (place := self._of[page]) != _NONE:
                if self._pins[place]:
                    raise PoolError(f"window page {place} is given up, but pinned")
                self._give_up([place], Fence(self._unqueue(place)))

    def hand_over(self, givers: list[int], takers: list[int]) -> None:
        """Of pages that no row uses to others with the same tokens one by one, where these have
        no window page."""
        for giver, taker in zip(givers, takers, strict=True):
            place = self._of[giver]
            if place != _NONE and self._of[taker] == _NONE:
                self._of[giver] = _NONE
                self._of[taker] = place
                self._page[place] = taker
                self.version += 1

    def reclaim(self) -> None:
        """A step has been collected: what waited for it is free."""
        self._pool.reclaim()

    def _make_room(self, count: int) -> None:
        """Evict until `count` are free, what no step in flight reads: others would free nothing."""
        short = count - self._pool.free
        evicted: list[int] = []
        for cached in (self._cold, self._warm):
            while len(evicted) < short and cached:
                place = next(iter(cached))
                if cached[place] > self._clock.collected:
                    break
                del cached[place]
                evicted.append(place)
        if evicted:
            self._give_up(evicted, Fence())
            self.version += 1

    def _give_up(self, places: list[int], fence: Fence) -> None:
        for place in places:
            self._of[self._page[place]] = _NONE
            self._page[place] = _NONE
        self._pool.release(places, Owner.REQUEST, fence)

    def _unqueue(self, place: int) -> int:
        """It is not cached any more; returns the last step that may read it."""
        return self._cold.pop(place) if place in self._cold else self._warm.pop(place)

    def _held_by(self, page: int) -> int:
        place = self._of[page]
        if place == _NONE:
            raise PoolError(f"page {page} has no window page")
        return place

    # ---- checks ----------------------------------------------------------------------------------

    def check(self, pins: Counter[int], ownerless: list[int]) -> None:
        """Conservation: each is held by one page, free or retired, and pinned as rows say.

        Args:
            pins: of each page, by how many rows.
            ownerless: pages that are free or retired.

        Raises:
            PoolError: naming what is in the wrong place. O(pages).
        """
        held = [place for place in self._of if place != _NONE]
        self._pool.check(held, [])
        for page, place in enumerate(self._of):
            if place == _NONE:
                if pins[page]:
                    raise PoolError(f"page {page} is pinned without a window page")
                continue
            if self._page[place] != page:
                raise PoolError(f"window page {place} is another's than page {page}'s")
            if self._pins[place] != pins[page]:
                raise PoolError(f"window page {place} counts {self._pins[place]} pins")
            queued = (place in self._cold) + (place in self._warm)
            if queued != (not pins[page]):
                raise PoolError(f"window page {place} is wrongly (un)queued for eviction")
        if self.cached + sum(count > 0 for count in pins.values()) != len(held):
            raise PoolError("window pages that are free are queued for eviction")
        for page in ownerless:
            if self._of[page] != _NONE:
                raise PoolError(f"page {page} has no owner, but a window page")

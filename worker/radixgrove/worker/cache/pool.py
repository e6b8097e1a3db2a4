"""The page pool: every page of KV has exactly one owner at any time.

    FREE ──allocate──▶ REQUEST ──adopt──▶ TREE
     ▲                    │                 │
     │                    └────release──────┤
     └────reclaim─── RETIRED ◀──────────────┘

A page leaves its owner while steps and copies that were launched before may still read or write it.
It is then RETIRED until its *fence* has passed: until all of them have ended. With none of them it
is FREE at once. The device's pages are one pool, the host's another, and window pages a third, on
the same clock.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from radixgrove.protocol.errors import Defect
from radixgrove.worker.cache.timeline import Fence, Timeline


class Owner(IntEnum):
    FREE = 0
    REQUEST = 1
    TREE = 2
    RETIRED = 3


class PoolError(Defect):
    """The rules of ownership were broken: a defect of the scheduler, never a client's fault."""


class PagePool:
    """Hands out pages 0 .. num_pages - 1 and takes them back behind fences.

    `on_release` is called with pages that leave their owner.
    """

    def __init__(
        self,
        num_pages: int,
        timeline: Timeline,
        on_release: Callable[[list[int]], None] | None = None,
    ) -> None:
        if num_pages < 1:
            raise ValueError(f"the pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self._clock = timeline
        self._on_release = on_release
        self._owner = bytearray(num_pages)
        self._free = list(range(num_pages - 1, -1, -1))  # a stack; low pages are used first
        self._retired: dict[Fence, list[int]] = {}
        self._num_retired = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def retired(self) -> int:
        return self._num_retired

    def owner(self, page: int) -> Owner:
        return Owner(self._owner[page])

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages for a request.

        Raises:
            PoolError: there are fewer; callers check `free` first.
        """
        if count > len(self._free):
            raise PoolError(f"{count} pages wanted, {len(self._free)} are free")
        if count == 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        self._move(pages, Owner.FREE, Owner.REQUEST)
        return pages

    def adopt(self, pages: list[int]) -> None:
        """The tree takes over pages that a request has filled."""
        self._move(pages, Owner.REQUEST, Owner.TREE)

    def release(self, pages: list[int], owner: Owner, fence: Fence) -> None:
        """`owner` gives pages up; whatever is launched up to `fence` may still touch them."""
        if self._on_release is not None:
            self._on_release(pages)
        if self._clock.passed(fence):
            self._move(pages, owner, Owner.FREE)
            self._free.extend(pages)
            return
        self._move(pages, owner, Owner.RETIRED)
        self._retired.setdefault(fence, []).extend(pages)
        self._num_retired += len(pages)

    def reclaim(self) -> None:
        """Something has ended: pages with a fence that has passed are free."""
        for fence in [fence for fence in self._retired if self._clock.passed(fence)]:
            pages = self._retired.pop(fence)
            self._move(pages, Owner.RETIRED, Owner.FREE)
            self._num_retired -= len(pages)
            self._free.extend(pages)

    def _move(self, pages: list[int], source: Owner, target: Owner) -> None:
        owner = self._owner
        for page in pages:
            if owner[page] != source:
                raise PoolError(f"page {page} is {Owner(owner[page]).name}, not {source.name}")
            owner[page] = target

    def check(self, of_requests: list[int], of_tree: list[int]) -> None:
        """Conservation: the four owners' pages are disjoint, complete, and as recorded.

        Raises:
            PoolError: naming the first page in the wrong place. O(pages).
        """
        retired = [page for pages in self._retired.values() for page in pages]
        if len(retired) != self._num_retired:
            raise PoolError(f"{len(retired)} pages are retired, {self._num_retired} were counted")
        holders = {
            Owner.FREE: self._free,
            Owner.REQUEST: of_requests,
            Owner.TREE: of_tree,
            Owner.RETIRED: retired,
        }
        seen = bytearray(self.num_pages)
        for owner, pages in holders.items():
            for page in pages:
                if seen[page]:
                    raise PoolError(f"page {page} is held twice, the second time as {owner.name}")
                seen[page] = 1
                if self._owner[page] != owner:
                    recorded = Owner(self._owner[page]).name
                    raise PoolError(f"page {page} is held as {owner.name}, recorded as {recorded}")
        if (leaked := seen.find(0)) >= 0:
            raise PoolError(f"page {leaked} ({self.owner(leaked).name}) has no holder")

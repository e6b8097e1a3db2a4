"""Which window pages running rows hold: given out before they write, let go behind their windows.

Where there are no window pages (`windows` is None) nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixgrove.worker.cache.windows import WindowPages
from radixgrove.worker.scheduler.request import RunningRequest

Entries = list[tuple[int, int, int]]  # row, index in its table, window page: as in `StepPlan`


class RowWindows:
    """Pins the window pages of pages [window_from, window_to) of each row."""

    def __init__(self, windows: WindowPages | None, page_size: int) -> None:
        self._windows = windows
        self._page_size = page_size

    def enter(self, active: RunningRequest, cached: int) -> None:
        """A row begins behind `cached` pages that it shares, of which it reads the last."""
        if self._windows is not None:
            active.window_from = self._windows.first_read(cached * self._page_size)
            active.window_to = cached
            self._windows.pin(active.pages[active.window_from : cached])

    def held(self, active: RunningRequest) -> Entries:
        """What the device must be told of a row that has entered."""
        if self._windows is None:
            return []
        begin, end = active.window_from, active.window_to
        found = self._windows.find(active.pages[begin:end])
        return [(active.row, index, page) for index, page in enumerate(found, begin)]

    def assign(self, decodes: list[RunningRequest], chunks: list[RunningRequest]) -> Entries:
        """Window pages for what the step that is planned writes, up to `launched` of its rows."""
        if self._windows is None:
            return []
        size = self._page_size
        short = [active for active in decodes if active.launched > active.window_to * size]
        self.move_on(short)
        places: list[tuple[int, int]] = []
        pages: list[int] = []
        for active in (*short, *chunks):
            begin, end = active.window_to, -(-active.launched // size)
            places += [(active.row, index) for index in range(begin, end)]
            pages += active.pages[begin:end]
            active.window_to = end
        assigned = zip(places, self._windows.assign(pages), strict=True)
        return [(row, index, window_page) for (row, index), window_page in assigned]

    def move_on(self, rows: Iterable[RunningRequest]) -> None:
        """Let go of what is behind the windows of all queries that are not launched yet."""
        if self._windows is not None:
            for active in rows:
                first = self._windows.first_read(active.next_query)
                if first > active.window_from:
                    self._unpin(active, active.window_from, first)
                    active.window_from = first

    def cut(self, active: RunningRequest, keep: int) -> None:
        """The row loses its pages behind the first `keep`."""
        if active.window_to > keep:
            self._unpin(active, keep, active.window_to)
            active.window_to = keep

    def leave(self, active: RunningRequest) -> None:
        """The row ends. What follows it begins, most likely, where it ended."""
        self._unpin(active, active.window_from, active.window_to, ends=True)
        active.window_from = active.window_to

    def _unpin(self, active: RunningRequest, begin: int, end: int, *, ends: bool = False) -> None:
        """Pages [begin, end) of the row.

        Args:
            ends: the row ends.
        """
        if self._windows is None:
            return
        pages = active.pages[begin:end]
        for index, page in enumerate(pages, begin):
            self._windows.unpin(page, warm=ends or self._is_warm(active, index))
        if active.node is None:  # no other request finds what is not in the tree
            self._windows.drop(pages)

    def _is_warm(self, active: RunningRequest, index: int) -> bool:
        """Whether another request may begin soon behind page `index`: where this one's prefix was
        cached before, and where its prompt ends, for that is where answers part."""
        assert self._windows is not None
        span, prompt = self._windows.span, active.request.prompt_len
        last = (prompt - 1) // self._page_size
        return (
            active.matched - span <= index < active.matched
            or last - span <= index < prompt // self._page_size
        )

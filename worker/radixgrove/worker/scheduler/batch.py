"""The requests that hold a row, and what each of them adds to the step that is being built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from radixgrove.worker.plan import NewRow, PrefillChunk
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.request import Request, RequestState, RunningRequest


@dataclass(slots=True)
class StepDraft:
    """A step while it is put together."""

    budget: int  # tokens it may still take
    decodes: list[RunningRequest] = field(default_factory=list)
    chunks: list[tuple[RunningRequest, PrefillChunk]] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    appended: list[tuple[int, int]] = field(default_factory=list)  # row, page
    awaited: int = 0  # the last load whose pages a row reads


class Batch:
    """Rows by request, in order of admission. Its lists of rows are swept when a step is built."""

    def __init__(self, config: SchedulerConfig, memory: KVMemory) -> None:
        self.active: dict[Request, RunningRequest] = {}
        self._page_size = config.page_size
        self._memory = memory
        self._prefilling: list[RunningRequest] = []
        self._decoding: list[RunningRequest] = []  # rows that may launch a decode; a stable order

    def enter(self, active: RunningRequest) -> None:
        active.request.active = active
        self.active[active.request] = active
        self._prefilling.append(active)

    def leave(self, request: Request) -> RunningRequest:
        """The row that the request held; its memory is the caller's to release."""
        request.active = None
        return self.active.pop(request)

    def add_decodes(
        self, step: StepDraft, make_room: Callable[[list[RunningRequest]], list[RunningRequest]]
    ) -> None:
        """One token for every decoding row that has, or gets, a slot for it.

        `make_room` is asked for pages when there are too few; it returns the rows that still run.
        """
        self._decoding = [a for a in self._decoding if a.live and a.samples_left]
        rows = self._decoding[: step.budget]
        full = [active for active in rows if active.launched == active.capacity]
        if full:
            rows = self._grow(rows, full, step.appended, make_room)
        for active in rows:
            active.launched += 1
            active.samples_left -= 1
        step.decodes = rows
        step.budget -= len(rows)

    def _grow(
        self,
        rows: list[RunningRequest],
        full: list[RunningRequest],
        appended: list[tuple[int, int]],
        make_room: Callable[[list[RunningRequest]], list[RunningRequest]],
    ) -> list[RunningRequest]:
        """A page for each row in `full`, the oldest request first; returns the rows that can go on.

        Rows without a page sit this step out: pages behind a fence are on their way.
        """
        pool = self._memory.pool
        if not self._memory.ensure_free(len(full)):
            full = make_room(full)
            full.sort(key=lambda active: active.request.order)
        served = full[: pool.free]
        for active, page in zip(served, pool.allocate(len(served)), strict=True):
            active.pages.append(page)
            active.capacity += self._page_size
            active.announced += 1
            appended.append((active.row, page))
        return [a for a in rows if a.live and a.launched < a.capacity]

    def add_prefills(self, step: StepDraft) -> None:
        """Chunks for rows in prefill while the budget lasts."""
        for active in self._prefilling:
            if step.budget <= 0:
                break
            if active.live:
                self.add_chunk(step, active)

    @property
    def prefill_backlog(self) -> int:
        """Known tokens of its rows that are yet to be computed, launched or not."""
        return sum(max(0, active.length - active.computed) for active in self.active.values())

    def add_chunk(self, step: StepDraft, active: RunningRequest) -> None:
        """As much of a row's known tokens as the budget, which must not be 0, allows."""
        start = active.launched
        length = min(step.budget, active.length - start)
        end = start + length
        sample = end == active.length and active.samples_left > 0
        step.chunks.append((active, PrefillChunk(active.row, start, length, sample)))
        needed = self._memory.pages_for(end)
        step.appended.extend((active.row, page) for page in active.pages[active.announced : needed])
        active.announced = max(active.announced, needed)
        active.launched = end
        step.budget -= length

    def sort_prefilled(self) -> None:
        """Rows whose last chunk is launched decode from the next step on."""
        still = []
        for active in self._prefilling:
            if not active.live:
                continue
            if active.in_prefill:
                still.append(active)
                continue
            active.request.become(RequestState.DECODE)
            if active.samples_left:
                active.samples_left -= 1  # the one that the last chunk takes
                self._decoding.append(active)
        self._prefilling = still

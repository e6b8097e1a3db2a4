"""The requests that hold a row, and what each of them adds to the step that is being built."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from radixgrove.worker.plan import NewRow, PrefillChunk, ShrunkRow
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.request import Request, RequestState, RunningRequest
from radixgrove.worker.scheduler.row_windows import Entries
from radixgrove.worker.scheduler.step_time import StepTime

MakeRoom = Callable[[list[RunningRequest]], list[RunningRequest]]


@dataclass(slots=True)
class StepDraft:
    """A step while it is put together."""

    budget: int  # tokens it may still take
    decodes: list[RunningRequest] = field(default_factory=list)
    decode_bounds: list[int] = field(default_factory=list)  # empty: one token each
    chunks: list[tuple[RunningRequest, PrefillChunk]] = field(default_factory=list)
    chunk_bounds: list[int] = field(default_factory=list)  # of the chunks that sample; likewise
    new_rows: list[NewRow] = field(default_factory=list)
    appended: list[tuple[int, int]] = field(default_factory=list)  # row, page
    shared_windows: Entries = field(default_factory=list)  # of prefixes that new rows begin behind
    awaited: int = 0  # the last load with pages that a row reads
    time: StepTime | None = None  # None: its prefill is bounded by tokens alone
    seconds: float = math.inf  # that its prefill may still take
    owed: int = 0  # tokens that its prefill gets, however long they take

    @property
    def sampled(self) -> list[RunningRequest]:
        """Rows that may get tokens, in the order of the results."""
        return [active for active, chunk in self.chunks if chunk.sample] + self.decodes

    @property
    def full(self) -> bool:
        """Whether it takes no further chunk."""
        return self.budget <= 0 or (self.seconds <= 0 and self.owed <= 0)

    def longest_chunk(self, start: int) -> int:
        """Most tokens of a chunk from `start` on, at least one; for a step that is not full."""
        if self.time is None:
            return self.budget
        in_time = self.time.longest_chunk(start, self.seconds)
        return min(self.budget, max(1, self.owed, in_time))

    def take(self, start: int, length: int) -> None:
        """A chunk is in the step."""
        self.budget -= length
        if self.time is not None:
            self.seconds -= self.time.of_chunk(start, length)
            self.owed -= length


class Batch:
    """Rows by request, in order of admission. Its lists of rows are swept when a step is built."""

    def __init__(self, config: SchedulerConfig, memory: KVMemory) -> None:
        self.active: dict[Request, RunningRequest] = {}
        self._page_size = config.page_size
        self._most = min(config.max_row_tokens, config.max_step_tokens)  # tokens of a row and step
        self._micro_batches = config.micro_batches
        self._run_ahead = config.run_ahead
        self._turn = config.micro_batches  # counts steps; rows that wait for their first had 0
        self._memory = memory
        self._prefilling: list[RunningRequest] = []
        self._decoding: list[RunningRequest] = []  # a stable order
        self._left = False  # some of them are not live any more
        self._in_lockstep = 0  # rows that wait for their tokens
        self.ruled = 0  # rows of requests that have rules
        self._shrunk: dict[RunningRequest, ShrunkRow] = {}

    def enter(self, active: RunningRequest) -> None:
        active.request.active = active
        self.active[active.request] = active
        self._prefilling.append(active)
        self._in_lockstep += self._waits(active)
        self.ruled += active.request.rules is not None

    def leave(self, request: Request) -> RunningRequest:
        """The row that the request held; its memory is the caller's to release."""
        request.active = None
        active = self.active.pop(request)
        self._in_lockstep -= self._waits(active)
        self.ruled -= request.rules is not None
        self._shrunk.pop(active, None)
        self._left = True
        return active

    def _waits(self, active: RunningRequest) -> bool:
        """Whether the row decodes only once all its tokens are on the host."""
        if active.request.submit.lockstep:
            return True
        return self._micro_batches > 1 and not self._run_ahead

    # ---- decodes ---------------------------------------------------------------------------------

    def add_decodes(self, step: StepDraft, make_room: MakeRoom, *, idle: bool) -> None:
        """Every decoding row that may go on, and has, or gets, a slot for a token at least.

        Args:
            make_room: asked for pages when there are too few; returns the rows that still run.
            idle: no step is in flight.
        """
        rows = self._take_turns(self._ready(idle=idle), step.budget // self._most)
        short = [active for active in rows if active.launched + self._most > active.capacity]
        if short:
            rows = self._grow(rows, short, step.appended, make_room)
        step.decodes = rows
        if self._most == 1:
            for active in rows:
                active.launched += 1
                active.tokens_left -= 1
            step.budget -= len(rows)
            return
        for active in rows:
            bound = min(self._most, active.tokens_left, active.capacity - active.launched)
            active.launched += bound
            active.tokens_left -= bound
            step.decode_bounds.append(bound)
        step.budget -= sum(step.decode_bounds)

    def _ready(self, *, idle: bool) -> list[RunningRequest]:
        """Rows that may be in the next step; with micro-batches, the share of one."""
        if self._left:
            self._decoding = [active for active in self._decoding if active.live]
            self._left = False
        if not self._in_lockstep and self._micro_batches == 1:
            return [active for active in self._decoding if active.tokens_left]
        ready = [active for active in self._decoding if active.tokens_left and not active.held]
        share = -(-len(self._decoding) // self._micro_batches)
        return self._in_turn(ready, share, idle=idle) if self._run_ahead else ready[:share]

    def _in_turn(
        self, ready: list[RunningRequest], share: int, *, idle: bool
    ) -> list[RunningRequest]:
        """Of the rows that are `ready` a part: between two samples of a row each other part has a
        step, so that no stage waits for another's tokens."""
        self._turn += 1
        parts = min(self._micro_batches, len(self.active))
        latest = self._turn - parts
        if not idle:
            ready = [active for active in ready if active.turn <= latest]
        dealt = {active.turn for active in self._decoding if active.turn > latest}
        left = max(1, parts - len(dealt))
        return ready[: min(share, -(-len(ready) // left))]

    def _take_turns(self, ready: list[RunningRequest], most: int) -> list[RunningRequest]:
        """The first of them, where a step cannot hold all: these stand behind the others then."""
        if len(ready) <= most:
            return ready
        rows = ready[:most]
        served = set(rows)
        self._decoding = [active for active in self._decoding if active not in served] + rows
        return rows

    def _grow(
        self,
        rows: list[RunningRequest],
        short: list[RunningRequest],
        appended: list[tuple[int, int]],
        make_room: MakeRoom,
    ) -> list[RunningRequest]:
        """Pages for the rows that are `short` of them; returns the rows that can go on.

        When there are too few for all, one page for each row that has no slot left, the oldest
        request first. Rows without a slot sit this step out: pages behind a fence are on their way.
        """
        pool = self._memory.pool
        takers = self._takers(short)
        if not self._memory.ensure_free(len(takers)):
            takers = make_room([active for active in short if active.launched == active.capacity])
            takers.sort(key=lambda active: active.request.order)
            takers = takers[: pool.free]
        for active, page in zip(takers, pool.allocate(len(takers)), strict=True):
            active.pages.append(page)
            active.capacity += self._page_size
            active.announced += 1
            appended.append((active.row, page))
        return [active for active in rows if active.live and active.launched < active.capacity]

    def _takers(self, short: list[RunningRequest]) -> list[RunningRequest]:
        """Each row as many times as it needs a page for the most that a step may yield it."""
        if self._most == 1:
            return short
        takers = []
        for active in short:
            most = active.launched + min(self._most, active.tokens_left)
            takers += [active] * (self._memory.pages_for(most) - len(active.pages))
        return takers

    # ---- prefill ---------------------------------------------------------------------------------

    def add_prefills(self, step: StepDraft, most_left: int | None = None) -> None:
        """Chunks for rows in prefill that have none in this step, while the budget lasts.

        Args:
            most_left: only for those with so few tokens left.
        """
        begun = {active for active, _ in step.chunks}
        for active in self._prefilling:
            if step.full:
                break
            short = most_left is None or active.length - active.launched <= most_left
            if active.live and short and active not in begun:
                self.add_chunk(step, active)

    def prefills_more_than(self, tokens: int) -> bool:
        """Whether a row in prefill has more tokens left."""
        return any(
            active.live and active.length - active.launched > tokens for active in self._prefilling
        )

    @property
    def prefill_backlog(self) -> int:
        """Known tokens of its rows that are yet to be computed, launched or not."""
        return sum(active.length - active.prefilled for active in self.active.values())

    def add_chunk(self, step: StepDraft, active: RunningRequest) -> None:
        """Add a chunk of a row's known tokens, as long as the step allows; it must not be full."""
        start = active.launched
        length = min(step.longest_chunk(start), active.length - start)
        end = start + length
        sample = end == active.length and active.tokens_left > 0
        step.chunks.append((active, PrefillChunk(active.row, start, length, sample)))
        step.take(start, length)
        active.launched = end
        if sample:
            self._bound_first(step, active)
        needed = self._memory.pages_for(active.launched)
        step.appended.extend((active.row, page) for page in active.pages[active.announced : needed])
        active.announced = max(active.announced, needed)

    def _bound_first(self, step: StepDraft, active: RunningRequest) -> None:
        """The most tokens that a row gets from its last chunk: what its pages have slots for."""
        bound = 1
        if self._most > 1:
            slots = active.capacity - active.launched + 1
            bound = min(self._most, active.tokens_left, slots, step.budget + 1)
            step.chunk_bounds.append(bound)
        active.launched += bound - 1
        active.tokens_left -= bound
        step.budget -= bound - 1

    # ---- around a step ---------------------------------------------------------------------------

    def launch(self, step: StepDraft) -> list[RunningRequest]:
        """The step goes out. Rows with their last chunk in it decode from the next one on.

        Returns:
            The rows that are held until the step has been collected.
        """
        held = []
        if self._run_ahead:
            for active in step.sampled:
                active.turn = self._turn
        if self._in_lockstep:
            held = [active for active in step.sampled if self._waits(active)]
            for active in held:
                active.held = True
        if step.chunks:
            self._sort_prefilled()
        return held

    def _sort_prefilled(self) -> None:
        still = []
        for active in self._prefilling:
            if not active.live:
                continue
            if active.in_prefill:
                still.append(active)
            else:
                active.request.become(RequestState.DECODE)
                self._decoding.append(active)
        self._prefilling = still

    def shrink(self, active: RunningRequest, surplus: int) -> None:
        """Correct a row's length after a step that yielded `surplus` tokens fewer than its bound.

        Later steps may yield those tokens; pages reserved for them are released.
        """
        active.launched -= surplus
        active.tokens_left += surplus
        self._memory.trim(active)
        self._shrunk[active] = ShrunkRow(active.row, active.launched + 1, active.announced)

    def take_shrunk(self) -> list[ShrunkRow]:
        """The corrected rows that the next plan tells the device of; the list is emptied."""
        if not self._shrunk:
            return []
        shrunk, self._shrunk = list(self._shrunk.values()), {}
        return shrunk

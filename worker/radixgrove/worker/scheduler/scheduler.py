"""The scheduler: requests in, step plans out, results in, tokens out.

Continuous batching: every step holds every decoding row that may go on, then prefill chunks up to
the step's budget, of which long prompts leave short ones a share. `intake` takes requests in,
`admission` decides who runs, `batch` what each row adds to a step, `results` what comes of it, and
`lifecycle` how requests end. All times are Unix seconds, given by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llguidance import LLTokenizer

from radixgrove.protocol.blocks import BlockHasher
from radixgrove.protocol.constraints.constraint import ConstraintError
from radixgrove.worker.cache.events import in_chunks
from radixgrove.worker.cache.node import CacheScope
from radixgrove.worker.messages import (
    CacheEvent,
    EngineState,
    Peek,
    Peeked,
    RefusalReason,
    Stats,
    Submit,
)
from radixgrove.worker.plan import PageCopies, StepPlan, StepResult
from radixgrove.worker.scheduler.admission import Admission
from radixgrove.worker.scheduler.batch import Batch, StepDraft
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.counters import Counters
from radixgrove.worker.scheduler.estimate import QueuePace
from radixgrove.worker.scheduler.grammars import Grammars, LoadTokenizer
from radixgrove.worker.scheduler.intake import Intake
from radixgrove.worker.scheduler.invariants import check_memory
from radixgrove.worker.scheduler.lifecycle import Lifecycle, Output
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.queue import WaitingQueue
from radixgrove.worker.scheduler.results import Results
from radixgrove.worker.scheduler.rules import Masks
from radixgrove.worker.scheduler.step_time import StepTime, StepWork, pairs

_SNAPSHOT_CHUNK = 8192  # blocks of one snapshot message
# While long prompts are computed, one token in so many of a step is for prompts that need no more.
_SHORT_SHARE = 4


def _no_tokenizer() -> LLTokenizer:
    raise ConstraintError("this engine has no tokenizer")


class Scheduler:
    """Owns every request and all device memory of one engine. Single-threaded.

    `hasher` makes the block hasher of a namespace; None when cache events are not wanted. `load`
    reads the model's tokenizer, for grammars; None where there are none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        hasher: Callable[[str], BlockHasher] | None = None,
        load: LoadTokenizer | None = None,
    ) -> None:
        self.config = config
        self.grammars = Grammars(
            load or _no_tokenizer,
            config.vocab_size,
            config.grammar_timeout,
            config.grammar_threads,
        )
        self.memory = KVMemory(config, hasher)
        self.counters = Counters()
        # Set by the caller from what it measures: plans depend on inputs alone.
        self.step_time = StepTime()
        self.work = StepWork()  # of the step planned last; kept where steps are bounded by time
        self._queue = WaitingQueue(config.schedule_policy, self.memory.tree)
        self._batch = Batch(config, self.memory)
        self._admission = Admission(config, self.memory, self._queue, self._batch, self.counters)
        self._pace = QueuePace()
        self._lifecycle = Lifecycle(self._queue, self._admission, self._pace, self.counters)
        self._intake = Intake(
            config, self._queue, self._batch, self._pace, self._lifecycle, self.grammars
        )
        self._results = Results(
            self.memory,
            self._batch,
            self._admission,
            self._lifecycle,
            self.grammars,
            self.counters,
            config,
        )

    # ---- what others may ask ---------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self._results.in_flight

    @property
    def copies_in_flight(self) -> int:
        return self.memory.timeline.copies_in_flight

    @property
    def has_work(self) -> bool:
        return bool(self._lifecycle.requests or self.in_flight)

    def requests_of(self, frontend: int) -> list[str]:
        """Ids of a frontend's live requests."""
        live = self._lifecycle.requests.values()
        return [request.request_id for request in live if request.frontend == frontend]

    def take_outputs(self) -> dict[int, list[Output]]:
        """Everything for the frontends since the last call, by frontend."""
        return self._lifecycle.outbox.take()

    def take_admitted(self) -> list[str]:
        """Requests that began their prefill since the last call."""
        return self._admission.take_admitted()

    def take_cache_events(self) -> list[CacheEvent]:
        return self.memory.tree.events.take()

    def cache_snapshot(self) -> Iterator[list[CacheEvent]]:
        """All cached blocks, in chunks. Take the pending events first: these include them."""
        return in_chunks(self.memory.tree.blocks(), _SNAPSHOT_CHUNK)

    def stats(self, state: EngineState, ticks: int, step_remaining: float | None) -> Stats:
        pool, tree, counters = self.memory.pool, self.memory.tree, self.counters
        host = self.memory.host
        return Stats(
            state=state,
            ticks=ticks,
            steps=self.memory.timeline.collected,
            step_remaining=step_remaining,
            running=len(self._batch.active),
            waiting=self._waiting,
            waiting_tokens=self._queue.tokens,
            prefill_backlog=self._batch.prefill_backlog,
            pages_total=pool.num_pages,
            pages_free=pool.free,
            pages_evictable=tree.residency.evictable,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            window_lost_tokens=counters.window_lost_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            evicted_pages=tree.residency.evicted,
            finished=counters.finished,
            aborted=counters.aborted,
            matchers=self.grammars.live,
            awaiting_grammar=self.grammars.awaited,
            host_pages_total=0 if host is None else host.pool.num_pages,
            host_pages_used=0 if host is None else host.pool.num_pages - host.pool.free,
            host_cached_tokens=counters.host_cached_tokens,
            saved_pages=0 if host is None else host.saved,
            loaded_pages=0 if host is None else host.loaded,
        )

    def peek(self, peek: Peek) -> Peeked:
        """How much of a prompt is there, and how busy this engine is; changes nothing."""
        scope = CacheScope(self.config.namespace, peek.domain)
        return Peeked(
            peek_id=peek.peek_id,
            matched_tokens=self._admission.cached_tokens(scope, peek.token_ids),
            queued_tokens=self._admission.queued_tokens + self._batch.prefill_backlog,
            running=len(self._batch.active),
            waiting=self._waiting,
        )

    @property
    def _waiting(self) -> int:
        return len(self._lifecycle.requests) - len(self._batch.active)

    def check(self) -> None:
        """Raises PoolError or InvariantError when a page, lock or counter is out of place."""
        loads = self._admission.loads
        held = [] if loads is None else [hold.node for _, hold in loads.holds()]
        check_memory(self.memory, list(self._batch.active.values()), held)

    # ---- requests in and out ---------------------------------------------------------------------

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it at once; either way `take_outputs` will tell."""
        self._intake.submit(submit, now)

    def fail(self, submit: Submit, detail: str) -> None:
        """End one request that could not be handled, known already or not."""
        self._lifecycle.fail(submit, detail)

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; one that has already ended is left alone."""
        self._lifecycle.abort(request_id)

    def flush_cache(self) -> None:
        """Drop every cached page that no running request holds."""
        self.memory.tree.residency.clear()

    # ---- steps -----------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan and account for the next step; None when nothing can be computed now.

        The caller launches the plan before it calls anything else.
        """
        self._lifecycle.refuse_expired(now)
        self._admission.settle_loads()
        if self.grammars.building:
            self._settle_grammars(now)
        step = StepDraft(self.config.max_step_tokens)
        preemptions = self.counters.preemptions
        if self._batch.active or self._queue:
            self._fill(step, now)
        else:
            self._pace.idle()
        self.memory.tree.residency.save_wanted()
        saves, loads = self.memory.take_copies()
        if not (step.decodes or step.chunks or saves or loads):
            # Where all rows in turn were preempted, others can go on with their pages.
            return self.schedule(now) if self.counters.preemptions > preemptions else None
        return self._launch(step, saves, loads)

    def _settle_grammars(self, now: float) -> None:
        """Requests may be admitted once their grammar is there."""
        for settled in self.grammars.settle(now):
            if settled.error is not None:
                late = RefusalReason.GRAMMAR_TOO_COMPLEX
                reason = late if settled.late else RefusalReason.GRAMMAR_FAILED
                self._lifecycle.refuse(settled.request, reason, settled.error)

    def _fill(self, step: StepDraft, now: float) -> None:
        """Decodes first, then short prompts, prefill that has begun, and new requests."""
        preemptions = self.counters.preemptions
        if self._may_decode:
            idle = not self._results.in_flight
            self._batch.add_decodes(step, self._admission.make_room, idle=idle)
        if self.config.max_step_seconds is not None:
            self._bound_time(step, self.config.max_step_seconds)
        # A preempted request would come straight back for the pages it just gave.
        may_admit = preemptions == self.counters.preemptions
        admitted = self._serve_short(step, now, may_admit)
        self._batch.add_prefills(step)
        if may_admit:
            admitted += self._admission.admit(step, now)
        if admitted:
            self._pace.admitted(admitted, now)

    @property
    def _may_decode(self) -> bool:
        """Whether the next step may have rows that decode.

        Rows of micro-batches that end in turns would stay in as many parts as there are steps in
        flight: those that are back wait for those that come back next, so that parts grow level.
        """
        parts = self.config.micro_batches
        return parts == 1 or self.config.run_ahead or self._results.decoding < parts

    def _bound_time(self, step: StepDraft, most: float) -> None:
        """Rows that decode wait for the end of the step: prefill gets the time that is left."""
        kv_tokens = sum(active.launched for active in step.decodes)
        self.work = StepWork(self.config.max_step_tokens - step.budget, 0, kv_tokens)
        if step.decodes and self.step_time.token + self.step_time.pair > 0:
            step.time = self.step_time
            step.seconds = most - self.step_time.of(self.work)
            step.owed = self.config.page_size

    def _serve_short(self, step: StepDraft, now: float, may_admit: bool) -> int:
        """Short prompts beside long ones: a share of the step is theirs; how many were admitted."""
        share = self.config.max_step_tokens // _SHORT_SHARE
        if not self._batch.prefills_more_than(share):
            return 0
        others = max(0, step.budget - share)
        others_seconds = 0.0 if step.time is None else step.seconds * (1 - 1 / _SHORT_SHARE)
        owed, step.owed = step.owed, 0
        step.budget -= others
        step.seconds -= others_seconds
        self._batch.add_prefills(step, share)
        admitted = self._admission.admit_short(step, now, share) if may_admit else 0
        step.budget += others
        step.seconds += others_seconds
        step.owed = owed
        return admitted

    def _launch(
        self, step: StepDraft, saves: list[PageCopies], loads: list[PageCopies]
    ) -> StepPlan:
        """Account for a step as in flight."""
        timeline, row_windows = self.memory.timeline, self.memory.row_windows
        prefilling = [active for active, _ in step.chunks]
        window_pages = step.shared_windows + row_windows.assign(step.decodes, prefilling)
        timeline.launched += 1
        row_windows.move_on(prefilling)
        if self.config.max_step_seconds is not None:
            self.work = _with_chunks(self.work, step)
        plan = StepPlan(
            step_id=timeline.launched,
            shrunk_rows=self._batch.take_shrunk(),
            new_rows=step.new_rows,
            appended_pages=step.appended,
            window_pages=window_pages,
            prefills=[chunk for _, chunk in step.chunks],
            decodes=[active.row for active in step.decodes],
            bounds=step.chunk_bounds + step.decode_bounds,
            saves=saves,
            loads=loads,
            collected=timeline.collected,
            saved=timeline.saves_ended,
            loaded=timeline.loads_ended,
            awaited=step.awaited,
        )
        self._results.expect(plan, step, self._batch.launch(step))
        return plan

    def copies_ended(self, save: int, load: int) -> None:
        """Saves and loads up to these, as `Executor.copies_ended` says."""
        self.memory.copies_ended(save, load)

    @property
    def masked(self) -> bool:
        """Whether the step planned last samples rows with rules: it is launched in two parts, and
        `fill_masks` comes between them."""
        return self._results.masked

    @property
    def masks_await_tokens(self) -> bool:
        """Whether an older step must be collected before `fill_masks`, which is of the oldest step
        that awaits its masks: the one after it may be planned meanwhile, and is launched behind."""
        return self._results.awaited

    def fill_masks(self, buffer: Callable[[int, int], Masks]) -> list[int]:
        """See `Results.fill_masks`."""
        return self._results.fill_masks(buffer)

    def complete(self, result: StepResult) -> None:
        """Take in the results of the oldest step in flight.

        Raises:
            RuntimeError: they are another step's, or not within the plan's bounds.
        """
        self._results.complete(result)


def _with_chunks(decodes: StepWork, step: StepDraft) -> StepWork:
    chunks = [chunk for _, chunk in step.chunks]
    return StepWork(
        decodes.tokens + sum(chunk.length for chunk in chunks),
        sum(pairs(chunk.start, chunk.length) for chunk in chunks),
        decodes.kv_tokens,
    )

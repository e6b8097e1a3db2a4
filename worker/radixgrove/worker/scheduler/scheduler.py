"""The scheduler: requests in, step plans out, results in, tokens out.

Continuous batching: every step holds one token of every decoding row, then prefill chunks up to the
step's budget. A request is admitted when its whole input fits and the expected output of all
running requests still does; when the guess fails, the request that is cheapest to recompute is
preempted. All times are Unix seconds, given by the caller.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from radixgrove.protocol.blocks import BlockHasher
from radixgrove.protocol.settings import SchedulePolicy
from radixgrove.worker.cache.events import in_chunks
from radixgrove.worker.cache.node import Scope
from radixgrove.worker.messages import (
    CacheEvent,
    EngineState,
    Finish,
    RefusalReason,
    Refused,
    Stats,
    Submit,
    TokenLogprobs,
    Tokens,
)
from radixgrove.worker.plan import NewRow, PrefillChunk, StepPlan, StepResult
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.estimate import OutputEstimator, QueuePace
from radixgrove.worker.scheduler.invariants import check_memory
from radixgrove.worker.scheduler.leaders import PrefixLeaders
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.queue import WaitingQueue
from radixgrove.worker.scheduler.request import ActiveRow, Request, State, count_tokens

logger = logging.getLogger(__name__)

Output = Tokens | Refused

# A step looks at no more requests than this that wait for another's prefix: looking costs CPU.
_MOST_FOLLOWERS = 128

_SNAPSHOT_CHUNK = 8192  # blocks of one snapshot message


@dataclass(slots=True)
class _Flight:
    """A launched step. Rows are compared by identity: a row released since is no longer `live`."""

    step_id: int
    chunks: list[tuple[ActiveRow, int]]  # with the end of each chunk
    sampled: list[ActiveRow]  # in the order of the result's tokens


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0


class Scheduler:
    """Owns every request and all device memory of one engine. Single-threaded.

    `hasher` makes the block hasher of a namespace; None when cache events are not wanted.
    """

    def __init__(
        self, config: SchedulerConfig, hasher: Callable[[str], BlockHasher] | None = None
    ) -> None:
        self.config = config
        self.memory = KVMemory(config, hasher)
        self.counters = _Counters()
        self._queue = WaitingQueue(config.schedule_policy, self.memory.tree)
        self._leaders = PrefixLeaders(config.page_size)
        self._estimator = OutputEstimator()
        self._pace = QueuePace()
        self._requests: dict[str, Request] = {}
        self._active: dict[Request, ActiveRow] = {}  # in order of admission
        self._prefilling: list[ActiveRow] = []
        self._decoding: list[ActiveRow] = []  # rows that may launch a decode; a stable order
        self._flights: deque[_Flight] = deque()
        self._outbox: dict[int, list[Output]] = {}
        self._admitted: list[str] = []
        self._order = 0
        self._watermark = math.ceil(config.watermark * config.num_pages)

    # ---- what others may ask ---------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._flights)

    def requests_of(self, frontend: int) -> list[str]:
        """Ids of a frontend's live requests."""
        return [r.request_id for r in self._requests.values() if r.frontend == frontend]

    def take_outputs(self) -> dict[int, list[Output]]:
        """Everything for the frontends since the last call, by frontend."""
        outputs, self._outbox = self._outbox, {}
        return outputs

    def take_admitted(self) -> list[str]:
        """Requests whose prefill began since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def take_cache_events(self) -> list[CacheEvent]:
        return self.memory.tree.events.take()

    def cache_snapshot(self) -> Iterator[list[CacheEvent]]:
        """All cached blocks, in chunks. Take the pending events first: these include them."""
        return in_chunks(self.memory.tree.blocks(), _SNAPSHOT_CHUNK)

    def stats(self, state: EngineState, ticks: int, step_deadline: float | None) -> Stats:
        pool, tree, counters = self.memory.pool, self.memory.tree, self.counters
        return Stats(
            state=state,
            ticks=ticks,
            steps=self.memory.clock.collected,
            step_deadline=step_deadline,
            running=len(self._active),
            waiting=len(self._requests) - len(self._active),
            waiting_tokens=self._queue.tokens,
            pages_total=pool.num_pages,
            pages_free=pool.free,
            pages_evictable=tree.evictable,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            evicted_pages=tree.evicted,
            finished=counters.finished,
            aborted=counters.aborted,
        )

    def check(self) -> None:
        """Raises PoolError or InvariantError when a page, lock or counter is out of place."""
        check_memory(self.memory, list(self._active.values()))

    # ---- requests in and out ---------------------------------------------------------------------

    def submit(self, submit: Submit, now: float) -> None:
        """Queue a request, or refuse it at once; either way `take_outputs` will tell."""
        refusal = self._refusal(submit)
        if refusal is not None:
            self._put(submit.frontend, refusal)
            return
        prompt_len = count_tokens(submit.token_ids)
        deadline = now + self.config.queue_timeout
        if submit.queue_deadline is not None:
            deadline = min(deadline, submit.queue_deadline)
        sampling = submit.sampling
        self._order += 1
        request = Request(
            request_id=submit.request_id,
            frontend=submit.frontend,
            prompt=submit.token_ids,
            prompt_len=prompt_len,
            submit=submit,
            scope=Scope(self.config.namespace, submit.domain),
            order=self._order,
            arrived=now,
            deadline=deadline,
            limit=min(sampling.max_tokens, self.config.max_model_len - prompt_len),
            stop_ids=frozenset(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
            wants_logprobs=sampling.logprobs is not None,
        )
        self._requests[request.request_id] = request
        self._queue.add(request)
        if request.reads_cache:
            self._queue.look_up(request)

    def _refusal(self, submit: Submit) -> Refused | None:
        config = self.config

        def refused(reason: RefusalReason, detail: str, retry: float | None = None) -> Refused:
            return Refused(
                request_id=submit.request_id, reason=reason, detail=detail, retry_after=retry
            )

        if submit.request_id in self._requests:
            return refused(RefusalReason.INTERNAL, "This request id is already in use.")
        if not submit.token_ids or len(submit.token_ids) % 4:
            return refused(RefusalReason.INTERNAL, "The prompt is not a list of token ids.")
        token_ids = np.frombuffer(submit.token_ids, dtype="<i4")
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= config.vocab_size:
            return refused(RefusalReason.INTERNAL, "The prompt holds an unknown token id.")
        least_output = min(1, submit.sampling.max_tokens)
        if len(token_ids) + least_output > config.max_model_len:
            return refused(
                RefusalReason.TOO_LONG,
                f"This model's maximum context length is {config.max_model_len} tokens. However, "
                f"your prompt has {len(token_ids)} tokens.",
            )
        waiting = len(self._queue)
        # Rows that stand empty are as good as places in the queue.
        room = config.max_queued + config.max_running - len(self._active)
        too_many_tokens = self._queue.prompt_tokens + len(token_ids) > config.max_queued_tokens
        if waiting >= room or (waiting and too_many_tokens):
            return refused(
                RefusalReason.QUEUE_FULL,
                "Too many requests are waiting. Try again later.",
                self._pace.retry_after(waiting),
            )
        return None

    def fail(self, submit: Submit, detail: str) -> None:
        """End one request that could not be handled, known already or not."""
        request = self._requests.get(submit.request_id)
        if request is not None:
            self._refuse(request, RefusalReason.INTERNAL, detail)
        else:
            self._put(
                submit.frontend,
                Refused(request_id=submit.request_id, reason=RefusalReason.INTERNAL, detail=detail),
            )

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; one that has already ended is left alone."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, State.ABORTED)
            self.counters.aborted += 1
            self._put(
                request.frontend, Tokens(request_id=request_id, token_ids=[], finish=Finish.ABORT)
            )

    def flush_cache(self) -> None:
        """Drop every cached page that no running request holds."""
        self.memory.tree.evict(self.memory.tree.evictable)

    def _put(self, frontend: int, output: Output) -> None:
        self._outbox.setdefault(frontend, []).append(output)

    def _refuse(self, request: Request, reason: RefusalReason, detail: str) -> None:
        self._end(request, State.REFUSED)
        retry = self._pace.retry_after(len(self._queue))
        self._put(
            request.frontend,
            Refused(
                request_id=request.request_id,
                reason=reason,
                detail=detail,
                retry_after=retry if reason is RefusalReason.QUEUE_TIMEOUT else None,
            ),
        )

    def _end(self, request: Request, state: State) -> None:
        """The one way in which a request leaves, whatever held it."""
        if request.active is not None:
            self._vacate(request)
        else:
            self._queue.remove(request)
        request.become(state)
        del self._requests[request.request_id]

    def _vacate(self, request: Request) -> None:
        """Take a request out of its row. The lists of rows are swept by the next `schedule`."""
        active = self._active.pop(request)
        request.active = None
        self._leaders.drop(active)
        self.memory.release(active)

    # ---- planning --------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan and account for the next step; None when nothing can be computed now.

        The caller launches the plan before it calls anything else.
        """
        for request in self._queue.expired(now):
            self._refuse(
                request, RefusalReason.QUEUE_TIMEOUT, "The request waited too long in the queue."
            )
        if not self._active and not self._queue:
            self._pace.idle()
            return None
        appended: list[tuple[int, int]] = []
        preemptions = self.counters.preemptions
        decodes = self._plan_decodes(appended)
        budget = self.config.max_step_tokens - len(decodes)
        chunks: list[tuple[ActiveRow, PrefillChunk]] = []
        budget = self._plan_prefills(self._prefilling, budget, chunks, appended)
        new_rows: list[NewRow] = []
        if preemptions == self.counters.preemptions:
            # Whoever was preempted would come straight back for the pages it just gave.
            self._admit(budget, now, new_rows, chunks, appended)
        if not decodes and not chunks:
            return None

        clock = self.memory.clock
        clock.launched += 1
        plan = StepPlan(
            step_id=clock.launched,
            freed_rows=self.memory.rows.announce(),
            new_rows=new_rows,
            appended_pages=appended,
            prefills=[chunk for _, chunk in chunks],
            decodes=[active.row for active in decodes],
        )
        flight = _Flight(
            step_id=plan.step_id,
            chunks=[(active, chunk.start + chunk.length) for active, chunk in chunks],
            sampled=[active for active, chunk in chunks if chunk.sample] + decodes,
        )
        self._flights.append(flight)
        if chunks:
            self._sort_prefilled()
        return plan

    def _plan_decodes(self, appended: list[tuple[int, int]]) -> list[ActiveRow]:
        """One token for every decoding row that has, or gets, a slot for it."""
        self._decoding = [a for a in self._decoding if a.live and a.samples_left]
        budget = self.config.max_step_tokens
        rows = self._decoding if len(self._decoding) <= budget else self._decoding[:budget]
        full = [active for active in rows if active.launched == active.capacity]
        if full:
            rows = self._grow(rows, full, appended)
        for active in rows:
            active.launched += 1
            active.samples_left -= 1
        return list(rows)

    def _grow(
        self, rows: list[ActiveRow], full: list[ActiveRow], appended: list[tuple[int, int]]
    ) -> list[ActiveRow]:
        """A page for each row in `full`, the oldest request first; returns the rows that can go on.

        Rows without a page sit this step out: pages behind a fence are on their way.
        """
        if not self.memory.obtain(len(full)):
            full = self._preempt_for(full)
            full.sort(key=lambda active: active.request.order)
        served = full[: self.memory.pool.free]
        for active, page in zip(served, self.memory.pool.allocate(len(served)), strict=True):
            active.pages.append(page)
            active.capacity += self.config.page_size
            active.announced += 1
            appended.append((active.row, page))
        return [a for a in rows if a.live and a.launched < a.capacity]

    def _preempt_for(self, full: list[ActiveRow]) -> list[ActiveRow]:
        """Preempt until each row in `full` has a page, or will have once fences pass.

        The oldest request is never preempted: it always goes on, so there is no livelock.
        """
        memory = self.memory
        oldest = min(self._active.values(), key=lambda active: active.request.order)
        while True:
            full = [active for active in full if active.live]
            # Rows that end with the results in flight give their pages back anyway.
            coming = memory.pool.retired + sum(
                len(active.pages) - (0 if active.node is None else active.node.end)
                for active in self._active.values()
                if active.ending
            )
            if memory.obtain(len(full)) or memory.pool.free + coming >= len(full):
                return full
            victims = [a for a in self._active.values() if a is not oldest and not a.ending]
            if not victims:
                return full
            self._preempt(min(victims, key=self._cost_of_preempting))

    def _cost_of_preempting(self, active: ActiveRow) -> tuple[int, int, int]:
        """Least important first, then what must be recomputed: pages that others hold stay."""
        request = active.request
        by_priority = self.config.schedule_policy is SchedulePolicy.PRIORITY
        kept = self.memory.tree.shared_pages(active.node) * self.config.page_size
        return (
            request.submit.priority if by_priority else 0,
            active.computed - kept,
            -request.order,
        )

    def _preempt(self, active: ActiveRow) -> None:
        request = active.request
        self._vacate(request)
        request.become(State.PREEMPTED)
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()
        self._queue.put_back(request)
        self._estimator.preempted()
        self.counters.preemptions += 1

    def _plan_prefills(
        self,
        rows: list[ActiveRow],
        budget: int,
        chunks: list[tuple[ActiveRow, PrefillChunk]],
        appended: list[tuple[int, int]],
    ) -> int:
        """Chunks for rows in prefill while the budget lasts; returns what is left of it."""
        for active in rows:
            if budget <= 0:
                break
            if not active.live:
                continue
            start = active.launched
            length = min(budget, active.length - start)
            end = start + length
            sample = end == active.length and active.samples_left > 0
            chunks.append((active, PrefillChunk(active.row, start, length, sample)))
            needed = self.memory.pages_for(end)
            appended.extend((active.row, page) for page in active.pages[active.announced : needed])
            active.announced = max(active.announced, needed)
            active.launched = end
            budget -= length
        return budget

    def _sort_prefilled(self) -> None:
        """Rows whose last chunk is launched decode from the next plan on."""
        still = []
        for active in self._prefilling:
            if not active.live:
                continue
            if active.in_prefill:
                still.append(active)
                continue
            active.request.become(State.DECODE)
            if active.samples_left:
                active.samples_left -= 1  # the one that the last chunk takes
                self._decoding.append(active)
        self._prefilling = still

    # ---- admission -------------------------------------------------------------------------------

    def _admit(
        self,
        budget: int,
        now: float,
        new_rows: list[NewRow],
        chunks: list[tuple[ActiveRow, PrefillChunk]],
        appended: list[tuple[int, int]],
    ) -> None:
        """Start waiting requests, in the policy's order, until one does not fit."""
        config, memory = self.config, self.memory
        if budget <= 0 or not self._queue or not memory.rows.free:
            return
        admitted: list[ActiveRow] = []
        followers = 0
        reserved = self._watermark + sum(map(self._expected_growth, self._active.values()))
        for request in self._queue.in_order(now):
            if budget <= 0 or not memory.rows.free or len(self._active) >= config.max_running:
                break
            tokens = request.tokens()
            if self._waits_for_leader(request, tokens):
                followers += 1
                if followers == _MOST_FOLLOWERS:
                    break
                continue
            active = self._try_start(request, tokens, reserved)
            if active is None:
                break
            reserved += self._expected_growth(active)
            admitted.append(active)
            new_rows.append(
                NewRow(
                    row=active.row,
                    token_ids=tokens,
                    prompt_len=request.prompt_len,
                    pages=active.pages[: active.announced],
                    sampling=request.submit.sampling,
                )
            )
            budget = self._plan_prefills([active], budget, chunks, appended)
        self._prefilling += admitted
        if admitted:
            self._pace.admitted(len(admitted), now)

    def _expected_growth(self, active: ActiveRow) -> int:
        """Pages that a running request is expected to add."""
        request = active.request
        more = self._estimator.remaining(len(request.output), request.limit)
        return max(0, self.memory.pages_for(request.length + more) - len(active.pages))

    def _waits_for_leader(self, request: Request, tokens: bytes) -> bool:
        if not (self.config.prefix_cache and request.reads_cache):
            return False
        limit = (count_tokens(tokens) - 1) // self.config.page_size
        node, depth = self.memory.tree.peek(request.scope, tokens, limit)
        request.follows = self._leaders.worth_waiting(node, depth, tokens, limit, request.follows)
        return request.follows

    def _try_start(self, request: Request, tokens: bytes, reserved: int) -> ActiveRow | None:
        """Give a request its row and pages; None when it does not fit beside the running ones."""
        memory = self.memory
        length = count_tokens(tokens)
        node = memory.find_prefix(request, tokens, (length - 1) // self.config.page_size)
        cached = 0 if node is None else node.end
        fresh = memory.pages_for(length) - cached
        available = memory.pool.free + memory.tree.evictable - memory.tree.unlocked_pages(node)
        wanted = fresh
        if self._active:
            more = self._estimator.remaining(len(request.output), request.limit)
            wanted = memory.pages_for(length + more) - cached + reserved
        active = None
        if wanted <= available:
            active = memory.occupy(request, tokens, length, node)
        if active is None:
            memory.tree.forget_if_empty(node)
            return None
        self._queue.remove(request)
        request.become(State.PREFILL)
        request.active = active
        self._active[request] = active
        self._leaders.update(active)
        if request.cached_tokens is None:
            request.cached_tokens = active.computed
            self.counters.prompt_tokens += request.prompt_len
            self.counters.cached_tokens += active.computed
            self._admitted.append(request.request_id)
        return active

    # ---- results ---------------------------------------------------------------------------------

    def complete(self, result: StepResult) -> None:
        """Take in the results of the oldest step in flight.

        Raises:
            RuntimeError: they are another step's, or not one token a sampled row.
        """
        flight = self._flights.popleft()
        if result.step_id != flight.step_id or len(result.tokens) != len(flight.sampled):
            raise RuntimeError(
                f"step {flight.step_id} with {len(flight.sampled)} samples was expected, got step "
                f"{result.step_id} with {len(result.tokens)}"
            )
        self.memory.collect(flight.step_id)
        for active, end in flight.chunks:
            if active.live:
                self._prefilled(active, end, result.prompt_logprobs.get(active.row))
        outbox = self._outbox
        generated = 0
        for active, token in zip(flight.sampled, result.tokens, strict=True):
            if not active.live:
                continue  # it ended while this step was in flight
            request = active.request
            output = request.output
            output.append(token)
            generated += 1
            count = len(output)
            active.computed = request.prompt_len + count - 1
            message = Tokens(request_id=request.request_id, token_ids=[token])
            if request.wants_logprobs:
                message.logprobs = result.logprobs.get(active.row)
                if message.logprobs is None:
                    self._refuse(request, RefusalReason.INTERNAL, "The engine lost its logprobs.")
                    continue
            if not request.answered:
                self._introduce(request, message)
            if token in request.stop_ids and count > request.min_tokens:
                message.stop_token = token
                message.finish = Finish.STOP
                self._finish(request)
            elif count >= request.limit:
                message.finish = Finish.LENGTH
                self._finish(request)
            if request.frontend in outbox:
                outbox[request.frontend].append(message)
            else:
                outbox[request.frontend] = [message]
        self.counters.generated_tokens += generated

    def _prefilled(self, active: ActiveRow, end: int, logprobs: list[TokenLogprobs] | None) -> None:
        request = active.request
        if request.wants_prompt_logprobs:
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)
            request.prompt_logprobs += logprobs or []
        active.computed = end
        self.memory.publish(active)
        self._leaders.update(active)
        if end == active.length and not request.limit:
            message = Tokens(request_id=request.request_id, token_ids=[], finish=Finish.LENGTH)
            self._introduce(request, message)
            self._put(request.frontend, message)
            self._finish(request)

    def _introduce(self, request: Request, message: Tokens) -> None:
        """What only a request's first message says."""
        request.answered = True
        message.cached_tokens = request.cached_tokens
        if request.submit.sampling.prompt_logprobs is not None:
            message.prompt_logprobs = request.prompt_logprobs

    def _finish(self, request: Request) -> None:
        self._end(request, State.FINISHED)
        self._estimator.observe(len(request.output), request.limit)
        self.counters.finished += 1

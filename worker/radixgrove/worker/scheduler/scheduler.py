"""The scheduler: requests in, step plans out, results in, tokens out.

Continuous batching: every step holds one token of every decoding row, then prefill chunks up to the
step's budget. `admission` decides who runs, `batch` what each row adds to a step. All times are
Unix seconds, given by the caller.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from radixgrove.protocol.blocks import BlockHasher
from radixgrove.worker.cache.events import in_chunks
from radixgrove.worker.cache.node import CacheScope
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
from radixgrove.worker.plan import PageCopies, StepPlan, StepResult
from radixgrove.worker.scheduler.admission import Admission
from radixgrove.worker.scheduler.batch import Batch, StepDraft
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.counters import Counters
from radixgrove.worker.scheduler.estimate import QueuePace
from radixgrove.worker.scheduler.invariants import check_memory
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.queue import WaitingQueue
from radixgrove.worker.scheduler.request import Request, RequestState, RunningRequest, count_tokens

logger = logging.getLogger(__name__)

Output = Tokens | Refused

_SNAPSHOT_CHUNK = 8192  # blocks of one snapshot message


@dataclass(slots=True)
class _Flight:
    """A launched step. Rows are compared by identity: a row released since is no longer `live`."""

    step_id: int
    chunks: list[tuple[RunningRequest, int]]  # with the end of each chunk
    sampled: list[RunningRequest]  # in the order of the result's tokens


class Scheduler:
    """Owns every request and all device memory of one engine. Single-threaded.

    `hasher` makes the block hasher of a namespace; None when cache events are not wanted.
    """

    def __init__(
        self, config: SchedulerConfig, hasher: Callable[[str], BlockHasher] | None = None
    ) -> None:
        self.config = config
        self.memory = KVMemory(config, hasher)
        self.counters = Counters()
        self._queue = WaitingQueue(config.schedule_policy, self.memory.tree)
        self._batch = Batch(config, self.memory)
        self._admission = Admission(config, self.memory, self._queue, self._batch, self.counters)
        self._pace = QueuePace()
        self._requests: dict[str, Request] = {}
        self._flights: deque[_Flight] = deque()
        self._outbox: dict[int, list[Output]] = {}
        self._order = 0

    # ---- what others may ask ---------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def copies_in_flight(self) -> int:
        return self.memory.timeline.copies_in_flight

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
        return self._admission.take_admitted()

    def take_cache_events(self) -> list[CacheEvent]:
        return self.memory.tree.events.take()

    def cache_snapshot(self) -> Iterator[list[CacheEvent]]:
        """All cached blocks, in chunks. Take the pending events first: these include them."""
        return in_chunks(self.memory.tree.blocks(), _SNAPSHOT_CHUNK)

    def stats(self, state: EngineState, ticks: int, step_deadline: float | None) -> Stats:
        pool, tree, counters = self.memory.pool, self.memory.tree, self.counters
        host = self.memory.host
        return Stats(
            state=state,
            ticks=ticks,
            steps=self.memory.timeline.collected,
            step_deadline=step_deadline,
            running=len(self._batch.active),
            waiting=len(self._requests) - len(self._batch.active),
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
            host_pages_total=0 if host is None else host.pool.num_pages,
            host_pages_used=0 if host is None else host.pool.num_pages - host.pool.free,
            host_cached_tokens=counters.host_cached_tokens,
            saved_pages=0 if host is None else host.saved,
            loaded_pages=0 if host is None else host.loaded,
        )

    def check(self) -> None:
        """Raises PoolError or InvariantError when a page, lock or counter is out of place."""
        loads = self._admission.loads
        held = [] if loads is None else [hold.node for _, hold in loads.holds()]
        check_memory(self.memory, list(self._batch.active.values()), held)

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
            scope=CacheScope(self.config.namespace, submit.domain),
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
        room = config.max_queued + config.max_running - len(self._batch.active)
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
            self._end(request, RequestState.ABORTED)
            self.counters.aborted += 1
            self._put(
                request.frontend, Tokens(request_id=request_id, token_ids=[], finish=Finish.ABORT)
            )

    def flush_cache(self) -> None:
        """Drop every cached page that no running request holds."""
        self.memory.tree.clear()

    def _put(self, frontend: int, output: Output) -> None:
        self._outbox.setdefault(frontend, []).append(output)

    def _refuse(self, request: Request, reason: RefusalReason, detail: str) -> None:
        self._end(request, RequestState.REFUSED)
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

    def _end(self, request: Request, state: RequestState) -> None:
        """The one way in which a request leaves, whatever held it."""
        if request.active is not None:
            self._admission.free_row(request)
        else:
            self._admission.leave_queue(request)
        request.become(state)
        del self._requests[request.request_id]

    # ---- planning --------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan and account for the next step; None when nothing can be computed now.

        The caller launches the plan before it calls anything else.
        """
        for request in self._queue.expired(now):
            self._refuse(
                request, RefusalReason.QUEUE_TIMEOUT, "The request waited too long in the queue."
            )
        self._admission.settle_loads()
        step = StepDraft(self.config.max_step_tokens)
        if self._batch.active or self._queue:
            self._fill(step, now)
        else:
            self._pace.idle()
        self.memory.tree.save_wanted()
        saves, loads = self.memory.take_copies()
        if not (step.decodes or step.chunks or saves or loads):
            return None
        return self._launch(step, saves, loads)

    def _fill(self, step: StepDraft, now: float) -> None:
        """Decodes first, then prefill that has begun, then new requests."""
        preemptions = self.counters.preemptions
        self._batch.add_decodes(step, self._admission.make_room)
        self._batch.add_prefills(step)
        # Whoever was preempted would come straight back for the pages it just gave.
        if preemptions == self.counters.preemptions:
            admitted = self._admission.admit(step, now)
            if admitted:
                self._pace.admitted(admitted, now)

    def _launch(
        self, step: StepDraft, saves: list[PageCopies], loads: list[PageCopies]
    ) -> StepPlan:
        """Account for a step as in flight."""
        timeline = self.memory.timeline
        timeline.launched += 1
        plan = StepPlan(
            step_id=timeline.launched,
            freed_rows=self.memory.rows.announce(),
            new_rows=step.new_rows,
            appended_pages=step.appended,
            prefills=[chunk for _, chunk in step.chunks],
            decodes=[active.row for active in step.decodes],
            saves=saves,
            loads=loads,
            collected=timeline.collected,
            saved=timeline.saves_ended,
            loaded=timeline.loads_ended,
            awaited=step.awaited,
        )
        flight = _Flight(
            step_id=plan.step_id,
            chunks=[(active, chunk.start + chunk.length) for active, chunk in step.chunks],
            sampled=[active for active, chunk in step.chunks if chunk.sample] + step.decodes,
        )
        self._flights.append(flight)
        if step.chunks:
            self._batch.sort_prefilled()
        return plan

    # ---- results ---------------------------------------------------------------------------------

    def copies_ended(self, save: int, load: int) -> None:
        """Saves and loads up to these, as `Executor.copies_ended` says."""
        self.memory.copies_ended(save, load)

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

    def _prefilled(
        self, active: RunningRequest, end: int, logprobs: list[TokenLogprobs] | None
    ) -> None:
        request = active.request
        if request.wants_prompt_logprobs:
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)
            request.prompt_logprobs += logprobs or []
        active.computed = end
        self.memory.publish(active)
        self._admission.in_flight_prefixes.update(active)
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
        self._end(request, RequestState.FINISHED)
        self._admission.estimator.observe(len(request.output), request.limit)
        self.counters.finished += 1

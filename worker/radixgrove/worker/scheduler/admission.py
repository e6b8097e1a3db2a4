"""Who of the waiting gets a row, and who of the running must give one up.

A request is admitted when its whole input fits and the expected output of all running requests
still does; when the guess fails, the request that is cheapest to recompute is preempted.
"""

from __future__ import annotations

import math

from radixgrove.protocol.settings import SchedulePolicy
from radixgrove.worker.plan import NewRow
from radixgrove.worker.scheduler.batch import Batch, Step
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.counters import Counters
from radixgrove.worker.scheduler.estimate import OutputEstimator
from radixgrove.worker.scheduler.leaders import PrefixLeaders
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.queue import WaitingQueue
from radixgrove.worker.scheduler.request import ActiveRow, Request, State, count_tokens

# A step looks at no more requests than this that wait for another's prefix: looking costs CPU.
_MOST_FOLLOWERS = 128


class Admission:
    """Moves requests between the queue and the batch, both ways."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVMemory,
        queue: WaitingQueue,
        batch: Batch,
        counters: Counters,
    ) -> None:
        self.estimator = OutputEstimator()
        self.leaders = PrefixLeaders(config.page_size)
        self._config = config
        self._memory = memory
        self._queue = queue
        self._batch = batch
        self._counters = counters
        self._watermark = math.ceil(config.watermark * config.num_pages)
        self._first_time: list[str] = []

    def take_admitted(self) -> list[str]:
        """Requests whose prefill began since the last call."""
        admitted, self._first_time = self._first_time, []
        return admitted

    # ---- in --------------------------------------------------------------------------------------

    def admit(self, step: Step, now: float) -> int:
        """Start waiting requests, in the policy's order, until one does not fit; how many."""
        config, memory, active = self._config, self._memory, self._batch.active
        if step.budget <= 0 or not self._queue or not memory.rows.free:
            return 0
        admitted = followers = 0
        reserved = self._watermark + sum(map(self._expected_growth, active.values()))
        for request in self._queue.in_order(now):
            if step.budget <= 0 or not memory.rows.free or len(active) >= config.max_running:
                break
            tokens = request.tokens()
            if self._waits_for_leader(request, tokens):
                followers += 1
                if followers == _MOST_FOLLOWERS:
                    break
                continue
            row = self._try_start(request, tokens, reserved)
            if row is None:
                break
            reserved += self._expected_growth(row)
            admitted += 1
            step.new_rows.append(
                NewRow(
                    row=row.row,
                    token_ids=tokens,
                    prompt_len=request.prompt_len,
                    pages=row.pages[: row.announced],
                    sampling=request.submit.sampling,
                )
            )
            self._batch.add_chunk(step, row)
        return admitted

    def _expected_growth(self, active: ActiveRow) -> int:
        """Pages that a running request is expected to add."""
        request = active.request
        more = self.estimator.remaining(len(request.output), request.limit)
        return max(0, self._memory.pages_for(request.length + more) - len(active.pages))

    def _waits_for_leader(self, request: Request, tokens: bytes) -> bool:
        if not (self._config.prefix_cache and request.reads_cache):
            return False
        limit = (count_tokens(tokens) - 1) // self._config.page_size
        node, depth = self._memory.tree.peek(request.scope, tokens, limit)
        request.follows = self.leaders.worth_waiting(node, depth, tokens, limit, request.follows)
        return request.follows

    def _try_start(self, request: Request, tokens: bytes, reserved: int) -> ActiveRow | None:
        """Give a request its row and pages; None when it does not fit beside the running ones."""
        memory = self._memory
        length = count_tokens(tokens)
        node = memory.find_prefix(request, tokens, (length - 1) // self._config.page_size)
        cached = 0 if node is None else node.end
        fresh = memory.pages_for(length) - cached
        available = memory.pool.free + memory.tree.evictable - memory.tree.unlocked_pages(node)
        wanted = fresh
        if self._batch.active:
            more = self.estimator.remaining(len(request.output), request.limit)
            wanted = memory.pages_for(length + more) - cached + reserved
        active = None
        if wanted <= available:
            active = memory.occupy(request, tokens, length, node)
        if active is None:
            memory.tree.forget_if_empty(node)
            return None
        self._queue.remove(request)
        request.become(State.PREFILL)
        self._batch.enter(active)
        self.leaders.update(active)
        if request.cached_tokens is None:
            request.cached_tokens = active.computed
            self._counters.prompt_tokens += request.prompt_len
            self._counters.cached_tokens += active.computed
            self._first_time.append(request.request_id)
        return active

    # ---- out -------------------------------------------------------------------------------------

    def vacate(self, request: Request) -> None:
        """Take a request out of its row."""
        active = self._batch.leave(request)
        self.leaders.drop(active)
        self._memory.release(active)

    def make_room(self, full: list[ActiveRow]) -> list[ActiveRow]:
        """Preempt until each row in `full` has a page, or will have once fences pass.

        The oldest request is never preempted: it always goes on, so there is no livelock.

        Returns:
            Those of `full` that were not preempted themselves.
        """
        memory, running = self._memory, self._batch.active
        oldest = min(running.values(), key=lambda active: active.request.order)
        while True:
            full = [active for active in full if active.live]
            # Rows that end with the results in flight give their pages back anyway.
            coming = memory.pool.retired + sum(
                len(active.pages) - (0 if active.node is None else active.node.end)
                for active in running.values()
                if active.ending
            )
            if memory.obtain(len(full)) or memory.pool.free + coming >= len(full):
                return full
            victims = [a for a in running.values() if a is not oldest and not a.ending]
            if not victims:
                return full
            self.preempt(min(victims, key=self._cost_of_preempting))

    def _cost_of_preempting(self, active: ActiveRow) -> tuple[int, int, int]:
        """Least important first, then what must be recomputed: pages that others hold stay."""
        request = active.request
        by_priority = self._config.schedule_policy is SchedulePolicy.PRIORITY
        kept = self._memory.tree.shared_pages(active.node) * self._config.page_size
        return (
            request.submit.priority if by_priority else 0,
            active.computed - kept,
            -request.order,
        )

    def preempt(self, active: ActiveRow) -> None:
        request = active.request
        self.vacate(request)
        request.become(State.PREEMPTED)
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()
        self._queue.put_back(request)
        self.estimator.preempted()
        self._counters.preemptions += 1

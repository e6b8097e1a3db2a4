"""Who of the waiting gets a row, and who of the running must give one up.

A request is admitted when its whole input fits and the expected output of all running requests
still does; when the guess fails, the request that is cheapest to recompute is preempted.
"""

from __future__ import annotations

import math

import numpy as np

from radixgrove.protocol.settings import SchedulePolicy
from radixgrove.worker.cache.node import CacheScope, TreeNode
from radixgrove.worker.plan import NewRow
from radixgrove.worker.scheduler.batch import Batch, StepDraft
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.counters import Counters
from radixgrove.worker.scheduler.estimate import OutputEstimator
from radixgrove.worker.scheduler.in_flight_prefixes import InFlightPrefixes
from radixgrove.worker.scheduler.loads import HostLoads
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.queue import WaitingQueue
from radixgrove.worker.scheduler.request import Request, RequestState, RunningRequest, count_tokens

# Policies with an order of the user's: nothing passes what comes first.
_STRICT = (SchedulePolicy.PRIORITY, SchedulePolicy.LONGEST_OUTPUT)
# A step lets short requests pass no more than this: looking costs CPU.
_MOST_PASSED = 64
# A step looks at no more requests than this that wait for another's prefix: looking costs CPU.
_MOST_FOLLOWERS = 128
_AWAITING = (RequestState.AWAITING_GRAMMAR, RequestState.AWAITING_KV)
# While a step is full, so many of those that wait are looked at for loads to begin.
_MOST_LOOKED_AHEAD = 16


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
        self.in_flight_prefixes = InFlightPrefixes(memory.tree)
        self.loads = None if memory.host is None else HostLoads(config, memory, counters)
        self._config = config
        self._memory = memory
        self._queue = queue
        self._batch = batch
        self._counters = counters
        self._watermark = math.ceil(config.watermark * config.num_pages)
        self._first_time: list[str] = []
        self._promised: int | None = None  # `_reserved`, once it was needed in this step

    def take_admitted(self) -> list[str]:
        """Requests that began their prefill since the last call."""
        admitted, self._first_time = self._first_time, []
        return admitted

    def cached_tokens(self, scope: CacheScope, tokens: bytes) -> int:
        """How much of a prompt is cached, in either tier, or on its way; changes nothing."""
        tree, limit = self._memory.tree, self._limit(tokens)
        node, depth = tree.peek(scope, tokens, limit)
        if node is None:
            return 0
        computing = self.in_flight_prefixes.shared_pages(node, depth, tokens, limit)
        pages = max(tree.peek_below(node, depth, tokens, limit), depth + computing)
        return pages * self._config.page_size

    @property
    def queued_tokens(self) -> int:
        """Of waiting requests' prompts, what is neither cached nor on its way for another one."""
        waiting = [request for request in self._queue.requests() if not request.ran]
        known = sum(
            self.cached_tokens(request.scope, request.prompt)
            - request.matched * self._config.page_size
            for request in waiting[:_MOST_FOLLOWERS]
            if request.reads_cache
        )
        return self._queue.tokens - known

    # ---- in --------------------------------------------------------------------------------------

    def admit(self, step: StepDraft, now: float) -> int:
        """Start waiting requests, in the policy's order, until one does not fit; how many."""
        if not self._queue or (self.loads is None and not self._has_room(step)):
            return 0
        self._promised = None
        admitted = followers = looked_ahead = 0
        for request in self._queue.in_order(now):
            full = not self._has_room(step)
            if full:
                looked_ahead += 1
                if self.loads is None or looked_ahead > _MOST_LOOKED_AHEAD:
                    break
            if request.state in _AWAITING or (full and request.fetched):
                continue
            tokens = request.tokens()
            found = self._peek(request, tokens)
            if self._waits_for_pages(request, tokens, found):
                followers += 1
                if followers == _MOST_FOLLOWERS:
                    break
                continue
            on_host = self._worth_loading(request, tokens, found)
            # Others compute meanwhile. Alone, its first step can follow the load instead; so it
            # does when its prefix was displaced again, lest those that wait displace each other.
            if on_host and self._batch.active and not request.fetched:
                if not self._begin_load(request, tokens, on_host):
                    break
            elif not full:
                if not self._start(step, request, tokens, from_host=on_host > 0):
                    break
                admitted += 1
        return admitted

    def admit_short(self, step: StepDraft, now: float, most: int) -> int:
        """Start waiting requests that have at most so many tokens to compute; how many.

        They pass longer ones that wait for their turn, but take neither row nor pages from those:
        each that is passed keeps its own, and one that does not fit is not passed.
        """
        if not self._queue or self._config.schedule_policy in _STRICT:
            return 0
        self._promised = None
        admitted = passed = 0
        for request in self._queue.in_order(now):
            if passed == _MOST_PASSED or not self._has_room(step, passed):
                break
            if request.state in _AWAITING:
                continue
            tokens = request.tokens()
            found = self._peek(request, tokens)
            if self._waits_for_pages(request, tokens, found):
                passed += 1
                continue
            node, cached = found or (None, 0)
            if count_tokens(tokens) - cached * self._config.page_size > most:
                if not self._fits(request, node, cached):
                    break
                passed += 1
                self._promised = self._reserved() + self._growth(request, cached)
            elif not self._worth_loading(request, tokens, found):
                if not self._start(step, request, tokens, from_host=False):
                    break
                admitted += 1
        return admitted

    def _has_room(self, step: StepDraft, promised: int = 0) -> bool:
        """Whether the step has room left, and there is a row beside those that are promised."""
        free = self._config.max_running - len(self._batch.active)
        return not step.full and min(free, self._memory.rows.free) > promised

    def _reserved(self) -> int:
        """Pages that new requests may not have: what those admitted, or soon to be, will add."""
        if self._promised is None:
            running = self._growth_of_running()
            loads = [] if self.loads is None else self.loads.holds()
            coming = sum(self._growth(r, hold.node.end) for r, hold in loads)
            self._promised = self._watermark + running + coming
        return self._promised

    def _growth_of_running(self) -> int:
        """The sum of `_growth` over all that hold a row, by arrays: there may be thousands."""
        rows = self._batch.active
        count, size = len(rows), self._config.page_size
        prompts = np.fromiter((request.prompt_len for request in rows), np.int64, count)
        limits = np.fromiter((request.limit for request in rows), np.int64, count)
        generated = np.fromiter((len(request.output) for request in rows), np.int64, count)
        capacity = np.fromiter((active.capacity for active in rows.values()), np.int64, count)
        most = prompts + generated + self.estimator.remaining_of_all(generated, limits)
        return int(np.maximum(0, -(-most // size) - capacity // size).sum())

    def _growth(self, request: Request, pages: int) -> int:
        """Pages that a request which has so many is expected to add."""
        more = self.estimator.remaining(len(request.output), request.limit)
        return max(0, self._memory.pages_for(request.length + more) - pages)

    def _limit(self, tokens: bytes) -> int:
        """Most pages that may come from the cache: the last token is always computed."""
        return (count_tokens(tokens) - 1) // self._config.page_size

    def _peek(self, request: Request, tokens: bytes) -> tuple[TreeNode, int] | None:
        """As `RadixTree.peek`; None where the request finds nothing, or may not look."""
        if not request.reads_cache:
            return None
        node, depth = self._memory.tree.peek(request.scope, tokens, self._limit(tokens))
        return None if node is None else (node, depth)

    def _worth_loading(
        self, request: Request, tokens: bytes, found: tuple[TreeNode, int] | None
    ) -> int:
        """Pages of the request's prefix up to the end of what the host has, if it is worth it."""
        if self.loads is None or found is None:
            return 0
        node, depth = found
        end = self._memory.tree.peek_below(node, depth, tokens, self._limit(tokens))
        if end == depth:
            return 0
        backlog = self._batch.prefill_backlog + self._queue.tokens_of_others(request)
        return end if self.loads.worth(end - depth, backlog) else 0

    def _begin_load(self, request: Request, tokens: bytes, end: int) -> bool:
        """Load the prefix up to page `end`; False when the request does not fit."""
        assert self.loads is not None
        limit = self._limit(tokens)
        reserved = self._reserved()
        node = self._memory.tree.match(request.scope, tokens, limit)
        if not (self._fits(request, node, _end(node)) and self.loads.begin(request, tokens, limit)):
            return False
        self._promised = reserved + self._growth(request, end)
        return True

    def settle_loads(self) -> None:
        """Requests with a prefix that has come back from the host may be admitted."""
        if self.loads is not None:
            self.loads.settle()

    def leave_queue(self, request: Request) -> None:
        """A waiting request ends."""
        if self.loads is not None:
            self.loads.release(request)
        self._queue.remove(request)

    def _waits_for_pages(
        self, request: Request, tokens: bytes, found: tuple[TreeNode, int] | None
    ) -> bool:
        """Whether its next page is on its way: loaded, or computed by another."""
        if found is None:
            request.awaits_prefix = False
            return False
        limit = self._limit(tokens)
        if self._memory.tree.awaits_load(*found, tokens, limit):
            return True
        request.awaits_prefix = self.in_flight_prefixes.worth_waiting(
            *found, tokens, limit, request.awaits_prefix
        )
        return request.awaits_prefix

    def _fits(self, request: Request, node: TreeNode | None, cached: int) -> bool:
        """Whether a request fits beside the running ones; `cached` of its pages end at `node`."""
        memory = self._memory
        available = (
            memory.pool.free + memory.tree.residency.evictable - memory.tree.unlocked_pages(node)
        )
        if not self._batch.active:
            return memory.pages_for(request.length) - cached <= available
        return self._growth(request, cached) + self._reserved() <= available

    def _start(self, step: StepDraft, request: Request, tokens: bytes, *, from_host: bool) -> bool:
        """Give a request its row, pages and first chunk; False when it does not fit.

        Args:
            from_host: its prefix goes on there; the step loads it and follows the load.
        """
        reserved = self._reserved()
        row = self._try_start(step, request, tokens, from_host)
        if row is None:
            return False
        self._promised = reserved + self._growth(request, len(row.pages))
        step.new_rows.append(
            NewRow(
                row=row.row,
                token_ids=tokens,
                prompt_len=request.prompt_len,
                pages=row.pages[: row.announced],
                sampling=request.submit.sampling,
            )
        )
        step.shared_windows += self._memory.row_windows.held(row)
        self._batch.add_chunk(step, row)
        return True

    def _try_start(
        self, step: StepDraft, request: Request, tokens: bytes, from_host: bool
    ) -> RunningRequest | None:
        memory, limit = self._memory, self._limit(tokens)
        node = memory.find_prefix(request, tokens, limit)
        below = None
        if from_host and node is not None:
            below = memory.tree.match_host(node, tokens, limit)
        active = None
        if self._fits(request, node, _end(node)):
            active = memory.allocate_row(request, tokens, count_tokens(tokens), node, below)
        if active is None:
            memory.tree.forget_if_empty(node)
            return None
        if below is not None and node is not None and self.loads is not None:
            step.awaited = max(step.awaited, below.loaded_by)
            self.loads.began(below.loaded_by, below.end - node.end)
        behind = 0
        if request.reads_cache and node is not None:
            behind = memory.tree.behind_windows(node, tokens, limit)
            active.matched += behind
        self._queue.remove(request)
        request.become(RequestState.PREFILL)
        self._batch.enter(active)
        self.in_flight_prefixes.update(active)
        if not request.ran:
            request.cached_tokens = active.computed
            self._counters.prompt_tokens += request.prompt_len
            self._counters.cached_tokens += active.computed
            self._counters.window_lost_tokens += behind * self._config.page_size
            self._first_time.append(request.request_id)
        return active

    # ---- out -------------------------------------------------------------------------------------

    def free_row(self, request: Request) -> None:
        """Take a request out of its row."""
        active = self._batch.leave(request)
        self.in_flight_prefixes.drop(active)
        self._memory.release(active)

    def make_room(self, full: list[RunningRequest]) -> list[RunningRequest]:
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
            if memory.ensure_free(len(full)) or memory.pool.free + coming >= len(full):
                return full
            victims = [a for a in running.values() if a is not oldest and not a.ending]
            if not victims:
                return full
            self.preempt(min(victims, key=self._cost_of_preempting))

    def _cost_of_preempting(self, active: RunningRequest) -> tuple[int, int, int]:
        """Least important first, then what must be recomputed: pages that others hold stay."""
        request = active.request
        by_priority = self._config.schedule_policy is SchedulePolicy.PRIORITY
        kept = self._memory.tree.shared_pages(active.node) * self._config.page_size
        return (
            request.submit.priority if by_priority else 0,
            active.computed - kept,
            -request.order,
        )

    def preempt(self, active: RunningRequest) -> None:
        self.give_back(active.request)
        self.estimator.preempted()
        self._counters.preemptions += 1

    def give_back(self, request: Request) -> None:
        """A request's row and pages; it waits again, first in line."""
        self.free_row(request)
        request.become(RequestState.PREEMPTED)
        request.fetched = False
        if request.wants_prompt_logprobs:
            request.prompt_logprobs.clear()
        self._queue.put_back(request)


def _end(node: TreeNode | None) -> int:
    return 0 if node is None else node.end

"""Steps in flight, and what comes of them: the tokens of a step become its requests' answers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import isnan

from radixgrove.worker.messages import Finish, RefusalReason, TokenLogprobs, Tokens
from radixgrove.worker.plan import INVALID_TOKEN, StepPlan, StepResult
from radixgrove.worker.scheduler.admission import Admission
from radixgrove.worker.scheduler.batch import Batch, StepDraft
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.counters import Counters
from radixgrove.worker.scheduler.grammars import Grammars, broken
from radixgrove.worker.scheduler.lifecycle import Lifecycle
from radixgrove.worker.scheduler.memory import KVMemory
from radixgrove.worker.scheduler.request import Request, RunningRequest
from radixgrove.worker.scheduler.rules import Masks, SequenceRules

_RENEWED_TOKENS = 256  # a matcher that was built anew and fails again sooner is of no use


@dataclass(frozen=True, slots=True)
class _Ruled:
    """A sampled row of a request that has rules."""

    active: RunningRequest
    index: int  # in the step's sampled rows
    position: int  # its first, of those that the step samples at

    @property
    def rules(self) -> SequenceRules | None:
        """None: the request has ended, or left its row, and its tokens do not count."""
        return self.active.request.rules if self.active.live else None


@dataclass(slots=True)
class _Flight:
    """A launched step. Rows are compared by identity: a row released since is no longer `live`."""

    step_id: int
    chunks: list[tuple[RunningRequest, int]]  # with the end of each chunk
    sampled: list[RunningRequest]  # in the order of the result's tokens
    first_tokens: int  # how many of them are at the end of their prefill; the others decode
    bounds: list[int]  # as in the plan
    held: list[RunningRequest]  # they may decode once the step is collected
    ruled: list[_Ruled]  # those of `sampled` that have rules
    unsampled: bool  # it awaits its masks

    def split(self, result: StepResult) -> list[list[int]]:
        """The tokens of each of `sampled`.

        Raises:
            RuntimeError: the results are another step's, or not within this one's bounds.
        """
        tokens, counts, rows = result.tokens, result.counts, len(self.sampled)
        got = len(tokens) if counts is None else len(counts)
        if result.step_id != self.step_id or got != rows:
            raise RuntimeError(
                f"step {self.step_id} with {rows} samples was expected, got step {result.step_id} "
                f"with {got}"
            )
        if counts is None:
            return [[token] for token in tokens]
        bounds = self.bounds or [1] * rows
        within = all(0 <= count <= bound for count, bound in zip(counts, bounds, strict=True))
        if not within or sum(counts) != len(tokens):
            raise RuntimeError(
                f"step {self.step_id} with bounds {bounds} got {counts} of {len(tokens)} tokens"
            )
        ends = iter(tokens)
        return [[next(ends) for _ in range(count)] for count in counts]


def _ruled(sampled: list[RunningRequest], bounds: list[int]) -> list[_Ruled]:
    positions = itertools.accumulate(bounds, initial=0) if bounds else itertools.count()
    return [
        _Ruled(active, index, position)
        for index, (active, position) in enumerate(zip(sampled, positions, strict=False))
        if active.request.rules is not None
    ]


class Results:
    """Owns the steps in flight; `complete` takes in the oldest."""

    def __init__(
        self,
        memory: KVMemory,
        batch: Batch,
        admission: Admission,
        lifecycle: Lifecycle,
        grammars: Grammars,
        counters: Counters,
        config: SchedulerConfig,
    ) -> None:
        self._least_forced = config.grammar_jump
        self._reads_cache = config.prefix_cache
        self._grammars = grammars
        self._memory = memory
        self._batch = batch
        self._admission = admission
        self._lifecycle = lifecycle
        self._counters = counters
        self._flights: deque[_Flight] = deque()

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def decoding(self) -> int:
        """Steps in flight that decode rows."""
        return sum(len(flight.sampled) > flight.first_tokens for flight in self._flights)

    def expect(self, plan: StepPlan, step: StepDraft, held: list[RunningRequest]) -> None:
        """The step goes out."""
        chunks = [(active, chunk.start + chunk.length) for active, chunk in step.chunks]
        sampled, bounds = step.sampled, plan.bounds
        ruled = _ruled(sampled, bounds) if self._batch.ruled else []
        first = len(sampled) - len(step.decodes)
        flight = _Flight(
            plan.step_id, chunks, sampled, first, bounds, held, ruled, unsampled=bool(ruled)
        )
        self._flights.append(flight)

    # ---- rules -----------------------------------------------------------------------------------

    @property
    def masked(self) -> bool:
        """Whether the newest step has rows with rules."""
        return bool(self._flights[-1].ruled)

    @property
    def awaited(self) -> bool:
        """Whether a row with rules in the step to be sampled awaits tokens of one before it."""
        step = self._unsampled
        waiting = {ruled.active for ruled in step.ruled if ruled.active.live}
        older = itertools.takewhile(lambda flight: flight is not step, self._flights)
        return any(not waiting.isdisjoint(flight.sampled) for flight in older)

    @property
    def _unsampled(self) -> _Flight:
        """The oldest step that awaits its masks."""
        return next(flight for flight in self._flights if flight.unsampled)

    def fill_masks(self, buffer: Callable[[int, int], Masks]) -> list[int]:
        """Masks of the oldest step that awaits some.

        A request ends here where its grammar is at its end, or fails; what the step samples for it
        is discarded.

        Args:
            buffer: [rows, words] int32 to fill, given both numbers.

        Returns:
            The position of each row that was filled, of those that the step samples at.
        """
        step = self._unsampled
        step.unsampled = False
        live = self._with_sound_lexers(step.ruled)
        if not live:
            return []
        masks = buffer(len(live), self._grammars.words)
        self._grammars.fill([(rules, []) for _, rules in live], masks)
        self._end_stopped(step.ruled)
        for row, (ruled, rules) in enumerate(live):
            if not (rules.restricts and ruled.active.live):
                continue
            request = ruled.active.request
            if not rules.restrict(masks[row], request.output):
                self._fail(request, "no token is allowed by all rules")
        return [ruled.position for ruled, _ in live]

    def _follow(self, flight: _Flight, tokens: list[list[int]]) -> None:
        """Rules of the rows that go on follow their new tokens."""
        live = [
            (ruled.active, rules, new)
            for ruled in flight.ruled
            if (new := tokens[ruled.index]) and (rules := ruled.rules) is not None
        ]
        self._grammars.consume([(rules, new) for _, rules, new in live])
        self._end_stopped(flight.ruled)
        if self._least_forced:
            for active, rules, _ in live:
                if active.live:
                    self._jump(active, rules)

    def _jump(self, active: RunningRequest, rules: SequenceRules) -> None:
        """Jump-forward decoding: append all tokens that the grammar forces, without sampling them.

        The request is preempted and prefills again behind the appended tokens. Steps in flight
        sample the first of them once more; those samples are discarded.
        """
        request = active.request
        if request.wants_logprobs or not (request.reads_cache and self._reads_cache):
            return  # logprobs need sampling; without the cache the whole prompt is prefilled again
        room = request.limit - len(request.output) - 1  # a last one is sampled
        tokens = rules.forced()[: max(0, room)]
        rules.look_for_failure()
        if rules.outgrown:
            self._renew(request, rules)
            return
        stop = next((n for n, token in enumerate(tokens) if token in request.stop_ids), None)
        tokens = tokens[:stop]
        if len(tokens) < self._least_forced:
            return
        self._admission.give_back(request)
        rules.consume(tokens)
        request.output += tokens
        self._counters.generated_tokens += len(tokens)
        message = Tokens(request_id=request.request_id, token_ids=tokens)
        self._lifecycle.outbox.put(request.frontend, message)
        rules.look_for_failure()
        if rules.outgrown:
            self._renew(request, rules)
        else:
            self._goes_on(request, rules)

    def _goes_on(self, request: Request, rules: SequenceRules) -> bool:
        """Whether its rules leave a request anything to say; else it has ended."""
        if rules.ended:
            self._lifecycle.finish_now(request, Finish.STOP)
        elif (error := rules.error) is not None:
            self._fail(request, error)
        else:
            return True
        return False

    def _end_stopped(self, ruled: list[_Ruled]) -> None:
        """After matchers were used: requests end where theirs are at their end, or have failed, but
        for those of lexers that have, which are replaced."""
        stopped = [
            (each, rules) for each in ruled if (rules := each.rules) is not None and rules.stopped
        ]
        if not stopped:
            return
        for _, rules in stopped:
            rules.look_for_failure()
        self._with_sound_lexers(ruled)
        for each, rules in stopped:
            if each.active.live:
                self._goes_on(each.active.request, rules)

    def _with_sound_lexers(self, ruled: list[_Ruled]) -> list[tuple[_Ruled, SequenceRules]]:
        """Those that go on now. Where a lexer has failed, its sequences go on with matchers that
        are built anew, each for itself; until then they have no row."""
        live = [(each, rules) for each in ruled if (rules := each.rules) is not None]
        outgrown = [(each, rules) for each, rules in live if rules.outgrown]
        if not outgrown:
            return live
        for each, rules in outgrown:
            self._renew(each.active.request, rules)
        return [(each, rules) for each, rules in live if each.active.live]

    def _renew(self, request: Request, rules: SequenceRules) -> None:
        before = request.renewed
        if before is not None and len(request.output) < before + _RENEWED_TOKENS:
            self._fail(request, rules.error or "its lexer failed")
            return
        if request.active is not None:
            self._admission.give_back(request)
        if rules.lacks_lexer:
            self._grammars.await_lexer(request)
        else:
            request.renewed = len(request.output)
            self._grammars.renew(request)

    def _fail(self, request: Request, error: str) -> None:
        self._lifecycle.refuse(request, RefusalReason.GRAMMAR_FAILED, broken(error))

    # ---- results ---------------------------------------------------------------------------------

    def complete(self, result: StepResult) -> None:
        flight = self._flights.popleft()
        tokens = flight.split(result)
        self._memory.collect(flight.step_id)
        for active in flight.held:
            active.held = False
        if flight.chunks:
            self._take_chunks(flight, tokens, result.prompt_logprobs)
        if INVALID_TOKEN in result.tokens:
            for active, new in zip(flight.sampled, tokens, strict=True):
                if active.live and INVALID_TOKEN in new:
                    self._spoil(active)
        discarded = self._deliver(flight.sampled, tokens, result.logprobs)
        self._counters.generated_tokens += len(result.tokens) - discarded
        if flight.ruled:
            self._follow(flight, tokens)
        if flight.bounds or result.counts is not None:
            self._shrink(flight, tokens)

    def _take_chunks(
        self,
        flight: _Flight,
        tokens: list[list[int]],
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> None:
        without = {active for active, new in zip(flight.sampled, tokens, strict=True) if not new}
        for active, end in flight.chunks:
            if active.live:
                logprobs = prompt_logprobs.get(active.row)
                if logprobs and any(isnan(entry.logprob) for entry in logprobs):
                    self._spoil(active)
                    continue
                self._add_prompt_logprobs(active.request, logprobs)
                self._prefilled(active, end, again=active in without)

    @staticmethod
    def _add_prompt_logprobs(request: Request, logprobs: list[TokenLogprobs] | None) -> None:
        if request.wants_prompt_logprobs:
            if not request.prompt_logprobs:
                request.prompt_logprobs.append(None)
            request.prompt_logprobs += logprobs or []

    def _prefilled(self, active: RunningRequest, end: int, *, again: bool) -> None:
        """A row's known tokens before `end` are computed.

        Args:
            again: no token came of them, so the next step begins with the last of them once more.
        """
        active.prefilled = end - again
        self._memory.publish(active)
        if again:  # its last page may stay unpublished for as long as it runs
            self._admission.in_flight_prefixes.drop(active)
        else:
            self._admission.in_flight_prefixes.update(active)
        request = active.request
        if end == active.length and not request.limit:
            self._lifecycle.finish_now(request, Finish.LENGTH)

    def _deliver(
        self,
        sampled: list[RunningRequest],
        tokens: list[list[int]],
        logprobs: dict[int, list[TokenLogprobs]],
    ) -> int:
        """Each row's new tokens on their way to its frontend; returns how many came too late."""
        outbox = self._lifecycle.outbox.waiting
        discarded = 0
        ended: list[Request] = []
        for active, new in zip(sampled, tokens, strict=True):
            if not new or not active.live:  # nothing yet, or it ended while this step was in flight
                discarded += len(new)
                continue
            request = active.request
            output = request.output
            output += new
            message = Tokens(request_id=request.request_id, token_ids=new)
            if request.says_more and not self._say_more(request, message, logprobs, active.row):
                self._lifecycle.refuse(
                    request, RefusalReason.INTERNAL, "The engine lost its logprobs."
                )
                continue
            if len(output) >= request.limit or not request.stop_ids.isdisjoint(new):
                discarded += self._cut(request, message)
                if message.finish is not None:
                    ended.append(request)
            outbox[request.frontend].append(message)
        for request in ended:
            self._lifecycle.finish(request)
        return discarded

    def _say_more(
        self,
        request: Request,
        message: Tokens,
        logprobs: dict[int, list[TokenLogprobs]],
        row: int,
    ) -> bool:
        """Logprobs, and what only a first message says; False when there is not one a token."""
        if request.wants_logprobs:
            message.logprobs = logprobs.get(row, [])
            if len(message.logprobs) != len(message.token_ids):
                return False
        if not request.answered:
            self._lifecycle.introduce(request, message)
        return True

    def _spoil(self, active: RunningRequest) -> None:
        """End a row of values that are not numbers, and drop what it has cached."""
        active.spoiled = True
        reason = RefusalReason.INTERNAL
        self._lifecycle.refuse(active.request, reason, "The model's values overflowed (NaN).")

    @staticmethod
    def _cut(request: Request, message: Tokens) -> int:
        """End the request where it ends within the message's tokens, if it does. They are the last
        of its output; those behind the end are dropped from both, and counted."""
        output, new = request.output, message.token_ids
        before = len(output) - len(new)
        for count, token in enumerate(new, before + 1):
            if token in request.stop_ids and count > request.min_tokens:
                message.stop_token = token
                message.finish = Finish.STOP
            elif count >= request.limit:
                message.finish = Finish.LENGTH
            if message.finish is not None:
                dropped = len(output) - count
                del output[count:], new[count - before :]
                if message.logprobs is not None:
                    del message.logprobs[count - before :]
                return dropped
        return 0

    def _shrink(self, flight: _Flight, tokens: list[list[int]]) -> None:
        """Rows that go on may yet get what this step did not yield."""
        bounds = flight.bounds or [1] * len(flight.sampled)
        for active, bound, new in zip(flight.sampled, bounds, tokens, strict=True):
            if active.live and len(new) < bound:
                self._batch.shrink(active, bound - len(new))

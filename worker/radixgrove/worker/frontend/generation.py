"""A request in flight: its sequences, their outputs, its end. No HTTP here."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from enum import Enum
from functools import partial

from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.openai.requests import Generation
from radixgrove.protocol.openai.responses import Usage
from radixgrove.protocol.text.prompts import EncodedPrompt
from radixgrove.service.asgi import ClientDisconnected
from radixgrove.worker.frontend.engine_client import EngineClient
from radixgrove.worker.frontend.events import shown
from radixgrove.worker.frontend.metrics import FrontendMetrics
from radixgrove.worker.frontend.sequence import Delta, Sequence
from radixgrove.worker.frontend.unread import (
    MAX_STREAM_BYTES,
    MAX_WHOLE_BYTES,
    Unread,
    size_of,
)
from radixgrove.worker.messages import (
    CacheMode,
    Finish,
    RefusalReason,
    Refused,
    Submit,
    SubmitChoices,
    TokenRules,
    Tokens,
)


class Signal(Enum):
    """What else than the engine's outputs wakes a waiting request."""

    PING = "ping"  # nothing came for a while: keep proxies from giving up
    DISCONNECTED = "disconnected"  # the client is gone
    ENGINE_GONE = "engine gone"
    UNREAD = "unread"  # the answer takes more memory than it may
    SHUTDOWN = "shutdown"  # the drain's deadline passed


_GRAMMAR = (RefusalReason.GRAMMAR_TOO_COMPLEX, RefusalReason.GRAMMAR_FAILED)
Event = tuple[Sequence, Tokens | Refused, int]  # and the bytes that it takes


class RequestInFlight:
    """All sequences of one request: prompts times choices, prompt by prompt.

    Use as a context manager: leaving it aborts whatever has not finished, however it is left.
    """

    def __init__(
        self,
        engine: EngineClient,
        metrics: FrontendMetrics,
        unread: Unread,
        generation: Generation,
        sequences: list[Sequence],
        prompts: list[EncodedPrompt],
        arrived: float,
        matched_tokens: int = 0,
    ) -> None:
        """`sequences[i]` belongs to prompt `i // generation.n`; `arrived`: `time.monotonic()`.

        `matched_tokens` of the longest prompt are expected to be cached.
        """
        self.engine = engine
        self._matched_tokens = matched_tokens
        self.metrics = metrics
        self.generation = generation
        self.sequences = sequences
        self.prompts = prompts
        self.arrived = arrived
        self.last_event = arrived  # for pings
        self.sending_since: float | None = None  # for clients that do not read
        self.unread = 0  # bytes of outputs that wait here, or in a whole answer
        self.most_unread = MAX_STREAM_BYTES if generation.stream else MAX_WHOLE_BYTES
        self._ledger = unread
        self._queue: deque[Event | Signal] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._last_token: dict[str, float] = {}
        self.texts: list[list[str]] | None = None  # of each sequence, where answers are logged
        self._task = asyncio.current_task()
        self._abandoned = False
        self._unread_ends = False

    def __enter__(self) -> RequestInFlight:
        return self

    def __exit__(self, *_: object) -> None:
        for sequence in self.sequences:
            self.engine.abort(sequence.request_id)  # ignored where it has ended
        self._ledger.give_back(self, self.unread)
        if self._abandoned:
            raise ClientDisconnected

    def abandon(self) -> None:
        """End the request of a client that does not read: its handler is stuck in sending."""
        if self._task is not None and not self._abandoned:
            self._abandoned = True
            self._task.cancel()

    def end_unread(self) -> None:
        """End a request: its answer takes more memory than it may."""
        if self._unread_ends:
            return
        self._unread_ends = True
        if self.sending_since is not None:
            self.abandon()
        else:
            self.signal(Signal.UNREAD)

    def submit(
        self,
        domain: str,
        max_tokens: list[int],
        eos_ids: tuple[int, ...],
        queue_timeout: float,
        rules: TokenRules | None,
    ) -> None:
        """Hand every sequence to the engine; `max_tokens` of each prompt.

        Raises:
            ApiError: 503.
        """
        generation = self.generation
        for number, prompt in enumerate(self.prompts):
            choices = self.sequences[number * generation.n : (number + 1) * generation.n]
            sampling = [
                generation.sampling_for(max_tokens[number], sequence.index, eos_ids)
                for sequence in choices
            ]
            first = Submit(
                request_id=choices[0].request_id,
                frontend=self.engine.index,
                token_ids=prompt.token_ids,
                sampling=sampling[0],
                domain=domain,
                priority=generation.priority,
                queue_timeout=queue_timeout,
                cache=CacheMode.USE if generation.prefix_cache else CacheMode.BYPASS,
                rules=rules,
            )
            others = [
                (sequence.request_id, sampling[i]) for i, sequence in enumerate(choices) if i > 0
            ]
            self.engine.submit(
                SubmitChoices(first=first, others=others) if others else first,
                {sequence.request_id: partial(self._deliver, sequence) for sequence in choices},
                self._matched_tokens,
            )

    def signal(self, signal: Signal) -> None:
        self._put(signal)

    def _deliver(self, sequence: Sequence, message: Tokens | Refused) -> None:
        size = size_of(message)
        self._put((sequence, message, size))
        self._ledger.add(self, size)

    def _put(self, item: Event | Signal) -> None:
        self._queue.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _take(self) -> list[Event | Signal]:
        """Everything that came since the last call, at least one item.

        The housekeeping of the application signals what must not be waited for longer, so this wait
        needs no timer of its own.
        """
        if not self._queue:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items = list(self._queue)
        self._queue.clear()
        return items

    async def deltas(self) -> AsyncIterator[list[tuple[Sequence, Tokens, Delta]]]:
        """Deltas in the order they came, all that are there at a time; an empty list is a ping.

        Ends when every sequence has finished.

        Raises:
            ApiError: a sequence was refused, or the engine is gone.
            ClientDisconnected: the client has gone.
        """
        remaining = len(self.sequences)
        while remaining:
            batch: list[tuple[Sequence, Tokens, Delta]] = []
            for item in await self._take():
                if isinstance(item, Signal):
                    _raise_for(item)
                    continue
                sequence, message, size = item
                if self.generation.stream:  # else it stays, in the answer
                    self._ledger.give_back(self, size)
                if sequence.finished:
                    continue  # a stop string ended it; these came before the abort arrived
                if isinstance(message, Refused):
                    if message.reason in _GRAMMAR:
                        self.metrics.grammar_failures.labels(message.reason.value).inc()
                    raise refusal(message)
                if message.finish is Finish.ABORT:
                    raise errors.internal()
                delta = sequence.take(message)
                self._observe(sequence, len(message.token_ids))
                if self.texts is not None:
                    self.texts[sequence.index].append(shown(delta.events))
                if delta.abort:
                    self.engine.abort(sequence.request_id)
                if sequence.finished:
                    remaining -= 1
                    self._count(sequence)
                batch.append((sequence, message, delta))
            self.last_event = time.monotonic()
            yield batch

    def _observe(self, sequence: Sequence, tokens: int) -> None:
        if not tokens:
            return
        now = time.monotonic()
        before = self._last_token.get(sequence.request_id)
        if before is not None:
            self.metrics.observe_gap(now - before, tokens)
        elif not self._last_token:
            self.metrics.time_to_first_token.observe(now - self.arrived)
        self._last_token[sequence.request_id] = now

    def _count(self, sequence: Sequence) -> None:
        for outcome in sequence.outcomes:
            self.metrics.tool_calls.labels(outcome.value).inc()
        if sequence.reasoning_tokens:
            self.metrics.reasoning_tokens.inc(sequence.reasoning_tokens)

    def usage(self) -> Usage:
        """Prompt and cached tokens of each prompt once, completion tokens of all choices."""
        n = self.generation.n
        return Usage.of(
            prompt=sum(len(prompt) for prompt in self.prompts),
            completion=sum(sequence.completion_tokens for sequence in self.sequences),
            cached=sum(sequence.cached_tokens for sequence in self.sequences[::n]),
            reasoning=sum(sequence.reasoning_tokens for sequence in self.sequences),
        )


def refusal(message: Refused) -> ApiError:
    """The engine's refusal as an answer."""
    match message.reason:
        case RefusalReason.QUEUE_FULL:
            return errors.rate_limited(message.retry_after)
        case RefusalReason.QUEUE_TIMEOUT:
            return errors.overloaded(
                "The request waited too long in the queue.", message.retry_after
            )
        case RefusalReason.TOO_LONG:
            return errors.invalid(message.detail, code="context_length_exceeded")
        case RefusalReason.GRAMMAR_TOO_COMPLEX | RefusalReason.GRAMMAR_FAILED:
            return errors.invalid(message.detail, code=message.reason.value)
        case RefusalReason.INTERNAL:
            return errors.internal()


def _raise_for(signal: Signal) -> None:
    match signal:
        case Signal.PING:
            return
        case Signal.DISCONNECTED:
            raise ClientDisconnected
        case Signal.ENGINE_GONE:
            raise errors.overloaded("The engine has stopped.", retry_after=5)
        case Signal.UNREAD:
            raise errors.answer_too_large()
        case Signal.SHUTDOWN:
            raise errors.overloaded("The server is shutting down.", retry_after=5)

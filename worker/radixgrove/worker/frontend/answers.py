"""From a request's events to OpenAI's bodies: whole answers and streams, for every endpoint."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator

import msgspec

from radixgrove.protocol.openai.formats import (
    DONE,
    PING,
    AnswerFormat,
    Choice,
    Logprobs,
    StreamEncoder,
    ToolCall,
    new_head,
)
from radixgrove.protocol.openai.requests import Request
from radixgrove.protocol.openai.responses import PromptLogprobs, Usage
from radixgrove.protocol.text.prompts import EncodedPrompt
from radixgrove.worker.frontend.events import (
    CallArguments,
    CallBegins,
    CallEnds,
    Collected,
    Event,
    Finished,
    Reasoning,
    ScoredToken,
    Text,
)
from radixgrove.worker.frontend.generation import RequestInFlight
from radixgrove.worker.frontend.logprobs import prompt_entries, scored_bytes, scored_prompt
from radixgrove.worker.frontend.model import ServedModel
from radixgrove.worker.frontend.sequence import Delta, Sequence
from radixgrove.worker.messages import TokenLogprobs, Tokens


class Answer:
    """Builds the response of one request."""

    def __init__(
        self,
        form: AnswerFormat,
        request: Request,
        prompts: list[EncodedPrompt],
        model: ServedModel,
    ) -> None:
        self.request = request
        self.prompts = prompts
        self.model = model
        generation = request.generation
        self.generation = generation
        self.echo = bool(request.echoed)
        # `max_tokens: 0` scores a prompt: what the engine samples beyond it is not shown.
        self.silent = generation.max_tokens == 0
        self._scores = generation.shows_logprobs
        self._form = form
        self.head = new_head(
            form,
            stream=generation.stream,
            model=request.model,
            fingerprint=model.fingerprint,
            service_tier=generation.service_tier,
        )
        self._encoder = StreamEncoder(self.head, form, include_usage=generation.include_usage)

    # ---- whole answers -----------------------------------------------------------------------

    async def collect(self, flight: RequestInFlight) -> bytes:
        """The body of an answer that does not stream.

        Raises:
            ApiError, ClientDisconnected: as `RequestInFlight.deltas`.
        """
        choices = [Collected() for _ in flight.sequences]
        async for batch in flight.deltas():
            for sequence, message, delta in batch:
                choice = choices[sequence.index]
                choice.prompt = choice.prompt or message.prompt_logprobs
                for event in self._visible(delta):
                    choice.add(event)
        return self._whole(choices, self._usage(flight))

    def without_engine(self) -> bytes:
        """An echo of nothing but the prompt needs no engine."""
        number = len(self.prompts) * self.generation.n
        return self._whole([Collected(finish="length") for _ in range(number)], self._unread())

    def _whole(self, collected: list[Collected], usage: Usage) -> bytes:
        ids = self.generation.return_token_ids
        choices = [
            Choice(
                index=index,
                text=self.echoed(place) + "".join(item.text),
                reasoning="".join(item.reasoning),
                calls=item.whole_calls(),
                finish_reason=item.finish,
                logprobs=self._logprobs(self._prompt_scores(place, item.prompt) + item.scored),
                token_ids=item.token_ids if ids else msgspec.UNSET,
                prompt_token_ids=self._prompt_ids(place) if ids else msgspec.UNSET,
                prompt_logprobs=self._prompt_entries(place, item.prompt),
            )
            for index, (place, item) in enumerate(self._best(collected))
        ]
        return self._form.whole(self.head, choices, usage)

    def _best(self, collected: list[Collected]) -> list[tuple[int, Collected]]:
        """Those of each prompt that are shown, with their places among all."""
        n, shown = self.generation.n, self.generation.shown
        places = list(enumerate(collected))
        if n == shown:
            return places
        groups = [places[begin : begin + n] for begin in range(0, len(places), n)]
        return [
            best
            for group in groups
            for best in sorted(group, key=lambda each: -each[1].mean_logprob)[:shown]
        ]

    # ---- streams -----------------------------------------------------------------------------

    async def stream(self, flight: RequestInFlight) -> AsyncGenerator[bytes]:
        """Server-sent events, `[DONE]` included; the first item comes with the engine's first word.

        Raises:
            ApiError, ClientDisconnected: as `RequestInFlight.deltas`; events may have left already.
        """
        opened = False
        sampled = 0  # tokens of all choices
        async for batch in flight.deltas():
            events: list[bytes] = []
            if not batch:
                events.append(PING)
            elif not opened:
                opened = True
                self._count(flight, 0)
                events += self._openings(flight.sequences)
            for sequence, message, delta in batch:
                sampled += len(message.token_ids)
                self._count(flight, sampled)
                events += self._events(sequence, message, delta)
            joined = b"".join(events)
            if joined:
                yield joined
        yield self._closing(self._usage(flight))

    def stream_without_engine(self) -> bytes:
        encoder = self._encoder
        usage = self._unread()
        if self.generation.continuous_usage:
            encoder.usage_so_far(usage)
        events = []
        for index in range(len(self.prompts) * self.generation.n):
            events.append(encoder.text(index, self.echoed(index)))
            events.append(encoder.finish(index, "length"))
        return b"".join(events) + self._closing(usage)

    def _openings(self, sequences: list[Sequence]) -> list[bytes]:
        ids = self.generation.return_token_ids
        return [
            self._encoder.opening(
                sequence.index,
                # With logprobs the prompt comes with the engine's first message, which scores it.
                "" if self._scores else self.echoed(sequence.index),
                self._prompt_ids(sequence.index) if ids else None,
            )
            for sequence in sequences
        ]

    def _events(self, sequence: Sequence, message: Tokens, delta: Delta) -> list[bytes]:
        events = []
        index = sequence.index
        if self.echo and self._scores and message.prompt_logprobs is not None:
            scores = self._logprobs(self._prompt_scores(index, message.prompt_logprobs))
            events.append(self._encoder.text(index, self.echoed(index), scores))
        for event in self._visible(delta):
            scored, ids = None, None
            if isinstance(event, Text):
                scored = self._logprobs(event.scored)
                ids = event.token_ids if self.generation.return_token_ids else None
            events.append(render(self._encoder, index, event, scored, ids))
        return events

    def _visible(self, delta: Delta) -> list[Event]:
        if not self.silent:
            return delta.events
        return [Finished("length") for event in delta.events if isinstance(event, Finished)]

    def _closing(self, usage: Usage) -> bytes:
        return (self._encoder.usage(usage) if self.generation.include_usage else b"") + DONE

    # ---- usage -------------------------------------------------------------------------------

    def _usage(self, flight: RequestInFlight) -> Usage:
        usage = flight.usage()
        return _with_completion(usage, 0) if self.silent else usage

    def _unread(self) -> Usage:
        """Of prompts that the engine did not see."""
        return Usage.of(sum(len(prompt) for prompt in self.prompts), 0, 0)

    def _count(self, flight: RequestInFlight, sampled: int) -> None:
        """Says in the chunks to come what has been used, where the client asks for it."""
        if self.generation.continuous_usage:
            shown = 0 if self.silent else sampled
            self._encoder.usage_so_far(_with_completion(flight.usage(), shown))

    # ---- parts -------------------------------------------------------------------------------

    def echoed(self, index: int) -> str:
        """The prompt's text before a choice, when it is to be echoed."""
        if not self.echo:
            return ""
        prompt = self.request.echoed[index // self.generation.n]
        if isinstance(prompt, str):
            return prompt
        text: str = self.model.encoder.tokenizer.decode(prompt, skip_special_tokens=False)
        return text

    def _prompt_ids(self, index: int) -> list[int]:
        return token_list(self.prompts[index // self.generation.n].token_ids)

    def _prompt_scores(
        self, index: int, entries: list[TokenLogprobs | None] | None
    ) -> list[ScoredToken]:
        """Of an echoed prompt, with as many alternatives as the completion has."""
        if not (self.echo and self._scores) or entries is None:
            return []
        most = self.generation.sampling.logprobs
        own = [
            None if each is None else TokenLogprobs(each.logprob, each.top[:most])
            for each in entries
        ]
        return scored_prompt(self._prompt_ids(index), own, self.model.vocabulary)

    def _prompt_entries(
        self, index: int, entries: list[TokenLogprobs | None] | None
    ) -> PromptLogprobs | msgspec.UnsetType:
        most = self.generation.prompt_logprobs
        if most is None or entries is None:
            return msgspec.UNSET
        return prompt_entries(self._prompt_ids(index), entries, most, self.model.vocabulary)

    def _logprobs(self, scored: list[ScoredToken]) -> Logprobs | None:
        if not self._scores:
            return None
        return self._form.logprobs(scored_bytes(scored, self.model.vocabulary))


def render(
    encoder: StreamEncoder,
    index: int,
    event: Event,
    logprobs: Logprobs | None,
    token_ids: list[int] | None,
) -> bytes:
    """One event of choice `index` as a stream has it; the last two arguments are those of text."""
    match event:
        case Text():
            return encoder.text(index, event.text, logprobs, token_ids)
        case Reasoning():
            return encoder.reasoning(index, event.text)
        case CallBegins():
            call = ToolCall(event.id, event.name, custom=event.custom)
            return encoder.call_begins(index, event.number, call)
        case CallArguments():
            return encoder.call_arguments(index, event.number, event.text, custom=event.custom)
        case CallEnds():
            return b""
        case Finished():
            return encoder.finish(index, event.reason)


def _with_completion(usage: Usage, tokens: int) -> Usage:
    return Usage.of(
        usage.prompt_tokens,
        tokens,
        usage.prompt_tokens_details.cached_tokens,
        usage.completion_tokens_details.reasoning_tokens,
    )


def token_list(token_ids: bytes) -> list[int]:
    """Ids of an int32 little-endian prompt."""
    ids = array("i")
    ids.frombytes(token_ids)
    return ids.tolist()

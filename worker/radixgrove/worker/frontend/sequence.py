"""One sequence of a request: from the engine's tokens to text that may be shown."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from radixgrove.protocol.openai.requests import Generation
from radixgrove.worker.frontend.call_reader import Outcome
from radixgrove.worker.frontend.detokenize import StopMatcher, Vocabulary
from radixgrove.worker.frontend.events import Event, Finished, ScoredToken, Text
from radixgrove.worker.frontend.output import Content, Part
from radixgrove.worker.frontend.structure import Output
from radixgrove.worker.messages import Finish, TokenLogprobs, Tokens


@dataclass(slots=True)
class Delta:
    """What one message adds to a choice."""

    events: list[Event]
    # A stop string was found: the engine does not see it, and needs an abort to end the sequence.
    abort: bool = False


class Sequence:
    """State of one choice. `take` turns the engine's messages into events, in order.

    A logprob entry leaves with the text of its token: while that is withheld, since it may begin a
    stop string, the entry waits, and one that a stop string cut off never leaves.
    """

    def __init__(
        self,
        index: int,
        request_id: str,
        generation: Generation,
        vocabulary: Vocabulary,
        prompt_ids: SequenceOf[int],
        offset: int = 0,
        output: Output | None = None,
    ) -> None:
        """
        Args:
            offset: characters before the first one generated (an echoed prompt).
            output: takes what the model writes apart; None: all of it is content.
        """
        self.index = index
        self.request_id = request_id
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finished = False
        self._min_tokens = generation.sampling.min_tokens
        self._include_stop = generation.include_stop
        self._scores = generation.sampling.logprobs is not None
        self._returns_ids = generation.return_token_ids
        self._output = output
        self._detokenizer = vocabulary.detokenizer(generation.skip_special_tokens, prompt_ids)
        self._matcher = StopMatcher(generation.stop, generation.include_stop)
        self._decoded = offset  # characters that the detokenizer has made
        self._shown = offset  # characters that have left
        self._waiting: list[tuple[int, ScoredToken]] = []  # (end of its text, token)

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._output is None else self._output.reasoning_tokens

    @property
    def outcomes(self) -> list[Outcome]:
        """What came of the calls that have ended, or have been given up."""
        return [] if self._output is None else self._output.parser.outcomes

    def take(self, message: Tokens) -> Delta:
        if message.cached_tokens is not None:
            self.cached_tokens = message.cached_tokens
        ids = message.token_ids
        self.completion_tokens += len(ids)
        shown = ids
        if message.stop_token is not None and not self._include_stop:
            shown = ids[:-1]  # the stop token itself is not text
        output = self._output
        if output is None:
            events: list[Event] = [Text(self._decode(shown, message.logprobs))]
        else:
            events = self._parse(output, shown, message.logprobs)
        finish, abort = None, False
        if self._matcher.matched is not None:
            finish, abort = "stop", message.finish is None
        elif message.finish is not None:
            rest = self._detokenizer.finish()
            if output is None:
                events.append(Text(self._push(rest)))
            else:
                events += self._content(output.feed(rest) + output.finish())
            if self._matcher.matched is None:
                events.append(Text(self._matcher.finish()))
            stopped = message.finish is Finish.STOP or self._matcher.matched is not None
            finish = "stop" if stopped else "length"
        self.finished = finish is not None
        events = self._arranged(events, ids)
        if finish is not None:
            if finish == "stop" and output is not None:
                finish = output.finish_reason
            events.append(Finished(finish))
        return Delta(events, abort)

    def _arranged(self, events: list[Event], ids: list[int]) -> list[Event]:
        """Events with something in them, the message's tokens at the first text."""
        texts = [event for event in events if isinstance(event, Text) and event.text]
        self._shown += sum(len(event.text) for event in texts)
        scored = self._release(ended=self.finished) if self._scores else []
        shown_ids = ids if self._returns_ids else []
        if not texts and (scored or shown_ids):
            texts.append(Text(""))
            events.append(texts[0])
        if texts:
            texts[0].token_ids, texts[0].scored = shown_ids, scored
        kept: list[Event] = []
        for event in events:
            if not isinstance(event, Text):
                kept.append(event)
            elif kept and isinstance(last := kept[-1], Text):
                last.text += event.text
            elif event.text or event.scored or event.token_ids:
                kept.append(event)
        return kept

    def _parse(
        self, output: Output, ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> list[Event]:
        """Events of new tokens. Stop strings count in content alone."""
        events: list[Event] = []
        first = self.completion_tokens - len(ids)
        together = logprobs is None and first >= self._min_tokens
        for start, run in output.runs(ids, together=together):
            text = output.text(run, self._detokenizer)
            if logprobs is not None:
                output.score(ScoredToken(run[0], logprobs[start], 0), len(text))
            counts = first + start >= self._min_tokens
            events += self._content(output.feed(text, len(run)), stops=counts)
            if self._matcher.matched is not None:
                break
        return events

    def _content(self, parts: list[Part], *, stops: bool = True) -> list[Event]:
        """Parts of the output as events, up to a stop string in the content."""
        events: list[Event] = []
        for part in parts:
            if not isinstance(part, Content):
                events.append(part)
                continue
            assert self._output is not None
            for end, scored in self._output.scored(part):
                scored.offset = self._decoded + max(0, scored.offset)
                self._waiting.append((self._decoded + end, scored))
            if stops:
                events.append(Text(self._push(part.text)))
            else:
                self._decoded += len(part.text)
                events.append(Text(part.text))
            if self._matcher.matched is not None:
                break
        return events

    def _decode(self, ids: list[int], logprobs: list[TokenLogprobs] | None) -> str:
        if logprobs is None and self.completion_tokens - len(ids) >= self._min_tokens:
            return self._push(self._detokenizer.push(ids))
        parts = []
        first = self.completion_tokens - len(ids)
        for position, token_id in enumerate(ids):
            begin = self._decoded
            new = self._detokenizer.push((token_id,))
            if logprobs is not None:
                scored = ScoredToken(token_id, logprobs[position], begin)
                self._waiting.append((begin + len(new), scored))
            if first + position < self._min_tokens:  # stop strings count from then on
                self._decoded += len(new)
                parts.append(new)
            else:
                parts.append(self._push(new))
            if self._matcher.matched is not None:
                break
        return "".join(parts)

    def _push(self, text: str) -> str:
        self._decoded += len(text)
        return self._matcher.push(text)

    def _release(self, *, ended: bool) -> list[ScoredToken]:
        """Tokens that have left as text; at the end also the one that a stop string cut in two."""
        cut = self._matcher.matched is not None
        released = []
        while self._waiting:
            end, scored = self._waiting[0]
            if not (end <= self._shown or (ended and (not cut or scored.offset < self._shown))):
                break
            released.append(scored)
            del self._waiting[0]
        return released

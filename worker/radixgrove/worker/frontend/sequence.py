"""One sequence of a request: from the engine's tokens to text that may be shown."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from radixgrove.protocol.openai.requests import Generation
from radixgrove.worker.frontend.detokenize import StopMatcher, Vocabulary
from radixgrove.worker.frontend.events import Event, Finished, ScoredToken, Text
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
    ) -> None:
        """`offset`: characters before the first one generated (an echoed prompt)."""
        self.index = index
        self.request_id = request_id
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finished = False
        self._min_tokens = generation.sampling.min_tokens
        self._include_stop = generation.include_stop
        self._scores = generation.sampling.logprobs is not None
        self._returns_ids = generation.return_token_ids
        self._detokenizer = vocabulary.detokenizer(generation.skip_special_tokens, prompt_ids)
        self._matcher = StopMatcher(generation.stop, generation.include_stop)
        self._decoded = offset  # characters that the detokenizer has made
        self._shown = offset  # characters that have left
        self._waiting: list[tuple[int, ScoredToken]] = []  # (end of its text, token)

    def take(self, message: Tokens) -> Delta:
        if message.cached_tokens is not None:
            self.cached_tokens = message.cached_tokens
        ids = message.token_ids
        self.completion_tokens += len(ids)
        shown = ids
        if message.stop_token is not None and not self._include_stop:
            shown = ids[:-1]  # the stop token itself is not text
        text = self._decode(shown, message.logprobs)
        finish, abort = None, False
        if self._matcher.matched is not None:
            finish, abort = "stop", message.finish is None
        elif message.finish is not None:
            rest = self._push(self._detokenizer.finish())
            if self._matcher.matched is None:
                rest += self._matcher.finish()
            text += rest
            stopped = message.finish is Finish.STOP or self._matcher.matched is not None
            finish = "stop" if stopped else "length"
        self._shown += len(text)
        self.finished = finish is not None
        scored = self._release(ended=self.finished) if self._scores else []
        shown_ids = ids if self._returns_ids else []
        events: list[Event] = []
        if text or scored or shown_ids:
            events.append(Text(text, shown_ids, scored))
        if finish is not None:
            events.append(Finished(finish))
        return Delta(events, abort)

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

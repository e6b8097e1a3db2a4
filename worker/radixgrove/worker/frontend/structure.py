"""Tokens on their way into a parser of the output, and what is counted on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from radixgrove.worker.frontend.custom_inputs import CustomInputs
from radixgrove.worker.frontend.detokenize import Detokenizer
from radixgrove.worker.frontend.events import Reasoning, ScoredToken
from radixgrove.worker.frontend.markers import Markers
from radixgrove.worker.frontend.output import Content, OutputParser, Part


class Output:
    """One choice's."""

    def __init__(
        self,
        parser: OutputParser,
        markers: Markers,
        *,
        called_reason: str,
        show_reasoning: bool = True,
        calls_alone: bool = False,
        custom: Collection[str] = (),
    ) -> None:
        """
        Args:
            called_reason: why an answer with calls ended that was not cut.
            calls_alone: the answer has to be calls; what is content then is part of a cut one.
            custom: names of custom tools.
        """
        self.parser = parser
        self.reasoning_tokens = 0
        self._markers = markers
        self._called_reason = called_reason
        self._hidden: tuple[type, ...] = (
            *(() if show_reasoning else (Reasoning,)),
            *((Content,) if calls_alone else ()),
        )
        self._inputs = CustomInputs(custom) if custom else None
        self._length = 0  # characters that were fed
        self._unplaced: deque[tuple[int, int, ScoredToken]] = deque()  # begin and end of its text

    @property
    def finish_reason(self) -> str:
        """Why an answer ended that stopped by itself."""
        return self._called_reason if self.parser.calls else "stop"

    def runs(self, ids: list[int], *, together: bool) -> Iterator[tuple[int, list[int]]]:
        """Tokens with the place of the first, cut so that markers stand alone; unless `together`,
        each token does."""
        if not together:
            yield from ((place, [token]) for place, token in enumerate(ids))
            return
        start = 0
        for place, token in enumerate(ids):
            if token in self._markers.chars:
                if place > start:
                    yield start, ids[start:place]
                yield place, [token]
                start = place + 1
        if start < len(ids):
            yield start, ids[start:]

    def text(self, run: list[int], detokenizer: Detokenizer) -> str:
        """A run's text, as the parser takes it; a marker ends a character that is not whole."""
        marker = self._markers.chars.get(run[0])
        if marker is None:
            return self._markers.clean(detokenizer.push(run))
        return self._markers.clean(detokenizer.finish()) + marker

    def feed(self, text: str, tokens: int = 0) -> list[Part]:
        self._length += len(text)
        before = self.parser.in_reasoning
        parts = self.parser.feed(text)
        if before or self.parser.in_reasoning:
            self.reasoning_tokens += tokens
        return self._seen(parts)

    def finish(self) -> list[Part]:
        return self._seen(self.parser.finish())

    def _seen(self, parts: list[Part]) -> list[Part]:
        if self._inputs is not None:
            parts = [seen for part in parts for seen in self._inputs.read(part)]
        if not self._hidden:
            return parts
        return [part for part in parts if not isinstance(part, self._hidden)]

    def score(self, token: ScoredToken, length: int) -> None:
        """The next `length` characters are this token's."""
        self._unplaced.append((self._length, self._length + length, token))

    def scored(self, content: Content) -> Iterator[tuple[int, ScoredToken]]:
        """Tokens of a piece of content, each with the end of its text in it; `offset` is where it
        begins. What lies before it is no content."""
        while self._unplaced:
            begin, end, token = self._unplaced[0]
            if begin >= content.end:
                return
            self._unplaced.popleft()
            if end > content.begin or begin == content.begin:
                token.offset = begin - content.begin
                yield min(end, content.end) - content.begin, token

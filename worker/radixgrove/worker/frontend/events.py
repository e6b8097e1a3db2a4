"""What a choice produces, as one typed stream, whatever the dialect of its request.

Renderers make whole answers and streams of the same events, so that the two cannot differ. In
order: `Reasoning` and `Text` in pieces, calls one after the other (`CallBegins`, `CallArguments` in
pieces, `CallEnds`), and one `Finished`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from radixgrove.protocol.openai.formats import ToolCall
from radixgrove.worker.messages import TokenLogprobs


@dataclass(slots=True)
class ScoredToken:
    """A shown token with its logprobs and where its text begins in the choice's text."""

    token_id: int
    logprobs: TokenLogprobs | None  # None: the first token of a prompt has none
    offset: int


@dataclass(slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(slots=True)
class Text:
    """Content. `token_ids` are all that came with it, those of calls and reasoning too; `scored`
    are tokens of content alone. Both may come without text."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)


@dataclass(slots=True)
class CallBegins:
    """A tool call, the `number`th of the choice from 0 on."""

    number: int
    id: str
    name: str
    custom: bool = False  # of a custom tool


@dataclass(slots=True)
class CallArguments:
    """A piece of a call's arguments, which are the text of a JSON object; of a custom tool's input,
    which is any text."""

    number: int
    text: str
    custom: bool = False


@dataclass(slots=True)
class CallEnds:
    """A call is whole."""

    number: int


@dataclass(slots=True)
class Finished:
    """A choice's last event, with OpenAI's reason."""

    reason: str


Event = Reasoning | Text | CallBegins | CallArguments | CallEnds | Finished


@dataclass(slots=True)
class Collected:
    """A choice as its events add up."""

    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)  # of each call
    finish: str = ""
    prompt: list[TokenLogprobs | None] | None = None  # of the prompt's tokens, where asked for

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; one without any is worse than all others."""
        found = [each.logprobs.logprob for each in self.scored if each.logprobs is not None]
        return sum(found) / len(found) if found else -math.inf

    def add(self, event: Event) -> None:
        match event:
            case Text():
                self.text.append(event.text)
                self.token_ids += event.token_ids
                self.scored += event.scored
            case Reasoning():
                self.reasoning.append(event.text)
            case CallBegins():
                self.calls.append(ToolCall(event.id, event.name, custom=event.custom))
                self.arguments.append([])
            case CallArguments():
                self.arguments[event.number].append(event.text)
            case Finished():
                self.finish = event.reason

    def whole_calls(self) -> list[ToolCall]:
        """The calls with their arguments."""
        for call, pieces in zip(self.calls, self.arguments, strict=True):
            call.arguments = "".join(pieces)
        return self.calls


def shown(events: list[Event]) -> str:
    """What events say, as one text for a log."""
    parts = []
    for event in events:
        match event:
            case Text() | Reasoning() | CallArguments():
                parts.append(event.text)
            case CallBegins():
                parts.append(event.name)
    return "".join(parts)

"""The shapes in which models write reasoning and tool calls: a model's format is data of these.

Texts here are as the model writes them. Those that are single tokens of its vocabulary count only
as these tokens, so that the same text inside a string is text. Blanks in them stand for any white
space, or none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True)
class Reasoning:
    """A block of thoughts before the answer, between two markers."""

    begin: str
    end: str
    ends_at_calls: bool = False  # some models forget to end it before a call

    @property
    def markers(self) -> tuple[str, str]:
        return self.begin.strip(), self.end.strip()


class CallIds(StrEnum):
    """What ids of calls look like, which a template may print."""

    LONG = "call_ and 24 letters or digits"
    NINE = "9 letters or digits"  # Mistral's templates refuse others
    NUMBERED = "functions.NAME:NUMBER"  # Kimi's, counted over a conversation


@dataclass(frozen=True)
class JsonBody:
    """A JSON object with the name and the arguments: `{"name": "f", "arguments": {…}}`."""

    arguments: str = "arguments"  # as the model is taught; `arguments` and `parameters` are read
    listed: bool = False  # an array of them
    separator: str = ""  # between objects that follow each other without markers


@dataclass(frozen=True)
class NamedBody:
    """The name in a header, then the arguments as a JSON object.

    `{name}` in a header is the name, `{id}` an id, `{number}` a number. The first header is the one
    that grammars ask for, the others are read.
    """

    headers: tuple[str, ...]
    footer: str = ""


@dataclass(frozen=True)
class TaggedBody:
    """A header with the name, then each argument between tags, its value plain where it is a text.

    `{key}` in `before` is an argument's name. `{string}` is `true` or `false`, whether the value is
    a text; `{type}` its type, `string` for a text; without either the tool's schema says so.
    """

    header: str
    before: str
    after: str
    footer: str
    newlines: bool  # a line break belongs to the tags on both sides of a value
    attributes: bool = False  # names in tags are escaped, as in XML's attributes


@dataclass(frozen=True)
class PythonBody:
    """A list of calls as Python has them: `[f(city="Paris", days=3)]`."""


@dataclass(frozen=True)
class LooseBody:
    """JSON with bare keys and strings between markers: `call:f{city:<escape>Paris<escape>}`."""

    header: str
    quote: str


Body = JsonBody | NamedBody | TaggedBody | PythonBody | LooseBody


@dataclass(frozen=True)
class Calls:
    """Where calls stand in the output.

    `section` is around all calls, `call` around each, either possibly empty. `bare` is the
    character with which an answer begins that is nothing but calls, without any marker. `around`
    stands around an answer's text, before calls, and `last` behind all: they are no text.
    """

    body: Body
    call: tuple[str, str] = ("", "")
    section: tuple[str, str] = ("", "")
    bare: str = ""
    ids: CallIds = CallIds.LONG
    around: tuple[str, str] = ("", "")
    last: str = ""

    @property
    def trigger(self) -> str:
        """What begins calls; empty: only `bare` does."""
        return self.section[0] or self.call[0]

    @property
    def frames(self) -> tuple[str, ...]:
        """What an answer has that is neither text nor calls."""
        return tuple(text for text in (*self.around, self.last) if text)


@dataclass(frozen=True)
class Channels:
    """An output of messages, each behind a header that says what it is (gpt-oss).

    A header with a `recipient` is a call's: the message is its arguments; one of the channel
    `thoughts` is reasoning's; others are content's.
    """

    channel: str  # before its name, in a header
    message: str  # ends a header
    end: str  # ends a message
    start: str  # begins the next header, and is followed by `role`
    role: str
    thoughts: str
    calls: str  # the channel of calls
    answer: str  # that of the answer
    recipient: str  # in a header; `{name}` is the tool's
    form: str  # in a header, what a call's arguments are


@dataclass(frozen=True)
class Format:
    """How one family of models writes. `markers` are texts that may be tokens."""

    name: str
    calls: Calls | Channels | None = None
    reasoning: Reasoning | None = None
    markers: tuple[str, ...] = field(default=())

    @property
    def reasons(self) -> bool:
        """Whether answers may have reasoning."""
        return self.reasoning is not None or isinstance(self.calls, Channels)

    @property
    def all_markers(self) -> tuple[str, ...]:
        """Each once; what has one of `markers` within it is none itself."""
        found = list(self.markers)
        if self.reasoning is not None:
            found += self.reasoning.markers
        if isinstance(self.calls, Channels):
            found += [self.calls.channel, self.calls.message, self.calls.end, self.calls.start]
        elif self.calls is not None:
            found += [text.strip() for text in (*self.calls.section, *self.calls.call)]
        made = {text for text in found for part in self.markers if part in text and part != text}
        return tuple(dict.fromkeys(text for text in found if text and text not in made))

    def __str__(self) -> str:
        thoughts = "no reasoning"
        if isinstance(self.calls, Channels):
            thoughts = f"reasoning in {self.calls.channel}{self.calls.thoughts}"
        elif self.reasoning is not None:
            thoughts = f"reasoning in {self.reasoning.begin.strip()}"
        return f"{self.name} ({thoughts})"

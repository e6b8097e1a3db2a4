"""What a model writes, taken apart by its format: reasoning, content and calls of tools.

The same events come of a text however it is cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from radixgrove.protocol.formats.shapes import (
    Calls,
    Channels,
    Format,
    JsonBody,
    LooseBody,
    NamedBody,
    PythonBody,
    TaggedBody,
)
from radixgrove.worker.frontend.events import CallArguments, CallBegins, CallEnds, Reasoning
from radixgrove.worker.frontend.literals import LiteralError, LiteralReader
from radixgrove.worker.frontend.markers import Markers
from radixgrove.worker.frontend.scanner import Ended, Malformed, Pieces, Scanner, Waits, joined

_NAME = r"(?P<name>[A-Za-z0-9_.-]{1,128})"
_FIELDS = {
    "name": _NAME,
    "id": r"(?P<id>[A-Za-z0-9]+)",
    "number": r"(?P<number>\d+)",
    "key": r"(?P<key>[^\n<>\ufdd2-\ufdef]+?)",
    "string": r"(?P<string>true|false)",
}
_KEYS = ("name", "arguments", "parameters", "type", "id")  # of calls as JSON
_BETWEEN = " \t\r\n,;[]"  # what may stand between calls, or behind them
_PYTHON = re.compile(r"\\|['\"]|[()\[\]{}]")
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}


@dataclass(slots=True)
class Content:
    """A piece of content, which is what the characters `begin` to `end` of the output are."""

    text: str
    begin: int
    end: int


Part = Reasoning | Content | CallBegins | CallArguments | CallEnds
Parts = Generator[Part | None, None, None]


class Outcome(StrEnum):
    """What came of a call, as metrics count it."""

    WHOLE = "whole"
    MALFORMED = "malformed"  # after its name was known: it stands as it came
    TEXT = "text"  # malformed before that: its text became content
    CUT = "cut"  # the answer ended within it


Properties = Mapping[str, Mapping[str, Any]]  # of tools, by name: schemas of their arguments


class OutputParser:
    """One choice's output. Feed it text with markers as `Markers` has them."""

    def __init__(
        self,
        form: Format,
        markers: Markers,
        *,
        offered: Properties | None,
        new_id: Callable[[str, int], str],
        in_reasoning: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """
        Args:
            offered: tools that may be called; None: calls are text.
            new_id: the id of the call of this name and number.
            in_reasoning: the prompt ends within a block of reasoning.
        """
        self._markers = markers
        self._reasoning = form.reasoning
        self._channels = form.calls if isinstance(form.calls, Channels) else None
        self._calls = form.calls if isinstance(form.calls, Calls) and offered is not None else None
        self._calls_tools = offered is not None
        self._offered = offered or {}
        self._new_id = new_id
        self._hide = skip_special_tokens
        self._in_reasoning = in_reasoning
        self._scanner = Scanner()
        self.outcomes: list[Outcome] = []
        self.calls = 0  # that have begun
        self._said = False  # any content but white space
        self._open = False  # a call has begun and not ended
        self._trimmer = _Trimmer()
        self._parts = self._run()

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next belongs to a block of reasoning."""
        return self._in_reasoning

    def feed(self, text: str) -> list[Part]:
        self._scanner.feed(text)
        return self._ready()

    def finish(self) -> list[Part]:
        """What is left at the output's end."""
        self._scanner.closed = True
        return self._ready()

    def _ready(self) -> list[Part]:
        found: list[Part] = []
        for part in self._parts:
            if part is None:
                break
            if found and isinstance(part, Content) and isinstance(found[-1], Content):
                found[-1].text += part.text
                found[-1].end = part.end
            else:
                found.append(part)
        return found

    # ---- the output as a whole ---------------------------------------------------------------

    def _run(self) -> Parts:
        try:
            if self._channels is not None:
                yield from self._messages(self._channels)
            if self._in_reasoning:
                yield from self._think()
            while True:
                if self._calls is not None and self._calls.bare and not (self._said or self.calls):
                    yield from self._bare(self._calls)
                found = yield from self._content()
                if found == "":
                    break
                if self._reasoning is not None and found == self._inner(self._reasoning.begin):
                    yield from self._think()
                elif self._calls is not None:
                    yield from self._section(self._calls, found)
        except Ended:
            pass
        blank = self._trimmer.take()
        if blank and not self.calls:
            end = self._scanner.offset
            yield Content(blank, end - len(blank), end)

    def _inner(self, text: str) -> str:
        return self._markers.inner(text.strip())

    def _content(self) -> Generator[Part | None, None, str]:
        """Content up to what begins reasoning or calls, which is returned; empty: the end."""
        scanner = self._scanner
        triggers = []
        if self._reasoning is not None:
            triggers.append(self._inner(self._reasoning.begin))
        if self._calls is not None and self._calls.trigger:
            triggers.append(self._inner(self._calls.trigger))
        finder = re.compile("|".join(map(re.escape, triggers)) or r"(?!)")
        while True:
            found = finder.search(scanner.text, scanner.pos)
            if found is not None:
                yield from self._say(found.start())
                scanner.pos = found.end()
                return found[0]
            held = 0 if scanner.closed else _overlap(scanner.text, triggers)
            yield from self._say(len(scanner.text) - held)
            if scanner.closed:
                return ""
            yield None

    def _say(self, end: int) -> Parts:
        """What is read up to `end` is content; white space at its end may turn out not to be."""
        scanner = self._scanner
        if end <= scanner.pos:
            return
        begin = scanner.offset
        text = scanner.text[scanner.pos : end]
        scanner.pos = end
        yield from self._content_of(text, begin, raw=False)

    def _content_of(self, text: str, begin: int, *, raw: bool) -> Parts:
        kept = self._trimmer.push(text)
        if kept:
            self._said = True
            end = begin + len(text) - self._trimmer.held
            shown = self._markers.outer(kept, hide_special=self._hide and not raw)
            yield Content(shown, end - len(kept), end)

    def _think(self) -> Parts:
        """Reasoning up to its end, white space around it left out."""
        assert self._reasoning is not None
        self._in_reasoning = True
        trimmer = _Trimmer(fresh=True)
        call = ""
        if self._calls is not None and self._reasoning.ends_at_calls:
            call = self._inner(self._calls.trigger)
        marker = call if call in self._markers.chars.values() else ""
        for piece in self._to_the_end(self._inner(self._reasoning.end), marker):
            if piece is None:
                yield None
            elif text := trimmer.push(piece):
                yield Reasoning(self._markers.outer(text))
        self._in_reasoning = False
        self._trimmer = _Trimmer(fresh=True)

    def _messages(self, channels: Channels) -> Parts:
        """An output of messages, up to its end."""
        scanner = self._scanner
        recipient = re.compile(re.escape(channels.recipient.strip()).replace(r"\{name\}", _NAME))
        message, end = self._inner(channels.message), self._inner(channels.end)
        thoughts = self._inner(channels.channel) + channels.thoughts
        while True:
            scanner.keep()
            try:
                header = yield from joined(scanner.until(message))
            except Ended:
                scanner.pos = len(scanner.text)
                text = scanner.kept()
                if self._markers.clean(text) == text:  # no header, not even a part of one
                    yield from self._content_of(text, scanner.offset - len(text), raw=True)
                raise
            scanner.forget()
            called = recipient.search(header)
            if called is not None and self._calls_tools:
                yield from self._message_call(called["name"], channels)
            elif thoughts in header:
                self._in_reasoning = True
                for piece in self._to_the_end(end):
                    yield None if piece is None else Reasoning(self._markers.outer(piece))
                self._in_reasoning = False
            else:
                begin = scanner.offset
                for piece in self._to_the_end(end):
                    if piece is None:
                        yield None
                    else:
                        yield from self._content_of(piece, begin, raw=False)
                        begin = scanner.offset

    def _to_the_end(self, end: str, marker: str = "") -> Pieces:
        """As `Scanner.until`; the last piece may end where the output does."""
        try:
            yield from self._scanner.until(end, marker)
        except Ended:
            rest = self._scanner.text[self._scanner.pos :]
            self._scanner.pos = len(self._scanner.text)
            if rest:
                yield rest
            raise

    def _message_call(self, name: str, channels: Channels) -> Parts:
        end, start = self._inner(channels.end), self._inner(channels.start)
        yield self._begin(name)
        try:
            yield from self._arguments(self._scanner.value())
        except Malformed:
            self.outcomes.append(Outcome.MALFORMED)
            self._open = False
            yield CallEnds(self.calls - 1)
        except Ended:
            self.outcomes.append(Outcome.CUT)
            raise
        else:
            yield self._end()
        yield from (None for piece in self._scanner.until(end, start) if piece is None)

    # ---- calls -------------------------------------------------------------------------------

    def _bare(self, calls: Calls) -> Parts:
        """An answer that may be nothing but calls."""
        scanner = self._scanner
        scanner.keep()
        try:
            yield from scanner.blanks()
        except Ended:
            yield from self._give_up(rest=True)
            raise
        if (yield from scanner.at(calls.bare)):
            yield from self._call(calls, known_only=True)
        else:
            yield from self._give_up()

    def _section(self, calls: Calls, trigger: str) -> Parts:
        """All that follows what begins calls, up to where content goes on."""
        scanner = self._scanner
        begin, section_end = self._inner(calls.call[0]), self._inner(calls.section[1])
        opened = not calls.section[0]  # what was found began a call itself
        scanner.keep(trigger)
        while True:
            if not opened:
                try:
                    yield from scanner.blanks()
                except Ended:
                    yield from self._give_up(rest=True)
                    raise
                if section_end and (yield from scanner.skip(section_end)):
                    scanner.forget()
                    return
                if not (yield from scanner.skip(begin)):
                    yield from self._give_up()
                    return
            if not (yield from self._call(calls)) or not calls.section[0]:
                return
            opened = False
            scanner.keep()

    def _call(
        self, calls: Calls, *, known_only: bool = False
    ) -> Generator[Part | None, None, bool]:
        """One call, or a list of them, and what ends it; whether more may follow."""
        try:
            yield from self._body(calls, known_only=known_only)
        except Malformed:
            if not self._open:
                self.outcomes.append(Outcome.TEXT)
                yield from self._give_up()
                return False
            self.outcomes.append(Outcome.MALFORMED)
            self._open = False
            yield CallEnds(self.calls - 1)
            yield from self._pass_by(calls)
        except Ended:
            if self._open:
                self.outcomes.append(Outcome.CUT)
            else:
                yield from self._give_up(rest=True)
            raise
        return True

    def _body(self, calls: Calls, *, known_only: bool) -> Parts:
        scanner = self._scanner
        body = calls.body
        match body:
            case JsonBody():
                yield from self._json_calls(body, known_only=known_only)
            case NamedBody():
                yield from scanner.blanks()
                if not calls.call[1] and (yield from scanner.at("[")):
                    yield from self._json_calls(JsonBody(listed=True), known_only=False)
                else:
                    yield from self._named_call(body)
            case TaggedBody():
                yield from self._tagged_call(body, self._inner(calls.call[1]))
            case PythonBody():
                yield from self._python_calls(known_only=known_only)
            case LooseBody():
                yield from self._loose_call(body)
        end = self._inner(calls.call[1])
        if end:
            try:
                yield from scanner.blanks()
                yield from scanner.skip(end)
            except Ended:
                pass

    def _pass_by(self, calls: Calls) -> Parts:
        """What is left of a malformed call, if its end can be known."""
        end = self._inner(calls.call[1] or calls.section[1])
        if end:
            yield from (None for piece in self._scanner.until(end) if piece is None)

    def _give_up(self, *, rest: bool = False) -> Parts:
        """What was read since a call began is content, with `rest` also what is not read yet."""
        scanner = self._scanner
        if rest:
            scanner.pos = len(scanner.text)
        text = scanner.kept()
        if self.calls and not text.strip(_BETWEEN):
            return  # behind calls that were whole
        if rest and text.strip() in self._markers.chars.values():
            return  # a marker, and nothing more came
        yield from self._content_of(text, scanner.offset - len(text), raw=True)

    def _begin(self, name: str) -> CallBegins:
        self._scanner.forget()
        number = self.calls
        self.calls += 1
        self._open = True
        self._trimmer.take()
        return CallBegins(number, self._new_id(name, number), name)

    def _end(self) -> CallEnds:
        self._open = False
        self.outcomes.append(Outcome.WHOLE)
        return CallEnds(self.calls - 1)

    def _arguments(self, pieces: Pieces) -> Parts:
        number = self.calls - 1
        for piece in pieces:
            yield None if piece is None else CallArguments(number, self._markers.outer(piece))

    # ---- bodies ------------------------------------------------------------------------------

    def _json_calls(self, body: JsonBody, *, known_only: bool) -> Parts:
        scanner = self._scanner
        yield from scanner.blanks()
        if (yield from scanner.skip("[")):
            while not (yield from self._skipped("]")):
                yield from self._json_call(known_only=known_only)
                scanner.keep()
                yield from self._skipped(",")
            scanner.forget()
            return
        yield from self._json_call(known_only=known_only)
        if not body.separator:
            return
        while True:
            scanner.keep()
            try:
                found = yield from self._skipped(body.separator.strip())
            except Ended:
                found = False
            if not found:
                yield from self._give_up()
                return
            yield from self._json_call(known_only=known_only)

    def _skipped(self, text: str) -> Generator[None, None, bool]:
        yield from self._scanner.blanks()
        return (yield from self._scanner.skip(text))

    def _json_call(self, *, known_only: bool) -> Parts:
        """An object with a name and arguments; the arguments may come first."""
        scanner = self._scanner
        name, held, begun = "", "", False
        yield from scanner.blanks()
        yield from scanner.expect("{")
        while not (yield from self._skipped("}")):
            if (yield from scanner.skip(",")):
                continue
            key = yield from self._json_string()
            yield from scanner.blanks()
            yield from scanner.expect(":")
            yield from scanner.blanks()
            if known_only and key not in _KEYS:
                raise Malformed
            if key == "name":
                name = yield from self._json_string()
                if known_only and name not in self._offered:
                    raise Malformed
            elif key not in ("arguments", "parameters") or begun:
                yield from joined(scanner.value())
            elif name and (yield from scanner.at("{")):
                begun = True
                yield self._begin(name)
                yield from self._arguments(scanner.value())
            else:
                held = yield from joined(scanner.value())
        if not name:
            raise Malformed
        if not begun:
            yield self._begin(name)
            yield CallArguments(self.calls - 1, self._markers.outer(_as_object(held)))
        yield self._end()

    def _json_string(self) -> Generator[None, None, str]:
        if not (yield from self._scanner.at('"')):
            raise Malformed
        text = yield from joined(self._scanner.value())
        try:
            return self._markers.outer(msgspec.json.decode(text, type=str))
        except msgspec.DecodeError:
            raise Malformed from None

    def _named_call(self, body: NamedBody) -> Parts:
        scanner = self._scanner
        patterns = [self._pattern(header + "{") for header in body.headers]
        yield from scanner.blanks()
        found = yield from self._header(*patterns)
        scanner.pos -= 1
        yield self._begin(found["name"])
        yield from self._arguments(scanner.value())
        if body.footer:
            yield from self._skipped(self._inner(body.footer))
        yield self._end()

    def _tagged_call(self, body: TaggedBody, end: str) -> Parts:
        scanner = self._scanner
        yield from scanner.blanks()
        found = yield from self._header(self._pattern(body.header))
        name = found["name"]
        properties = self._offered.get(name, {})
        yield self._begin(name)
        number = self.calls - 1
        after, footer = self._inner(body.after), self._inner(body.footer)
        before = self._pattern(body.before.rstrip("\n"), tail="\n?" if body.newlines else "")
        separator = "{"
        while True:
            yield from scanner.blanks()
            if footer and (yield from scanner.skip(footer)):
                break
            if end and (yield from scanner.at(end)):
                break
            found = yield from self._header(before)
            key = found["key"]
            types = _types(properties.get(key))
            is_text = types == {"string"}
            if "string" in before.groupindex:
                is_text = found["string"] == "true"
                types = {"string"} if is_text else {*_TYPES}
            yield CallArguments(number, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            # A line break behind the one tag means one before the other.
            lines = body.newlines and found[0].endswith("\n")
            pieces = scanner.until("\n" + after if lines else after)
            if is_text:
                yield CallArguments(number, '"')
                for piece in pieces:
                    if piece is None:
                        yield None
                    else:
                        yield CallArguments(number, _escaped(self._markers.outer(piece)))
                yield CallArguments(number, '"')
            else:
                text = yield from joined(pieces)
                yield CallArguments(number, _typed(self._markers.outer(text), types))
        yield CallArguments(number, "{}" if separator == "{" else "}")
        yield self._end()

    def _python_calls(self, *, known_only: bool) -> Parts:
        scanner = self._scanner
        name_and_bracket = self._pattern("{name} (")
        yield from scanner.blanks()
        yield from scanner.expect("[")
        while not (yield from self._skipped("]")):
            found = yield from self._header(name_and_bracket)
            name = found["name"]
            if known_only and name not in self._offered:
                raise Malformed
            yield from self._literal_call(name, scanner.balanced(_PYTHON, ("'", '"')), "=")
            scanner.keep()
            yield from self._skipped(",")
        scanner.forget()

    def _loose_call(self, body: LooseBody) -> Parts:
        scanner = self._scanner
        yield from scanner.blanks()
        found = yield from self._header(self._pattern(body.header + "{"))
        quote = self._inner(body.quote)
        structure = re.compile(rf"{re.escape(quote)}|[()\[\]{{}}]")
        yield from self._literal_call(
            found["name"], scanner.balanced(structure, (quote,)), ":", quote
        )

    def _literal_call(self, name: str, pieces: Pieces, equals: str, quote: str = "") -> Parts:
        """Arguments that are read as a whole, since they are no JSON."""
        text = yield from joined(pieces)
        try:
            arguments = LiteralReader(text + "\0", quote).arguments(equals, "\0")
        except LiteralError:
            raise Malformed from None
        yield self._begin(name)
        shown = json.dumps(arguments, ensure_ascii=False)
        yield CallArguments(self.calls - 1, self._markers.outer(shown))
        yield self._end()

    def _header(self, *patterns: re.Pattern[str]) -> Waits[re.Match[str]]:
        """As `Scanner.header`: a marker that is none of the header's is not within it."""
        own = "".join(pattern.pattern for pattern in patterns)
        stops = {char for char in self._markers.chars.values() if char not in own}
        return (yield from self._scanner.header(*patterns, stops=stops))

    def _pattern(self, text: str, tail: str = "") -> re.Pattern[str]:
        """A header of the format as an expression: blanks in it stand for any white space."""
        parts = []
        for piece in re.split(r"(\{[a-z]+\}|\s+)", self._markers.inner(text)):
            if piece[1:-1] in _FIELDS:
                parts.append(_FIELDS[piece[1:-1]])
            elif piece.isspace():
                parts.append(r"\s*")
            elif piece:
                parts.append(r"\s*" + re.escape(piece))
        return re.compile("".join(parts) + tail)


class _Trimmer:
    """Holds back white space, which turns out to be text only if more text follows."""

    def __init__(self, *, fresh: bool = False) -> None:
        """`fresh`: white space before any text is left out."""
        self._fresh = fresh
        self._held: list[str] = []
        self.held = 0  # characters

    def push(self, text: str) -> str:
        """What is text now: what was held back, and the new up to its last white space."""
        if self._fresh:
            text = text.lstrip()
        kept = text.rstrip()
        if not kept:
            self._hold(text)
            return ""
        self._fresh = False
        shown = self.take() + kept
        self._hold(text[len(kept) :])
        return shown

    def take(self) -> str:
        """What is held back; it is no more."""
        held = "".join(self._held)
        self._held.clear()
        self.held = 0
        return held

    def _hold(self, blank: str) -> None:
        if blank:
            self._held.append(blank)
            self.held += len(blank)


def _overlap(text: str, triggers: Collection[str]) -> int:
    """Length of the longest end of the text that may begin a trigger."""
    longest = 0
    for trigger in triggers:
        for size in range(min(len(trigger) - 1, len(text)), longest, -1):
            if text.endswith(trigger[:size]):
                longest = size
                break
    return longest


def _as_object(text: str) -> str:
    """Arguments that came as an object, as a string that holds it, or not at all."""
    if text.startswith('"'):
        try:
            return msgspec.json.decode(text, type=str)
        except msgspec.DecodeError:
            return text
    return text if text and text != "null" else "{}"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _types(schema: Any) -> set[str]:
    """Types of a schema's values by its own words; those of unknown ones are all."""
    if not isinstance(schema, dict):
        return {"string", *_TYPES}
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        found |= {name for name in declared if isinstance(name, str)}
    for union in ("anyOf", "oneOf"):
        branches = schema.get(union)
        for branch in branches if isinstance(branches, list) else ():
            found |= _types(branch)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not found and isinstance(values, list) and all(isinstance(v, str) for v in values):
        found = {"string"}
    return found or {"string", *_TYPES}


def _typed(text: str, types: set[str]) -> str:
    """A value as JSON: what it reads as, if that is of one of the types, else a string."""
    stripped = text.strip()
    try:
        value = json.loads(stripped, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        words = {"True": True, "False": False, "None": None}
        if stripped not in words:
            return json.dumps(text, ensure_ascii=False)
        value = words[stripped]
        stripped = json.dumps(value)
    kinds = [kind for name in types for kind in _TYPES.get(name, ())]
    fits = type(value) in kinds or (
        "integer" in types and isinstance(value, float) and value.is_integer()
    )
    if isinstance(value, str):
        fits = "string" not in types
    return stripped if fits else json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(name)

"""Tool calls as models write them, read in each format."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Generator, Mapping, Set
from enum import StrEnum

import msgspec

from radixgrove.protocol.constraints.values import ALL_TYPES
from radixgrove.protocol.formats.shapes import (
    Calls,
    JsonBody,
    LooseBody,
    NamedBody,
    PythonBody,
    TaggedBody,
)
from radixgrove.worker.frontend.events import CallArguments, CallBegins, CallEnds
from radixgrove.worker.frontend.literals import LiteralError, LiteralReader
from radixgrove.worker.frontend.markers import Markers
from radixgrove.worker.frontend.plain_values import as_object, escaped, typed
from radixgrove.worker.frontend.scanner import Ended, Malformed, Pieces, Scanner, Waits, joined

NAME = r"(?P<name>[A-Za-z0-9_.-]{1,128})"
_FIELDS = {
    "name": NAME,
    "id": r"(?P<id>[A-Za-z0-9]+)",
    "number": r"(?P<number>\d+)",
    "key": r"(?P<key>[^\n<>\ufdd2-\ufdef]+?)",
    "string": r"(?P<string>true|false)",
    "type": r"(?P<type>[a-z]+)",
}
_KEYS = ("name", "arguments", "parameters", "type", "id")  # of calls as JSON
_NO_TEXTS = ALL_TYPES - {"string"}  # the tag says so: what reads as a JSON string is one
_PYTHON = re.compile(r"\\|['\"]|[()\[\]{}]")

CallParts = Generator[CallBegins | CallArguments | CallEnds | None, None, None]
# Of tools, by name: types that their arguments may have, by name.
Properties = Mapping[str, Mapping[str, Set[str]]]


class Outcome(StrEnum):
    """What came of a call, as metrics count it."""

    WHOLE = "whole"
    MALFORMED = "malformed"  # after its name was known: it stands as it came
    TEXT = "text"  # malformed before that: its text became content
    CUT = "cut"  # the answer ended within it


class CallReader:
    """Reads one choice's calls, and counts them."""

    def __init__(
        self,
        scanner: Scanner,
        markers: Markers,
        offered: Properties,
        new_id: Callable[[str, int], str],
    ) -> None:
        """
        Args:
            offered: tools that may be called.
            new_id: the id of the call of this name and number.
        """
        self._scanner = scanner
        self._markers = markers
        self._offered = offered
        self._new_id = new_id
        self.outcomes: list[Outcome] = []
        self.begun = 0
        self.open = False  # a call has begun and not ended

    def read(self, calls: Calls, *, known_only: bool = False) -> CallParts:
        """One call, or a list of them, and what ends it. Behind one that others may follow, the
        scanner keeps what it read of text that is none.

        Args:
            known_only: a call is only what has a call's keys and names a tool that is offered.

        Raises:
            Malformed: it is no call. If one is `open`, what came of it stands.
            Ended: the output ended within it.
        """
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
                yield from self._tagged_call(body, self._markers.trimmed(calls.call[1]))
            case PythonBody():
                yield from self._python_calls(known_only=known_only)
            case LooseBody():
                yield from self._loose_call(body)
        end = self._markers.trimmed(calls.call[1])
        if end:
            try:
                yield from scanner.blanks()
                yield from scanner.skip(end)
            except Ended:
                pass

    def message(self, name: str) -> CallParts:
        """A call of this name, of which the arguments are all that comes.

        Raises:
            Malformed, Ended: as `read`.
        """
        yield self._begin(name)
        yield from self._arguments(self._scanner.value())
        yield self._end()

    def break_off(self) -> CallEnds:
        """The open call is malformed: it stands as it came."""
        self.outcomes.append(Outcome.MALFORMED)
        return self._close()

    def _begin(self, name: str) -> CallBegins:
        self._scanner.forget()
        number = self.begun
        self.begun += 1
        self.open = True
        return CallBegins(number, self._new_id(name, number), name)

    def _end(self) -> CallEnds:
        self.outcomes.append(Outcome.WHOLE)
        return self._close()

    def _close(self) -> CallEnds:
        self.open = False
        return CallEnds(self.begun - 1)

    def _arguments(self, pieces: Pieces) -> CallParts:
        number = self.begun - 1
        for piece in pieces:
            yield None if piece is None else CallArguments(number, self._markers.outer(piece))

    def _json_calls(self, body: JsonBody, *, known_only: bool) -> CallParts:
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
                return
            yield from self._json_call(known_only=known_only)

    def _skipped(self, text: str) -> Generator[None, None, bool]:
        yield from self._scanner.blanks()
        return (yield from self._scanner.skip(text))

    def _json_call(self, *, known_only: bool) -> CallParts:
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
            yield CallArguments(self.begun - 1, self._markers.outer(as_object(held)))
        yield self._end()

    def _json_string(self) -> Generator[None, None, str]:
        if not (yield from self._scanner.at('"')):
            raise Malformed
        text = yield from joined(self._scanner.value())
        try:
            return self._markers.outer(msgspec.json.decode(text, type=str))
        except msgspec.DecodeError:
            raise Malformed from None

    def _named_call(self, body: NamedBody) -> CallParts:
        scanner = self._scanner
        patterns = [self._pattern(header + "{") for header in body.headers]
        yield from scanner.blanks()
        found = yield from self._header(*patterns)
        scanner.pos -= 1
        yield self._begin(found["name"])
        yield from self._arguments(scanner.value())
        if body.footer:
            yield from self._skipped(self._markers.trimmed(body.footer))
        yield self._end()

    def _tagged_call(self, body: TaggedBody, end: str) -> CallParts:
        scanner = self._scanner
        yield from scanner.blanks()
        found = yield from self._header(self._pattern(body.header))
        name = found["name"]
        properties = self._offered.get(name, {})
        yield self._begin(name)
        number = self.begun - 1
        after, footer = self._markers.trimmed(body.after), self._markers.trimmed(body.footer)
        before = self._pattern(body.before.rstrip("\n"), tail="\n?" if body.newlines else "")
        separator = "{"
        while True:
            yield from scanner.blanks()
            if footer and (yield from scanner.skip(footer)):
                break
            if end and (yield from scanner.at(end)):
                break
            if scanner.closed and end.startswith(scanner.text[scanner.pos :]):
                raise Ended  # within what ends the call
            found = yield from self._header(before)
            key = html.unescape(found["key"]) if body.attributes else found["key"]
            types = properties.get(key, ALL_TYPES)
            is_text = types == {"string"}
            if "string" in before.groupindex:
                is_text = found["string"] == "true"
                types = _NO_TEXTS
            elif "type" in before.groupindex:
                is_text = found["type"] == "string"
                types = _NO_TEXTS
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
                        yield CallArguments(number, escaped(self._markers.outer(piece)))
                yield CallArguments(number, '"')
            else:
                text = yield from joined(pieces)
                yield CallArguments(number, typed(self._markers.outer(text), types))
        yield CallArguments(number, "{}" if separator == "{" else "}")
        yield self._end()

    def _python_calls(self, *, known_only: bool) -> CallParts:
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

    def _loose_call(self, body: LooseBody) -> CallParts:
        scanner = self._scanner
        yield from scanner.blanks()
        found = yield from self._header(self._pattern(body.header + "{"))
        quote = self._markers.trimmed(body.quote)
        structure = re.compile(rf"{re.escape(quote)}|[()\[\]{{}}]")
        yield from self._literal_call(
            found["name"], scanner.balanced(structure, (quote,)), ":", quote
        )

    def _literal_call(self, name: str, pieces: Pieces, equals: str, quote: str = "") -> CallParts:
        """Arguments that are read as a whole, since they are no JSON."""
        text = yield from joined(pieces)
        try:
            arguments = LiteralReader(text + "\0", quote).arguments(equals, "\0")
        except LiteralError:
            raise Malformed from None
        yield self._begin(name)
        shown = json.dumps(arguments, ensure_ascii=False)
        yield CallArguments(self.begun - 1, self._markers.outer(shown))
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

"""Values as models write them outside JSON, to JSON: Python's literals, and JSON with bare keys."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from radixgrove.protocol.errors import InvalidInput

MAX_LEVELS = 64

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_NAME = re.compile(r"[^\s\"'\[\](){}:=,\0]+")
_KEY = re.compile(r"[^\[\]{}:,\0]+")  # between marked strings, keys may have blanks
_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_CLOSING = {"[": "]", "{": "}", "(": ")"}


class LiteralError(InvalidInput, ValueError):
    """The text is no such value."""


class LiteralReader:
    """Reads one text from its beginning on.

    `quote` is a marker around strings, within which nothing is escaped; empty: quoted and escaped
    as in Python.
    """

    def __init__(self, text: str, quote: str = "") -> None:
        self._text = text
        self._quote = quote
        self._pos = 0

    def arguments(self, equals: str, closing: str) -> dict[str, Any]:
        """Named values up to `closing`, behind the bracket that opened them.

        Raises:
            LiteralError: they are none.
        """
        return self._pairs(equals, closing, 0)

    def _pairs(self, equals: str, closing: str, level: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._skip(closing):
            quoted = self._string()
            name = _KEY if self._quote else _NAME
            key = quoted if quoted is not None else self._match(name)
            if key is None or not self._skip(equals):
                raise LiteralError
            found[key] = self._value(level + 1)
            if not self._skip(",") and not self._at(closing):
                raise LiteralError
        return found

    def _value(self, level: int) -> Any:
        if level > MAX_LEVELS:
            raise LiteralError
        text = self._string()
        if text is not None:
            return text
        for opening, closing in _CLOSING.items():
            if not self._skip(opening):
                continue
            if opening == "{":
                return self._pairs(":", closing, level)
            items = []
            while not self._skip(closing):
                items.append(self._value(level + 1))
                if not self._skip(",") and not self._at(closing):
                    raise LiteralError
            return items
        number = self._match(_NUMBER)
        if number is not None:
            return _number(number)
        word = self._match(_NAME)
        if word not in _WORDS:
            raise LiteralError
        return _WORDS[word]

    def _string(self) -> str | None:
        self._blanks()
        if self._quote:
            if not self._skip(self._quote):
                return None
            end = self._text.find(self._quote, self._pos)
            if end < 0:
                raise LiteralError
            text = self._text[self._pos : end]
            self._pos = end + len(self._quote)
            return text
        found = _STRING.match(self._text, self._pos)
        if found is None:
            return None
        self._pos = found.end()
        body = found[1] if found[1] is not None else found[2]
        if "\\" not in body:
            return body
        # Halves of a character become one, and one without the other is no text.
        halves = _ESCAPE.sub(_unescaped, body).encode("utf-16", "surrogatepass")
        return halves.decode("utf-16", "replace")

    def _match(self, pattern: re.Pattern[str]) -> str | None:
        self._blanks()
        found = pattern.match(self._text, self._pos)
        if found is None:
            return None
        self._pos = found.end()
        return found[0]

    def _at(self, text: str) -> bool:
        self._blanks()
        return self._text.startswith(text, self._pos)

    def _skip(self, text: str) -> bool:
        found = self._at(text)
        if found:
            self._pos += len(text)
        return found

    def _blanks(self) -> None:
        text, pos = self._text, self._pos
        while pos < len(text) and text[pos].isspace():
            pos += 1
        self._pos = pos


def _number(text: str) -> Any:
    """JSON has no infinity, and Python no whole number of thousands of digits."""
    try:
        number = json.loads(text)
    except ValueError:
        raise LiteralError from None
    if isinstance(number, float) and not math.isfinite(number):
        raise LiteralError
    return number


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "ux" and len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPES.get(code, code)

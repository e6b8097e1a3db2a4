"""Text that arrives in pieces, read from its beginning on as if it were there as a whole.

Readers are generators: they yield what they find, or None to wait for more text. So each reads as
a plain description of what it reads, and no result depends on where the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Set
from typing import TypeVar

from radixgrove.protocol.errors import InvalidInput

T = TypeVar("T")
Waits = Generator[None, None, T]  # comes back with more text, and in the end with a result
Pieces = Generator[str | None, None, None]  # pieces of a text as they come, or None to wait

MAX_HEADER = 512  # characters in which something must be recognized

_BLANKS = re.compile(r"\s*")
_STRUCTURE = re.compile(r'["{}\[\]\ufdd2-\ufdef]')
_STRING_PART = re.compile(r'["\\]')
_SCALAR = re.compile(r"[^\s,\]}]*")


class Ended(InvalidInput):
    """The output ended where more was to come."""


class Malformed(InvalidInput):
    """The output is not what it began as."""


class Scanner:
    """`text[pos:]` is what has arrived and is not read yet; its first character is the `offset`th
    of the output."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.closed = False
        self._base = 0
        self._kept: list[str] | None = None

    @property
    def offset(self) -> int:
        return self._base + self.pos

    def feed(self, text: str) -> None:
        if self._kept is not None:
            self._kept.append(self.text[: self.pos])
        self._base += self.pos
        self.text = self.text[self.pos :] + text
        self.pos = 0

    def keep(self, before: str = "") -> None:
        """From here on remember what is read; `before` was read already."""
        self._kept = [before]
        self._base += self.pos
        self.text = self.text[self.pos :]
        self.pos = 0

    def kept(self) -> str:
        """What was read since `keep`; forgets it."""
        if self._kept is None:
            return ""
        kept = "".join(self._kept) + self.text[: self.pos]
        self.forget()
        return kept

    @property
    def keeping(self) -> bool:
        return self._kept is not None

    def forget(self) -> None:
        self._kept = None
        self._base += self.pos
        self.text = self.text[self.pos :]
        self.pos = 0

    def wait(self) -> Waits[None]:
        """
        Raises:
            Ended: no more text comes.
        """
        if self.closed:
            raise Ended
        yield None

    def _pass_on(self, end: int) -> Pieces:
        """The text up to there, then a wait for more."""
        if end > self.pos:
            piece = self.text[self.pos : end]
            self.pos = end
            yield piece
        yield from self.wait()

    def blanks(self) -> Waits[None]:
        """Skip white space; there is a character behind it."""
        while True:
            found = _BLANKS.match(self.text, self.pos)
            self.pos = found.end() if found else self.pos
            if self.pos < len(self.text):
                return
            yield from self.wait()

    def at(self, text: str) -> Waits[bool]:
        """Whether this text comes next."""
        while True:
            if self.text.startswith(text, self.pos):
                return True
            if self.closed or not text.startswith(self.text[self.pos :]):
                return False
            yield None

    def skip(self, text: str) -> Waits[bool]:
        """Skip this text, if it comes next."""
        found = yield from self.at(text)
        if found:
            self.pos += len(text)
        return found

    def expect(self, text: str) -> Waits[None]:
        """
        Raises:
            Malformed: something else comes next.
        """
        if not (yield from self.skip(text)):
            raise Malformed

    def header(self, *patterns: re.Pattern[str], stops: Set[str]) -> Waits[re.Match[str]]:
        """What one of the patterns matches, with a character behind it.

        Raises:
            Malformed: none does within `MAX_HEADER` characters, or before one of `stops`.
            Ended: no more text comes.
        """
        while True:
            for pattern in patterns:
                found = pattern.match(self.text, self.pos)
                if found is None or found.end() - self.pos > MAX_HEADER:
                    continue
                if found.end() < len(self.text):
                    self.pos = found.end()
                    return found
            if len(self.text) - self.pos > MAX_HEADER or not stops.isdisjoint(
                self.text[self.pos :]
            ):
                raise Malformed
            yield from self.wait()

    def until(self, end: str, marker: str = "") -> Pieces:
        """Pieces of the text up to `end`, which is skipped, or up to `marker`, which is not."""
        held = max(len(end), len(marker)) - 1
        while True:
            found = self.text.find(end, self.pos)
            stop = self.text.find(marker, self.pos) if marker else -1
            last = min(place for place in (found, stop, len(self.text)) if place >= 0)
            if last in (found, stop):
                if last > self.pos:
                    yield self.text[self.pos : last]
                self.pos = last + (len(end) if last == found else 0)
                return
            ready = len(self.text) - held
            if ready > self.pos:
                piece = self.text[self.pos : ready]
                self.pos = ready
                yield piece
            yield from self.wait()

    def value(self) -> Pieces:
        """Pieces of one JSON value, not checked beyond its quotes and brackets.

        Raises:
            Malformed: a marker stands where only JSON may.
        """
        yield from self.blanks()
        first = self.text[self.pos]
        if first not in '{["':
            yield from self._scalar()
            return
        depth, in_string = 0, False
        scan = self.pos
        while True:
            text = self.text
            found = (_STRING_PART if in_string else _STRUCTURE).search(text, scan)
            if found is None or (found[0] == "\\" and found.end() == len(text)):
                end = len(text) if found is None else found.start()
                yield from self._pass_on(end)
                scan = self.pos
                continue
            scan = found.end()
            match found[0]:
                case "\\":
                    scan += 1
                case '"':
                    in_string = not in_string
                case "{" | "[":
                    depth += 1
                case "}" | "]":
                    depth -= 1
                case _:
                    if found.start() > self.pos:
                        yield text[self.pos : found.start()]
                    self.pos = found.start()
                    raise Malformed
            if depth <= 0 and not in_string:
                yield text[self.pos : scan]
                self.pos = scan
                return

    def _scalar(self) -> Pieces:
        parts = []
        while True:
            found = _SCALAR.match(self.text, self.pos)
            end = found.end() if found else self.pos
            parts.append(self.text[self.pos : end])
            self.pos = end
            if end < len(self.text) or self.closed:
                break
            yield None
        text = "".join(parts)
        if not text:
            raise Malformed
        yield text

    def balanced(self, structure: re.Pattern[str], quotes: tuple[str, ...]) -> Pieces:
        """Pieces up to the bracket that closes what was opened before, which is skipped and is no
        part of them.

        Args:
            structure: finds brackets, quotes and escapes.
            quotes: which of its finds begin a string, and end one that began alike.
        """
        depth, quote = 1, ""
        held = max(map(len, quotes)) - 1
        scan = self.pos
        while True:
            text = self.text
            found = structure.search(text, scan)
            if found is None or (found[0] == "\\" and found.end() == len(text)):
                end = max(scan, len(text) - held) if found is None else found.start()
                yield from self._pass_on(end)
                scan = self.pos
                continue
            scan = found.end()
            token = found[0]
            if token == "\\":
                scan += 1
            elif token in quotes:
                if not quote:
                    quote = token
                elif quote == token:
                    quote = ""
            elif not quote:
                depth += 1 if token in "([{" else -1
            if depth == 0:
                if found.start() > self.pos:
                    yield text[self.pos : found.start()]
                self.pos = scan
                return


def joined(pieces: Pieces) -> Waits[str]:
    """All pieces as one text."""
    parts = []
    for piece in pieces:
        if piece is None:
            yield None
        else:
            parts.append(piece)
    return "".join(parts)

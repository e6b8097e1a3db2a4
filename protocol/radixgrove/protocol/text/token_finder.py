"""Finding tokens' texts in a text: leftmost, the longest of those that begin together.

A regular expression of thousands of alternatives would try each of them at each place, and one
search over megabytes would hold the interpreter's lock for as long as it takes. Here alternatives
share their common beginnings, and a search ends after a window.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_WINDOW = 1 << 14  # characters that one search looks at: milliseconds, whatever they are
_DEEPEST = 32  # common beginnings within common beginnings; the compiler of patterns recurses


class TokenFinder:
    """Finds any of a set of texts."""

    def __init__(self, texts: Iterable[str]) -> None:
        found = {text for text in texts if text}
        self.longest = max(map(len, found), default=0)
        self._pattern = re.compile(_alternatives(found)) if found else None

    def find(self, text: str, start: int = 0) -> Iterator[re.Match[str]]:
        """Matches that do not overlap, from the left, those that begin at `start` or later."""
        if self._pattern is None:
            return
        position = start
        for stop in range(start + _WINDOW, len(text) + _WINDOW, _WINDOW):
            # What begins before `stop` ends before `reach`.
            reach = stop + self.longest - 1
            for match in self._pattern.finditer(text, position, reach):
                if match.start() >= stop:
                    break
                yield match
                position = match.end()
            position = max(position, stop)


def _alternatives(texts: set[str], depth: int = 0) -> str:
    """A pattern that matches the longest of `texts`; the empty one among them: possibly nothing."""
    if depth == _DEEPEST:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:1], []).append(text)
    optional = groups.pop("", None) is not None
    parts = []
    for group in groups.values():
        shared = _common_beginning(group)
        rest = {text[len(shared) :] for text in group}
        follows = "" if rest == {""} else f"(?:{_alternatives(rest, depth + 1)})"
        parts.append(re.escape(shared) + follows)
    return "|".join([*parts, ""] if optional else parts)


def _common_beginning(texts: list[str]) -> str:
    first, last = min(texts), max(texts)  # in between all begin as these two do
    for position, character in enumerate(first):
        if last[position : position + 1] != character:
            return first[:position]
    return first

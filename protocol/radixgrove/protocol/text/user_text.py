"""What users type stays text: special tokens in it are broken before a template sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from radixgrove.protocol.text.token_finder import TokenFinder

FEW = 8  # characters that a text is searched for one by one: faster than by a set or a pattern
# Unicode noncharacters, which no text may contain in interchange; a user's own are dropped.
BREAK = "\ufdd0"  # inside what would otherwise read as a special token
END = "\ufdd1"  # after the message to continue


class SpecialTextGuard:
    """Breaks special tokens inside user text, so that a rendered prompt has only the template's.

    Besides whole tokens it breaks a token's beginning at the end of a text and a token's end at its
    beginning: two texts that a template joins could complete one.
    """

    def __init__(self, special: Iterable[str]) -> None:
        texts = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
        self._finder = TokenFinder(texts)
        self._heads = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._tails = frozenset(text[size:] for text in texts for size in range(1, len(text)))
        self._longest = len(texts[0]) if texts else 0
        # Characters that every head and every tail has: most texts have none of the firsts at all,
        # and none of the others near their edges.
        self._firsts = _Characters(text[0] for text in texts)
        self._lasts = _Characters(text[-1] for text in texts)

    def _break(self, text: str) -> str:
        """The text with each of its tokens cut in two."""
        parts = []
        done = 0
        for match in self._finder.find(text):
            parts.append(text[done : match.start() + 1])
            done = match.start() + 1
        return BREAK.join([*parts, text[done:]])

    def __call__(self, text: str) -> str:
        text = without_sentinels(text)
        if not self._longest or not text:
            return text
        if self._firsts.in_all_of(text):
            while len(broken := self._break(text)) > len(text):
                text = broken
            if self._firsts.in_part_of(text[-self._longest :]) and any(
                text[-size:] in self._heads for size in self._sizes(text)
            ):
                text += BREAK
        if self._lasts.in_part_of(text[: self._longest]) and any(
            text[:size] in self._tails for size in self._sizes(text)
        ):
            text = BREAK + text
        return text

    def _sizes(self, text: str) -> range:
        return range(1, min(self._longest, len(text) + 1))


class _Characters:
    """Whether a text has any of some characters."""

    def __init__(self, characters: Iterable[str]) -> None:
        self._all = frozenset(characters)
        self._few = tuple(self._all) if len(self._all) <= FEW else ()

    def in_part_of(self, text: str) -> bool:
        """Of a short text."""
        for character in self._few:
            if character in text:
                return True
        return not self._few and not self._all.isdisjoint(text)

    def in_all_of(self, text: str) -> bool:
        """Of a text of any length; true also where a pattern has to look."""
        return not self._few or self.in_part_of(text)


def without_sentinels(text: str) -> str:
    return text if text.isascii() else text.replace(BREAK, "").replace(END, "")


def guard_values(value: Any, guard: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, list):
        return [guard_values(item, guard) for item in value]
    if isinstance(value, dict):
        return {guard(key): guard_values(item, guard) for key, item in value.items()}
    return value

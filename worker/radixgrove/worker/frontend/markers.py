"""Markers of a format that are single tokens of a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Collection

from tokenizers import AddedToken, Tokenizer

from radixgrove.protocol.formats.shapes import Format

# Noncharacters of Unicode, which no text may have in interchange, one for each marker. (The first
# two of them are sentinels of prompts.)
_FIRST, _LAST = 0xFDD2, 0xFDEF
_PRIVATE = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]")


def _stands_apart(token: AddedToken) -> bool:
    return bool(token.special or (token.content.startswith("<") and token.content.endswith(">")))


class Markers:
    """Inside a parser such a marker is one private character, which no text has.

    A marker's text that the model writes without its token is text. Added tokens that are neither
    special nor in angle brackets are text like any other: grammars see them so, too.
    """

    def __init__(self, form: Format, tokenizer: Tokenizer, special_ids: Collection[int]) -> None:
        added = tokenizer.get_added_tokens_decoder()
        ids = {token.content: number for number, token in added.items() if _stands_apart(token)}
        known = [text for text in form.all_markers if text in ids][: _LAST - _FIRST + 1]
        self.ids = {text: ids[text] for text in known}
        self.chars = {ids[text]: chr(_FIRST + place) for place, text in enumerate(known)}
        self._inner = {text: self.chars[ids[text]] for text in known}
        self._outer = {char: text for text, char in self._inner.items()}
        self._hidden = {
            char: "" if ids[text] in special_ids else text for text, char in self._inner.items()
        }
        texts = sorted(map(re.escape, known), key=len, reverse=True)
        self._finder = re.compile("|".join(texts)) if texts else None
        self._tokenizer = tokenizer

    def tokens(self, text: str) -> tuple[int, ...]:
        """Of a text of the format that begins with a marker, without blanks around it; else ()."""
        text = text.strip()
        if text in self.ids:
            return (self.ids[text],)
        if self.first(text) is None:
            return ()
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def first(self, text: str) -> int | None:
        """The token with which a text of the format begins, if that is a marker."""
        return next((token for marker, token in self.ids.items() if text.startswith(marker)), None)

    @staticmethod
    def clean(text: str) -> str:
        """Text of the model without private characters of its own."""
        return text if text.isascii() else _PRIVATE.sub("\ufffd", text)

    def inner(self, text: str) -> str:
        """A text of the format as the parser sees it."""
        if self._finder is None:
            return text
        return self._finder.sub(lambda found: self._inner[found[0]], text)

    def trimmed(self, text: str) -> str:
        """As `inner`, without the blanks around it."""
        return self.inner(text.strip())

    def outer(self, text: str, *, hide_special: bool = False) -> str:
        """What the parser saw as a client sees it."""
        if text.isascii():
            return text
        shown = self._hidden if hide_special else self._outer
        return _PRIVATE.sub(lambda found: shown.get(found[0], ""), text)

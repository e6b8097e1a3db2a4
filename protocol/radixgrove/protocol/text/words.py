"""Ids of words, remembered: most words of a new text were in one before.

`tokenizers` cuts a text into words by a pattern and merges each word on its own: a text's ids are
those of its words, one after another. Where the text is ASCII, and the pattern one of those that
most models have, it is cut here, and the library is asked for each word once.
"""

from __future__ import annotations

import re
from array import array
from typing import Any

import msgspec
from tokenizers import Tokenizer

MAX_WORDS = 1 << 15
MAX_WORD_CHARS = 32
MOST_AT_ONCE = 32  # words that one text adds: of more, the library is faster with the whole text

BYTE_LEVEL = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


def _in_ascii(pattern: str) -> re.Pattern[str]:
    """Python's `re` has no Unicode classes; in ASCII these are what they stand for."""
    pattern = pattern.replace(r"\p{L}\p{N}]", "A-Za-z0-9]")
    return re.compile(pattern.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]"), re.ASCII)


# Only what is known: a pattern of unknown origin might take for ever.
_PATTERNS = {pattern: _in_ascii(pattern) for pattern in (BYTE_LEVEL, LLAMA_3, QWEN_2)}


class _Model(msgspec.Struct):
    type: str
    dropout: float | None = None


class _Spec(msgspec.Struct):
    """What decides how a tokenizer cuts, of its `tokenizer.json`."""

    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    truncation: Any = None
    padding: Any = None


class WordIds:
    """Ids of one tokenizer's words; for any thread."""

    def __init__(self, tokenizer: Tokenizer, pattern: re.Pattern[str]) -> None:
        self._tokenizer = tokenizer
        self._pattern = pattern
        self._known: dict[str, bytes] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordIds | None:
        """None where the tokenizer cuts in a way that is not known here."""
        spec = msgspec.json.decode(tokenizer.to_str(), type=_Spec)
        plain = spec.normalizer is None or spec.normalizer["type"] == "NFC"  # ASCII stays as it is
        merges = spec.model.type == "BPE" and not spec.model.dropout
        if not (plain and merges) or spec.truncation is not None or spec.padding is not None:
            return None
        pattern = _PATTERNS.get(_pattern_of(spec.pre_tokenizer or {}))
        return cls(tokenizer, pattern) if pattern is not None else None

    def encode(self, text: str) -> bytes | None:
        """int32 little-endian; None: the library has to be asked.

        Args:
            text: without any added token.
        """
        if not text.isascii():
            return None
        words = self._pattern.findall(text)
        known = self._known
        try:
            return b"".join([known[word] for word in words])
        except KeyError:
            return self._learned(known, words)

    def _learned(self, known: dict[str, bytes], words: list[str]) -> bytes | None:
        """The same, with words that are not known yet."""
        new = list({word for word in words if word not in known})
        if any(len(word) > MAX_WORD_CHARS for word in new):
            return None
        if len(known) + MOST_AT_ONCE > MAX_WORDS:
            self._known = {}
            return None
        few = new[:MOST_AT_ONCE]
        found = self._tokenizer.encode_batch_fast(few, add_special_tokens=False)
        known.update(
            (word, array("i", encoding.ids).tobytes())
            for word, encoding in zip(few, found, strict=True)
        )
        if len(few) < len(new):
            return None
        return b"".join([known[word] for word in words])


def _pattern_of(pre_tokenizer: dict[str, Any]) -> str:
    """By which a text is cut into words; empty where it is not just a pattern."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, **more}:
            return BYTE_LEVEL if more.get("use_regex", True) else ""
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return str(pattern)
    return ""

"""The bytes that each token of a vocabulary stands for by itself."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from tokenizers import Tokenizer

BYTE_LEVEL = "ByteLevel"
_BLANK = "▁"  # SentencePiece's mark of a blank
_BYTE_PIECE = re.compile(r"^<0x([0-9A-F]{2})>$")


class _Spec(msgspec.Struct):
    """What is read of a `tokenizer.json`."""

    decoder: dict[str, Any] | None = None


def byte_characters() -> list[str]:
    """GPT-2's character for each byte: printable ones are themselves, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_BYTES = {character: byte for byte, character in enumerate(byte_characters())}


class TokenBytes:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None) -> None:
        """
        Args:
            decoder: the tokenizer's, as `decoder_of` finds it.
        """
        self._tokenizer = tokenizer
        self._special = frozenset(
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._kinds = [step["type"] for step in steps_of(decoder, "decoder")]
        self._marks_blanks = _BLANK in str(decoder)

    def table(self, size: int = 0) -> list[bytes] | None:
        """The bytes of each id, where the vocabulary is one of bytes and a text is no more than its
        tokens' bytes, one after another; None elsewhere.

        Args:
            size: ids below it are the model's, whether the tokenizer knows them or not.
        """
        if self._kinds != [BYTE_LEVEL]:
            return None
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        found = [b""] * max(max(vocabulary.values(), default=-1) + 1, size)
        for piece, number in vocabulary.items():
            found[number] = _from_characters(piece)
        return found

    def of(self, token_id: int) -> bytes:
        """The bytes of one token; none where no token has this id."""
        piece: str = self._tokenizer.id_to_token(token_id) or ""
        if BYTE_LEVEL in self._kinds:
            return _from_characters(piece)
        if self._marks_blanks and token_id not in self._special:
            byte = _BYTE_PIECE.match(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_BLANK, " ").encode()
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()


def steps_of(part: dict[str, Any] | None, kind: str) -> list[dict[str, Any]]:
    """What a part of a `tokenizer.json` does, in order; sequences are unfolded.

    Args:
        kind: "decoder", "normalizer" or "pretokenizer".
    """
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part[f"{kind}s"] for step in steps_of(inner, kind)]


def decoder_of(tokenizer_json: str) -> dict[str, Any] | None:
    """The decoder of a tokenizer that `tokenizers` has written."""
    return msgspec.json.decode(tokenizer_json, type=_Spec).decoder


def _from_characters(piece: str) -> bytes:
    """A byte-level token's bytes; with a character that is none's it is an added one: its text."""
    known = [_BYTES[character] for character in piece if character in _BYTES]
    return bytes(known) if len(known) == len(piece) else piece.encode()

"""The bytes that each token of a vocabulary stands for by itself."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from tokenizers import Tokenizer

BYTE_LEVEL = "ByteLevel"
_BLANK = "▁"  # SentencePiece's mark of a blank
_BYTE_PIECE = re.compile(r"^<0x([0-9A-F]{2})>$")


class TokenBytes:
    """Of one tokenizer.

    Attributes:
        table: the bytes of each id, where the vocabulary is one of bytes and a text is no more than
            its tokens' bytes, one after another; None elsewhere.
    """

    def __init__(self, tokenizer: Tokenizer, size: int = 0) -> None:
        """
        Args:
            size: ids below it are the model's, whether the tokenizer knows them or not.
        """
        self._tokenizer = tokenizer
        self._special = frozenset(
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        decoder = msgspec.json.decode(tokenizer.to_str()).get("decoder")
        kinds = [step["type"] for step in decoder_steps(decoder)]
        self._bytes = _byte_table(tokenizer, size) if BYTE_LEVEL in kinds else None
        self._marks_blanks = _BLANK in str(decoder)
        self.table = self._bytes if kinds == [BYTE_LEVEL] else None

    def of(self, token_id: int) -> bytes:
        """The bytes of one token; none where no token has this id."""
        if self._bytes is not None:
            return self._bytes[token_id] if token_id < len(self._bytes) else b""
        piece = self._tokenizer.id_to_token(token_id) or ""
        if self._marks_blanks and token_id not in self._special:
            byte = _BYTE_PIECE.match(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_BLANK, " ").encode()
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()


def decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """What a `tokenizer.json`'s decoder does, in order; sequences are unfolded."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in decoder_steps(inner)]


def byte_characters() -> list[str]:
    """GPT-2's character for each byte: printable ones are themselves, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _byte_table(tokenizer: Tokenizer, size: int) -> list[bytes]:
    """Bytes of every id of a byte-level vocabulary.

    Those of ids that are no token's are empty; at least `size` ids.
    """
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * max(max(vocabulary.values(), default=-1) + 1, size)
    for text, number in vocabulary.items():
        mapped = [byte_of.get(character) for character in text]
        known = [byte for byte in mapped if byte is not None]
        # A token with a character outside the mapping is an added one: its own text.
        table[number] = bytes(known) if len(known) == len(text) else text.encode()
    return table

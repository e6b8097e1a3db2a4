"""Tokenizers for tests of grammars: a token a character, and a few of several."""

from __future__ import annotations

from functools import cache

from llguidance import LLTokenizer, TokenizerWrapper

EOS = 0
WORDS = ('{"', '":', '",', "}}", "true", "    ")
TEXTS = ["<eos>", *(chr(code) for code in (*range(0x20, 0x7F), 0x0A, 0x09)), *WORDS]


class _Characters:
    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)

    def __init__(self) -> None:
        self.tokens = [text.encode() for text in TEXTS]

    def __call__(self, text: bytes) -> list[int]:
        return encode(text.decode())


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Characters()))


def encode(text: str) -> list[int]:
    """A token a character."""
    return [TEXTS.index(character) for character in text]


def decode(tokens: list[int]) -> str:
    return "".join(TEXTS[token] for token in tokens if token != EOS)


class _Bytes:
    """A token a byte, its number the byte's; one more ends an answer."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self) -> None:
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))

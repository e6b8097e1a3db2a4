"""Whatever form a tokenizer has, a matcher knows its tokens as the bytes that they decode to."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from radixgrove.protocol.constraints import grammar
from radixgrove.protocol.constraints.constraint import ConstraintError, json_schema
from radixgrove.protocol.constraints.grammar import (
    build_matcher,
    compile_constraint,
    load_tokenizer,
)
from radixgrove.protocol.token_bytes import TokenBytes, byte_characters, decoder_of

LLAMA_2 = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
# As transformers writes them, of checkpoints and of GGUF files.
BYTE_LEVEL = {
    "plain": decoders.ByteLevel(),
    "in a sequence": decoders.Sequence([decoders.ByteLevel()]),
    "behind what has nothing to do": decoders.Sequence(
        [
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Replace("▁", " "),
            decoders.ByteLevel(),
        ]
    ),
    "before": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
}


def of_bytes(decoder: Any) -> Tokenizer:
    """A token a byte, and `\\n\\n`."""
    characters = byte_characters()
    line = characters[ord("\n")]
    vocabulary = {text: byte for byte, text in enumerate(characters)} | {line + line: 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(line, line)], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<eos>", normalized=False)])
    return tokenizer


def of_pieces() -> Tokenizer:
    """SentencePiece's kind: characters, bytes as `<0x0A>`, and blanks as `▁`."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [chr(code) for code in range(0x21, 0x7F)]
    vocabulary = {text: number for number, text in enumerate([*pieces, "▁"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(LLAMA_2)
    tokenizer.add_special_tokens([AddedToken("<eos>", normalized=False)])
    return tokenizer


def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    return TokenBytes(tokenizer, decoder_of(tokenizer.to_str()))


TOKENIZERS = {name: lambda d=decoder: of_bytes(d) for name, decoder in BYTE_LEVEL.items()}
TOKENIZERS["pieces"] = of_pieces


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_json_string_has_no_line_end(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    known = load_tokenizer(tokenizer, tokenizer.get_vocab_size(), [tokenizer.token_to_id("<eos>")])
    compiled = compile_constraint(json_schema(b'{"type":"string"}', "p"), known, 8)
    matcher = build_matcher(compiled.grammar, known)
    begun = tokenizer.encode('"a', add_special_tokens=False).ids
    assert matcher.consume_tokens(begun)
    tokens = token_bytes(tokenizer)
    forbidden = [number for number in range(tokenizer.get_vocab_size()) if tokens.of(number) < b" "]
    allowed = [number for number in forbidden if matcher.validate_tokens([number])]
    assert forbidden
    assert tokens.of(begun[-1]) == b"a"
    assert allowed == []


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokens_are_the_bytes_of_what_they_decode_to(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    tokens = token_bytes(tokenizer)
    for text in ("a b\n\nc", "né", "\t字"):
        ids = tokenizer.encode(text.replace(" ", "▁" if kind == "pieces" else " ")).ids
        assert b"".join(map(tokens.of, ids)).decode() == text


def test_a_table_is_there_for_plain_bytes_alone() -> None:
    tables = {kind: token_bytes(make()).table() is not None for kind, make in TOKENIZERS.items()}
    assert tables == {kind: kind in ("plain", "in a sequence") for kind in TOKENIZERS}


def test_a_tokenizer_seen_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_with_plain_decoder", lambda text, decoder: text)
    with pytest.raises(ConstraintError, match="tokenizer does not support it"):
        load_tokenizer(of_bytes(BYTE_LEVEL["behind what has nothing to do"]), 258, [257])

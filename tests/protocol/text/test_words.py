"""Ids of remembered words are those of the library, whatever the text and its order."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from radixgrove.protocol.text import words
from radixgrove.protocol.text.tokenizer import TOKENIZER_JSON, TokenizerFiles
from radixgrove.protocol.text.words import LLAMA_3, QWEN_2, WordIds
from tests.conftest import examples

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["hello", " world", "  ", "\n", "\r\n\r\n", "I'LL", "don't", "x_1", " 1234"]
        ),
        st.text(st.characters(max_codepoint=127), max_size=6),
        st.text("é٣ \u00a0\u2028字", max_size=2),
    ),
    max_size=12,
).map("".join)


def split(pattern: str) -> dict[str, Any]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [part, {**level, "use_regex": False}]}


def tokenizer_of(model: Path, **parts: Any) -> Tokenizer:
    """The demo model's, with other parts."""
    spec = json.loads(TokenizerFiles.load(model).contents[TOKENIZER_JSON])
    return Tokenizer.from_str(json.dumps(spec | parts))


@pytest.fixture(scope="module", params=[None, LLAMA_3, QWEN_2])
def tokenizer(request: pytest.FixtureRequest, demo_model_dir: Path) -> Tokenizer:
    if request.param is None:
        return tokenizer_of(demo_model_dir)
    return tokenizer_of(
        demo_model_dir, pre_tokenizer=split(request.param), normalizer={"type": "NFC"}
    )


@pytest.fixture(scope="module")
def by_words(tokenizer: Tokenizer) -> WordIds:
    found = WordIds.of(tokenizer)
    assert found is not None
    return found


@examples(300)
@given(text=TEXTS)
def test_ids_are_the_librarys(tokenizer: Tokenizer, by_words: WordIds, text: str) -> None:
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    for _ in range(2):  # with new words, and with known ones
        found = by_words.encode(text)
        assert found is None or array("i", found).tolist() == expected


def test_known_words_need_no_library(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    by_words = WordIds.of(tokenizer)
    assert by_words is not None
    assert by_words.encode("The quick fox, and the dog.\n") is not None
    expected = tokenizer.encode("The dog, and the quick fox.\n", add_special_tokens=False).ids
    monkeypatch.setattr(by_words, "_tokenizer", None)
    assert array("i", by_words.encode("The dog, and the quick fox.\n") or b"").tolist() == expected


def test_what_is_remembered_is_bounded(
    demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "MAX_WORDS", 100)
    by_words = WordIds.of(tokenizer_of(demo_model_dir))
    assert by_words is not None
    for number in range(300):
        by_words.encode(f"word{'x' * (number % 50)} {number} of many")
        assert len(by_words._known) <= 100
    assert all(len(word) <= words.MAX_WORD_CHARS for word in by_words._known)
    assert by_words.encode(" ".join(f"{chr(97 + i % 26)}{'y' * i}" for i in range(60))) is None


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
        {"pre_tokenizer": split(r"\p{L}+|\s+")},
        {"pre_tokenizer": None},
    ],
)
def test_other_tokenizers_are_left_to_the_library(
    demo_model_dir: Path, parts: dict[str, Any]
) -> None:
    assert WordIds.of(tokenizer_of(demo_model_dir, **parts)) is None

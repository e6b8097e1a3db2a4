"""Detokenizing piece by piece equals decoding at once; stop strings never show."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol.openai.formats import token_text
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.worker.frontend.detokenize import Detokenizer, StopMatcher, Vocabulary
from tests.conftest import examples
from tests.protocol.text.tokenizers_of_tests import llama_like


@pytest.fixture(scope="module")
def demo(demo_model_dir: Path) -> Vocabulary:
    return Vocabulary(TokenizerFiles.load(demo_model_dir).tokenizer())


@pytest.fixture(scope="module")
def llama() -> Vocabulary:
    return Vocabulary(llama_like().tokenizer())


def one_by_one(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([number]) for number in ids), detokenizer.finish()]


@examples(300)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300)), skip=st.booleans())
def test_any_ids_of_a_byte_level_vocabulary(demo: Vocabulary, ids: list[int], skip: bool) -> None:
    expected = demo.tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(one_by_one(demo.detokenizer(skip), ids)) == expected
    whole = demo.detokenizer(skip)
    assert whole.push(ids) + whole.finish() == expected


texts = st.text(
    st.sampled_from("ab é🌶ภาษา\n") | st.characters(codec="utf-8", exclude_characters="▁"),
    max_size=20,
)


@examples(200)
@given(text=texts)
def test_no_piece_has_half_a_character(demo: Vocabulary, text: str) -> None:
    ids = demo.tokenizer.encode(text, add_special_tokens=False).ids
    pieces = one_by_one(demo.detokenizer(skip_special_tokens=False), ids)
    whole = demo.tokenizer.decode(ids)  # the vocabulary lacks a few bytes of rare characters
    assert "".join(pieces) == whole
    assert any("�" in piece for piece in pieces) == ("�" in whole)


@examples(200)
@given(text=texts)
def test_vocabularies_with_byte_fallback(llama: Vocabulary, text: str) -> None:
    ids = llama.tokenizer.encode(text, add_special_tokens=False).ids
    pieces = one_by_one(llama.detokenizer(skip_special_tokens=False), ids)
    assert "".join(pieces) == llama.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_continued_text_keeps_its_first_blank(llama: Vocabulary) -> None:
    prompt = llama.tokenizer.encode("Hello").ids
    ids = llama.tokenizer.encode("Hello world", add_special_tokens=False).ids[1:]
    assert "".join(one_by_one(llama.detokenizer(True, prompt), ids)) == " world"


def test_half_a_character_in_the_prompt_is_not_shown(llama: Vocabulary) -> None:
    prompt = llama.tokenizer.encode("Hello 🌶").ids[:-1]
    ids = llama.tokenizer.encode("world", add_special_tokens=False).ids
    text = "".join(one_by_one(llama.detokenizer(True, prompt), ids))
    assert text.strip() == "world"


def test_broken_bytes_do_not_hold_the_text_back_for_ever(llama: Vocabulary) -> None:
    byte = llama.tokenizer.token_to_id("<0xFF>")
    detokenizer = llama.detokenizer(True)
    assert any(detokenizer.push([byte]) for _ in range(20))


def test_special_tokens_are_skipped_on_request(demo: Vocabulary) -> None:
    ids = demo.tokenizer.encode("a<|im_end|>b").ids
    assert "".join(one_by_one(demo.detokenizer(True), ids)) == "ab"
    assert "".join(one_by_one(demo.detokenizer(False), ids)) == "a<|im_end|>b"


def reference_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@examples(500)
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(1, 5), min_size=1),
    include=st.booleans(),
)
def test_stop_strings_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include)
    shown = ""
    position = index = 0
    while position < len(text) and matcher.matched is None:
        size = cuts[index % len(cuts)]
        shown += matcher.push(text[position : position + size])
        assert text.startswith(shown)
        for stop in stops:
            if not include:
                assert stop not in shown
        position, index = position + size, index + 1
    if matcher.matched is None:
        shown += matcher.finish()
    assert (shown, matcher.matched) == reference_stop(text, stops, include)


def test_only_what_may_become_a_stop_is_withheld() -> None:
    matcher = StopMatcher(["fox jumps"])
    assert matcher.push("the quick fo") == "the quick "
    assert matcher.push("g") == "fog"


@examples(200)
@given(text=texts)
def test_bytes_of_tokens_are_the_texts(demo: Vocabulary, llama: Vocabulary, text: str) -> None:
    ids = llama.tokenizer.encode(text, add_special_tokens=False).ids
    whole = b"".join(map(llama.token_bytes, ids))
    assert whole.decode().replace(" ", "") == text.replace(" ", "")  # the first word gains a blank
    ids = demo.tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(map(demo.token_bytes, ids)).decode("utf-8", "replace") == demo.tokenizer.decode(
        ids
    )


def test_half_a_character_is_shown_by_its_bytes(demo: Vocabulary, llama: Vocabulary) -> None:
    for vocabulary in (demo, llama):
        ids = vocabulary.tokenizer.encode("🌶", add_special_tokens=False).ids
        assert len(ids) > 1
        shown = "".join(token_text(vocabulary.token_bytes(number)) for number in ids)
        assert shown.replace(" ", "") == "\\xf0\\x9f\\x8c\\xb6"
    assert demo.token_bytes(demo.tokenizer.token_to_id("Hello")) == b"Hello"
    assert llama.token_bytes(llama.tokenizer.token_to_id("▁Hello")) == b" Hello"


@pytest.mark.parametrize("files", ["byte-level", "sentencepiece"])
def test_ids_beyond_the_tokenizers_read_as_empty_text(files: str, demo_model_dir: Path) -> None:
    source = TokenizerFiles.load(demo_model_dir) if files == "byte-level" else llama_like()
    vocabulary = Vocabulary(source.tokenizer(), source.size + 100)
    beyond = source.size + 99
    assert vocabulary.token_bytes(beyond) == b""
    for skip in (True, False):
        detokenizer = vocabulary.detokenizer(skip)
        assert detokenizer.push([beyond, beyond]) + detokenizer.finish() == ""
    assert source.tokenizer().decode([beyond], skip_special_tokens=False) == ""

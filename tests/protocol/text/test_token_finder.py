"""Finding tokens: what the plain pattern finds, in time that adversarial texts do not stretch."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol.text import token_finder
from radixgrove.protocol.text.token_finder import TokenFinder
from tests.conftest import examples

TEXTS = st.lists(st.text("ab<|", min_size=1, max_size=6), min_size=1, max_size=12)


def found(finder: TokenFinder, text: str) -> list[tuple[int, str]]:
    return [(match.start(), match[0]) for match in finder.find(text)]


@examples(300)
@given(TEXTS, st.text("ab<|x", max_size=60), st.integers(1, 70))
def test_the_leftmost_and_longest(texts: list[str], text: str, window: int) -> None:
    plain = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
    expected = [(match.start(), match[0]) for match in plain.finditer(text)]
    before = token_finder._WINDOW
    token_finder._WINDOW = window
    try:
        assert found(TokenFinder(texts), text) == expected
    finally:
        token_finder._WINDOW = before


def test_tokens_that_begin_alike_many_times_over() -> None:
    runs = ["a" * length for length in range(1, 200)]
    finder = TokenFinder(runs)
    assert finder.longest == 199
    assert found(finder, "x" + "a" * 250) == [(1, "a" * 199), (200, "a" * 51)]


def test_no_tokens() -> None:
    assert found(TokenFinder([]), "text") == []


def test_a_search_tries_what_can_match_alone() -> None:
    """Of thousands of tokens that begin alike the pattern has their beginning once."""
    finder = TokenFinder(f"<|reserved_special_token_{number}|>" for number in range(6253))
    assert finder._pattern is not None
    assert finder._pattern.pattern.count("reserved") == 1
    assert found(finder, "<|" * 1000 + "<|reserved_special_token_77|>") == [
        (2000, "<|reserved_special_token_77|>")
    ]

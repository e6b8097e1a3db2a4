"""A grammar's lexers: as many as its sequences need, and each used by as many as the others."""

from __future__ import annotations

import gc
import re
from collections import Counter
from concurrent.futures import Future

import pytest
from llguidance import LLMatcher, LLTokenizer

from radixgrove.protocol.constraints.constraint import ConstraintError
from radixgrove.protocol.constraints.grammar import build_matcher
from radixgrove.worker.messages import TokenRules
from radixgrove.worker.scheduler import grammars as building
from radixgrove.worker.scheduler.matchers import Grammar
from radixgrove.worker.scheduler.rules import SequenceRules
from tests.conftest import wait_until
from tests.grammars import EOS, decode, encode, tokenizer
from tests.worker.scheduler.harness import request
from tests.worker.scheduler.test_rules import harness, rules_of, run_all


class Builds:
    """Matchers that are built when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Future[LLMatcher]] = []

    def __call__(self) -> Future[LLMatcher]:
        self.begun.append(Future())
        return self.begun[-1]


def digits() -> LLMatcher:
    return build_matcher(rules_of("[0-9]{20}").grammar or "", tokenizer())


def expected(grammar: Grammar, count: int) -> list[SequenceRules]:
    sequences = [SequenceRules(TokenRules(), grammar) for _ in range(count)]
    for sequence in sequences:
        grammar.expect(sequence)
    return sequences


def users(sequences: list[SequenceRules]) -> list[int]:
    """How many of those that have begun share each lexer."""
    return sorted(Counter(s.lexer_number for s in sequences if s.matcher is not None).values())


def test_there_is_one_lexer_more_for_every_eight_sequences_up_to_the_most() -> None:
    builds = Builds()
    grammar = Grammar(digits(), builds, most_lexers=3)
    sequences = []
    for count, lexers in ((8, 1), (1, 2), (8, 3), (40, 3)):
        sequences += expected(grammar, count)
        assert (grammar.lexers, len(builds.begun)) == (lexers, lexers - 1)


def test_sequences_begin_with_the_lexer_that_the_fewest_use() -> None:
    builds = Builds()
    grammar = Grammar(digits(), builds, most_lexers=2)
    sequences = expected(grammar, 20)
    for sequence in sequences[:6]:
        sequence.begin()
    assert users(sequences) == [6]  # no other is there yet
    builds.begun[0].set_result(digits())
    for sequence in sequences[6:]:
        sequence.begin()
    assert users(sequences) == [10, 10]
    begun = {sequence.lexer_number for sequence in sequences[:6]}
    del sequences[:6], sequence
    gc.collect()
    sequences += expected(grammar, 6)
    for late in sequences[-6:]:
        late.begin()
    assert {late.lexer_number for late in sequences[-6:]} == begun


def test_a_lexer_that_cannot_be_built_is_done_without() -> None:
    builds = Builds()
    grammar = Grammar(digits(), builds, most_lexers=2)
    sequences = expected(grammar, 9)
    builds.begun[0].set_exception(ConstraintError("no memory"))
    for sequence in sequences:
        sequence.begin()
    assert users(sequences) == [9]


def test_matchers_of_other_lexers_allow_the_same() -> None:
    builds = Builds()
    grammar = Grammar(digits(), builds, most_lexers=2)
    sequences = expected(grammar, 9)
    builds.begun[0].set_result(digits())
    for sequence in sequences:
        sequence.consume(encode("123"))
    assert users(sequences) == [4, 5]
    masks = {bytes(matcher.compute_bitmask()) for s in sequences if (matcher := s.matcher)}
    assert len(masks) == 1


def test_answers_of_many_sequences_obey_with_several_lexers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[str] = []

    def build(text: str, known: LLTokenizer) -> LLMatcher:
        built.append(text)
        return build_matcher(text, known)

    monkeypatch.setattr(building, "build_matcher", build)
    run = harness(grammar_threads=3)
    for i in range(30):
        rules = rules_of("[0-9]{12}")
        run.submit(request(f"r{i}", encode(f"say {i}"), 40, stop=(EOS,), rules=rules))
    run_all(run)
    assert all(re.fullmatch("[0-9]{12}", decode(run.tokens[f"r{i}"])) for i in range(30))
    wait_until(lambda: len(built) == 3, what="the lexers")

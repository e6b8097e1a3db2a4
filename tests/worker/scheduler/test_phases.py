"""Grammars that hold in a part of the answer: behind reasoning, or behind what begins a call."""

from __future__ import annotations

import re
from typing import Any

import pytest

from radixgrove.worker.messages import Finish, ReasoningRule, TokenRules, Tokens
from tests.grammars import EOS, encode
from tests.worker.scheduler.harness import Harness, request
from tests.worker.scheduler.test_rules import answer, harness, rules_left, rules_of, run_all

(END,), (BEGIN,), (TRIGGER,) = encode("#"), encode("~"), encode("T")
NUMBER = "[0-9]{5}"
# Few tokens, so that markers come soon.
FEW = tuple(encode("#~Tabc0123456789!"))


def answers(rules: TokenRules, count: int = 24, depth: int = 2, **changes: Any) -> Harness:
    run = harness(depth, **changes)
    for i in range(count):
        run.submit(request(f"r{i}", encode(f"say {i}"), 60, stop=(EOS,), rules=rules))
    run_all(run)
    return run


def reasoning(**fields: Any) -> TokenRules:
    rules = rules_of(NUMBER)
    rules.reasoning = ReasoningRule(end=END, banned=(EOS,), **fields)
    return rules


def texts(run: Harness) -> list[str]:
    return [answer(run, name) for name in run.tokens]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grammar_begins_behind_reasoning(depth: int) -> None:
    rules = reasoning(open=True)
    rules.allowed = (*FEW, EOS)
    run = answers(rules, depth=depth)
    for name, text in zip(run.tokens, texts(run), strict=True):
        if run.ended[name].finish is Finish.STOP:  # type: ignore[union-attr]
            assert re.fullmatch(rf"[^#]*#{NUMBER}", text)
        else:  # cut within the block, which no stop token ended
            assert "#" not in text or len(text) == 60
    assert any(text.index("#") > 5 for text in texts(run) if "#" in text)
    assert rules_left(run) == 0


def test_reasoning_is_ended_at_its_budget() -> None:
    rules = reasoning(open=True, budget=7)
    rules.allowed = (*FEW, EOS)
    lengths = set()
    for text in texts(answers(rules)):
        assert re.fullmatch(rf"[^#]{{0,7}}#{NUMBER}", text)
        lengths.add(text.index("#"))
    assert max(lengths) == 7
    for text in texts(answers(reasoning(open=True, budget=0), count=3)):
        assert re.fullmatch(rf"#{NUMBER}", text)


def test_the_end_of_reasoning_may_be_several_tokens() -> None:
    rules = reasoning(open=True, budget=7, tail=tuple(encode("!a")))
    rules.allowed = (*FEW, EOS)
    found = texts(answers(rules))
    assert all(re.fullmatch(rf"[^#]{{0,7}}#!a{NUMBER}", text) for text in found)
    assert len({text.index("#") for text in found}) > 1


def test_a_budget_needs_no_grammar() -> None:
    rules = TokenRules(reasoning=ReasoningRule(end=END, open=True, budget=3))
    run = answers(rules)
    assert all(END in tokens[:4] for tokens in run.tokens.values())


def test_reasoning_may_begin_behind_white_space_where_no_grammar_holds() -> None:
    rules = TokenRules(
        reasoning=ReasoningRule(begin=BEGIN, end=END, budget=3),
        allowed=(*FEW, *encode(" ")),
    )
    blocks = 0
    for text in texts(answers(rules)):
        for block in text.split("~")[1:-1]:
            assert "#" in block[:4] or len(block) < 4
            blocks += 1
    assert blocks


def test_an_output_may_begin_with_reasoning() -> None:
    rules = reasoning(begin=BEGIN, budget=4)
    rules.allowed = (*FEW, EOS)
    found = texts(answers(rules, count=60))
    assert all(re.fullmatch(rf"(~[^#]{{0,4}}#)?{NUMBER}", text) for text in found)
    assert len({text[0] == "~" for text in found}) == 2


def test_text_is_free_up_to_a_trigger_and_behind_the_call() -> None:
    rules = rules_of("[0-3]{3}!")
    rules.triggers, rules.again, rules.allowed = (TRIGGER,), True, FEW
    found = texts(answers(rules))
    assert all(len(text) == 60 for text in found)
    calls = 0
    for text in found:
        for call in text.split("T")[1:-1]:
            assert re.match("[0-3]{3}!", call)
            calls += 1
    assert calls > len(found)


def test_an_answer_ends_behind_its_only_call() -> None:
    rules = rules_of("[0-3]{3}!")
    rules.triggers, rules.allowed = (TRIGGER,), FEW
    run = answers(rules)
    for name, text in zip(run.tokens, texts(run), strict=True):
        end = run.ended[name]
        assert isinstance(end, Tokens)
        if end.finish is Finish.STOP:
            assert re.fullmatch("[^T]*T[0-3]{3}!", text)
        else:
            assert "T" not in text[:-4]


def test_a_call_within_reasoning_ends_it() -> None:
    rules = rules_of("[0-3]{3}!")
    rules.triggers, rules.allowed = (TRIGGER,), FEW
    rules.reasoning = ReasoningRule(end=END, open=True, calls=True)
    for text in texts(answers(rules)):
        _, found, call = text.partition("T")
        assert not found or re.fullmatch("[0-3]{3}!", call) or len(text) == 60


def test_free_rows_take_no_work_of_the_grammar() -> None:
    """Their masks are constants: the matcher is never asked."""
    rules = rules_of(NUMBER)
    rules.triggers, rules.allowed = (TRIGGER,), tuple(encode("abc"))
    run = harness()
    run.submit(request("r", encode("b"), 30, rules=rules))
    run_all(run)
    assert set(answer(run, "r")) <= set("abc")
    assert len(answer(run, "r")) == 30

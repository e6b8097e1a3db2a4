"""Requests with rules for their tokens: each answer obeys, whatever happens to its row."""

from __future__ import annotations

import gc
import json
import re
import threading
from collections import Counter
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from radixgrove.protocol.constraints import constraint, grammar
from radixgrove.protocol.constraints.constraint import ConstraintError, Form
from radixgrove.protocol.constraints.grammar import build_matcher, compile_constraint
from radixgrove.worker.messages import (
    CacheMode,
    Finish,
    ReasoningRule,
    RefusalReason,
    Refused,
    TokenRules,
    Tokens,
)
from radixgrove.worker.scheduler import grammars as building
from radixgrove.worker.scheduler.grammars import LoadTokenizer
from radixgrove.worker.scheduler.matchers import Grammar
from radixgrove.worker.scheduler.request import Request, RequestState
from radixgrove.worker.scheduler.rules import SequenceRules, fill_masks, mask_words
from tests.conftest import wait_until
from tests.grammars import EOS, TEXTS, decode, encode, tokenizer
from tests.worker.scheduler.harness import DEFAULTS, Harness, request
from tests.worker.scheduler.test_properties import check_empty

VOCAB = len(TEXTS)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "tags": {"type": "array", "items": {"enum": ["x", "yy"]}, "maxItems": 2},
        "deep": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 999}]},
    },
    "required": ["name", "deep"],
    "additionalProperties": False,
}


def harness(depth: int = 2, **changes: Any) -> Harness:
    return Harness(depth, vocab_size=VOCAB, **changes)


def rules_of(text: str | dict[str, Any], form: Form = Form.REGEX) -> TokenRules:
    if isinstance(text, dict):
        asked = constraint.json_schema(json.dumps(text).encode(), "p")
    else:
        asked = constraint.text_form(form, text, "p")
    return TokenRules(grammar=compile_constraint(asked, tokenizer(), 2).grammar)


def answer(run: Harness, name: str) -> str:
    return decode(run.tokens[name])


def wait_for_grammars(run: Harness) -> None:
    """Until none is being built; nothing is launched meanwhile."""
    grammars = run.scheduler.grammars
    builds = [*grammars._builds.values(), *grammars._renewals]
    wait_until(lambda: all(build.future.done() for build in builds), what="the grammars")


def wait_for_lexers(run: Harness) -> None:
    """Until all are there, of every grammar."""
    wait_for_grammars(run)
    kept = run.scheduler.grammars._kept.values()
    wait_until(lambda: all(f.done() for g in kept for f in g._coming), what="the lexers")


def run_all(run: Harness) -> None:
    wait_for_grammars(run)
    run.run()


def run_renewing(run: Harness) -> None:
    """As `run_all`, where requests may get matchers of their own."""
    while run.scheduler.has_work:
        wait_for_grammars(run)
        while run.step():
            pass


def rules_left(run: Harness) -> int:
    gc.collect()
    return run.stats().matchers


def load_once(ready: threading.Event) -> LoadTokenizer:
    """A tokenizer that takes as long to load as the test wants."""

    def load() -> LLTokenizer:
        assert ready.wait(60)
        return tokenizer()

    return load


# ---- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "changes"),
    [
        (1, {}),
        (2, {}),
        (3, {"micro_batches": 2}),
        (3, {"micro_batches": 2, "run_ahead": True}),
        (1, {"max_row_tokens": 3}),
    ],
)
def test_answers_obey_and_end_by_themselves(depth: int, changes: dict[str, Any]) -> None:
    run = harness(depth, **changes)
    for i in range(12):
        rules = rules_of(SCHEMA) if i % 3 else None
        run.submit(request(f"r{i}", encode(f"say {i}"), 100, stop=(EOS,), rules=rules))
    run_all(run)
    for i in range(12):
        if i % 3:
            jsonschema.validate(json.loads(answer(run, f"r{i}")), SCHEMA)
            assert run.ended[f"r{i}"].finish is Finish.STOP  # type: ignore[union-attr]
        else:
            assert run.tokens[f"r{i}"] == run.expected(f"r{i}")
    assert len({answer(run, f"r{i}") for i in range(12)}) == 12
    assert rules_left(run) == 0


def test_free_rows_of_a_step_have_no_masks() -> None:
    run = harness()
    run.submit(request("free", encode("a"), 40))
    run.submit(request("ruled", encode("b"), 40, rules=rules_of("[0-9]{20}")))
    run_all(run)
    assert run.tokens["free"] == run.expected("free")
    assert re.fullmatch("[0-9]{20}", answer(run, "ruled"))
    # One more may be masked, of the step that was under way when the answer ended.
    assert 20 <= run.executor.masked_rows <= 21


def test_an_answer_ends_where_its_grammar_does_without_a_stop_token() -> None:
    run = harness()
    run.submit(request("r", encode("b"), 40, rules=rules_of("yes|no")))
    run_all(run)
    assert answer(run, "r") in ("yes", "no")
    end = run.ended["r"]
    assert isinstance(end, Tokens)
    assert (end.finish, end.stop_token, end.token_ids) == (Finish.STOP, None, [])


def test_a_stop_token_ends_an_answer_where_its_grammar_lets_it() -> None:
    run = harness()
    run.submit(request("r", encode("b"), 60, stop=(EOS,), rules=rules_of("(ab)+")))
    run_all(run)
    assert re.fullmatch("(ab)+", answer(run, "r"))
    end = run.ended["r"]
    assert isinstance(end, Tokens)
    assert (end.finish, end.stop_token) == (Finish.STOP, EOS)


def test_a_cut_answer_is_cut_for_its_length() -> None:
    run = harness()
    run.submit(request("r", encode("b"), 7, stop=(EOS,), rules=rules_of("[0-9]{20}")))
    run_all(run)
    assert re.fullmatch("[0-9]{7}", answer(run, "r"))
    assert run.ended["r"].finish is Finish.LENGTH  # type: ignore[union-attr]


def test_only_allowed_tokens_come() -> None:
    run = harness()
    allowed = tuple(encode("xyz"))
    run.submit(request("r", encode("b"), 30, rules=TokenRules(allowed=allowed)))
    run.run()  # nothing to compile
    assert set(run.tokens["r"]) == set(allowed)


def test_banned_sequences_do_not_come() -> None:
    run = harness()
    rules = TokenRules(allowed=tuple(encode("abc")), banned=((*encode("aa"),), (*encode("bab"),)))
    run.submit(request("r", encode("q"), 60, rules=rules))
    run.run()
    assert len(run.tokens["r"]) == 60
    assert "aa" not in answer(run, "r")
    assert "bab" not in answer(run, "r")


def test_rules_apply_together() -> None:
    run = harness()
    both = rules_of("[0-9]{30}")
    both.allowed, both.banned = tuple(encode("789")), ((*encode("7"),),)
    run.submit(request("r", encode("q"), 60, rules=both))
    run_all(run)
    assert re.fullmatch("[89]{30}", answer(run, "r"))


def test_rules_that_leave_nothing_end_the_request_alone() -> None:
    run = harness()
    none = rules_of("[0-9]{30}")
    none.allowed = tuple(encode("abc"))
    run.submit(request("none", encode("q"), 60, rules=none))
    run.submit(request("free", encode("q"), 20))
    run_all(run)
    end = run.ended["none"]
    assert isinstance(end, Refused)
    assert end.reason is RefusalReason.GRAMMAR_FAILED
    assert run.tokens["free"] == run.expected("free")


# ---- what may happen to a row --------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_rows_go_on_where_their_grammar_was(depth: int) -> None:
    run = harness(depth, num_pages=36, max_model_len=120, watermark=0.0)
    run.scheduler._admission.estimator.share = 0.0  # believe in short answers
    for i in range(8):
        rules = rules_of("(<[0-9]{3}>){12}")
        run.submit(request(f"r{i}", encode(f"say {i}"), 100, stop=(EOS,), rules=rules))
    run_all(run)
    assert run.stats().preemptions > 0
    for i in range(8):
        assert re.fullmatch("(<[0-9]{3}>){12}", answer(run, f"r{i}"))
    assert rules_left(run) == 0


def test_aborted_requests_leave_no_matcher() -> None:
    run = harness()
    for i in range(6):
        run.submit(request(f"r{i}", encode("say"), 60, rules=rules_of("[0-9]{50}")))
    wait_for_grammars(run)
    for _ in range(5):
        run.step()
    assert rules_left(run) == 6
    for i in range(6):
        run.abort(f"r{i}")
    run.run()
    assert rules_left(run) == 0


@pytest.mark.parametrize("jump", [0, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_of_all_kinds_leaves_no_matcher_and_no_page(depth: int, jump: int) -> None:
    """Bound rows and free ones, some behind reasoning, while memory is short and clients leave."""
    draw = Random(depth)
    run = harness(depth, num_pages=36, max_model_len=120, watermark=0.0, grammar_jump=jump)
    run.scheduler._admission.estimator.share = 0.0  # believe in short answers
    forms = ["(<[0-9]{3}> or ){5}", "[a-c]{30}", "x|y"]
    asked: dict[str, str | None] = {}
    left = set()
    for number in range(60):
        name, form = f"r{number}", draw.choice([*forms, None])
        rules = None if form is None else rules_of(form)
        if rules is not None and draw.random() < 0.3:
            rules.reasoning = ReasoningRule(end=encode(">")[0], open=True, budget=draw.randrange(5))
        asked[name] = form if rules is None or rules.reasoning is None else None
        run.submit(request(name, encode(f"say {number}"), 60, stop=(EOS,), rules=rules))
        wait_for_grammars(run)
        for _ in range(draw.randrange(8)):
            run.step()
        if draw.random() < 0.3:
            gone = draw.choice(sorted(asked))
            left.add(gone)
            run.abort(gone)
    run_all(run)
    assert run.stats().preemptions > 0 or jump  # which ends answers sooner
    for name, form in asked.items():
        end = run.ended[name]
        if form is not None and name not in left:
            assert isinstance(end, Tokens)
            assert re.fullmatch(form, answer(run, name))
    check_empty(run)


def test_a_matcher_that_fails_ends_its_request_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(100)}}
    rules = rules_of({**many, "required": ["p50"], "additionalProperties": False})
    monkeypatch.setattr(
        grammar, "LIMITS", LLParserLimits(max_items_in_row=100, verbose_errors=False)
    )
    run = harness()
    run.submit(request("many", encode("say"), 60, rules=rules))
    run.submit(request("few", encode("say"), 60, rules=rules_of("[0-9]{50}")))
    run_all(run)
    end = run.ended["many"]
    assert isinstance(end, Refused)
    assert end.reason is RefusalReason.GRAMMAR_FAILED
    assert "items" in end.detail
    assert "state" not in end.detail
    assert re.fullmatch("[0-9]{50}", answer(run, "few"))
    assert rules_left(run) == 0


def bound_states(monkeypatch: pytest.MonkeyPatch, shared: int, alone: int | None = None) -> None:
    """Of lexers, and of those that one answer has for itself."""
    for name, states in (("LIMITS", shared), ("LONG_LIMITS", alone or shared)):
        few = LLParserLimits(max_lexer_states=states, verbose_errors=False)
        monkeypatch.setattr(grammar, name, few)


def test_a_lexer_that_failed_fails_no_later_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a matcher share it, and it stays failed."""
    rules = rules_of("[0-9]{50}")
    bound_states(monkeypatch, 30)
    run = harness()
    run.submit(request("first", encode("say"), 60, rules=rules))
    run_renewing(run)
    end = run.ended["first"]
    assert isinstance(end, Refused)
    assert (end.reason, "states" in end.detail) == (RefusalReason.GRAMMAR_FAILED, True)
    monkeypatch.undo()
    run.submit(request("later", encode("say"), 60, rules=rules))
    run_renewing(run)
    assert re.fullmatch("[0-9]{50}", answer(run, "later"))


ROWS = DEFAULTS.max_rows
BRANCHES = "|".join(f"{letter}[0-9]{{60}}, and so on, {letter}" for letter in "abcdefgh")


def renewals(run: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each request that gets a matcher of its own, at that moment."""
    seen: list[int] = []
    renew = run.scheduler.grammars.renew

    def see(request: Request) -> None:
        seen.append(len(request.output))
        renew(request)

    monkeypatch.setattr(run.scheduler.grammars, "renew", see)
    return seen


@pytest.mark.parametrize(
    ("depth", "changes"),
    [
        (1, {}),
        (2, {}),
        (3, {"micro_batches": 2, "run_ahead": True}),
        (2, {"grammar_jump": 2}),
        (2, {"max_row_tokens": 3}),
    ],
)
def test_answers_go_on_where_their_lexer_has_met_too_much(
    depth: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shared, and keeps what it met: of 8 branches with some 80 states each it has room for
    two. A matcher built anew follows the answer so far; none goes on with what has failed, which
    leaves out tokens."""
    rules = [rules_of(text) for text in (BRANCHES, FORCED)]
    ample, scarce = harness(depth, **changes), harness(depth, **changes)
    renewed = renewals(scarce, monkeypatch)
    for run in (ample, scarce):
        for i in range(12):
            run.submit(
                request(f"r{i}", encode(f"say {i}"), 150, stop=(EOS,), rules=rules[i % 5 < 1])
            )
        run_renewing(run)
        bound_states(monkeypatch, 200)
    texts = [answer(scarce, f"r{i}") for i in range(12)]
    assert texts == [answer(ample, f"r{i}") for i in range(12)]
    branches = [text for i, text in enumerate(texts) if i % 5]
    assert all(re.fullmatch("([a-h])[0-9]{60}, and so on, \\1", text) for text in branches)
    assert len({text[0] for text in branches}) > 3
    assert any(renewed)
    assert rules_left(scarce) == 0
    check_empty(scarce)


def test_a_matcher_of_its_own_has_room_for_a_long_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    bound_states(monkeypatch, 60, 400)
    run = harness()
    renewed = renewals(run, monkeypatch)
    run.submit(request("r", encode("say"), 300, stop=(EOS,), rules=rules_of("[0-9]{120}")))
    run_renewing(run)
    assert re.fullmatch("[0-9]{120}", answer(run, "r"))
    assert len(renewed) == 1


def test_those_that_wait_for_a_row_begin_with_the_next_lexer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bound_states(monkeypatch, 200)
    run = harness()
    renewed = renewals(run, monkeypatch)
    for i in range(60):
        run.submit(request(f"r{i}", encode(f"say {i}"), 90, stop=(EOS,), rules=rules_of(BRANCHES)))
    run_renewing(run)
    assert all(isinstance(end, Tokens) for end in run.ended.values())
    # A row may begin in the very step in which another one's text exhausts the lexer.
    assert renewed.count(0) < ROWS < len(renewed)


def test_requests_of_one_grammar_share_all_its_lexers() -> None:
    rows = {"max_rows": 24, "max_running": 24, "num_pages": 2000, "max_step_tokens": 512}
    run = harness(grammar_threads=3, **rows)
    for name in ("first", *(f"r{i}" for i in range(24))):
        run.submit(request(name, encode("say"), 60, stop=(EOS,), rules=rules_of("[0-9]{50}")))
        wait_for_grammars(run)
        if name == "first":
            run.run()
    wait_for_lexers(run)
    run.step()
    run.step()
    lexers = Counter(
        live.rules.lexer_number
        for live in run.scheduler._lifecycle.requests.values()
        if live.rules is not None
    )
    assert sorted(lexers.values()) == [8, 8, 8]
    run.run()


# ---- text that comes at once ---------------------------------------------------------------------

FORCED = "(<[0-9]{2}> and so on and so forth, ){3}"


@pytest.mark.parametrize("changes", [{}, {"max_row_tokens": 3}, {"micro_batches": 2}], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_text_without_a_choice_comes_at_once_and_changes_no_answer(
    depth: int, changes: dict[str, Any]
) -> None:
    answers, steps = [], []
    for jump in (0, 6):
        run = harness(depth, grammar_jump=jump, **changes)
        for i in range(5):
            rules = rules_of(FORCED if i else "[a-z]{40}")
            run.submit(request(f"r{i}", encode(f"say {i}"), 150, stop=(EOS,), rules=rules))
        run_all(run)
        answers.append([answer(run, f"r{i}") for i in range(5)])
        steps.append(run.stats().steps)
        assert all(re.fullmatch(FORCED, answer(run, f"r{i}")) for i in range(1, 5))
        longest = max(len(message.token_ids) for message in run.messages["r1"])  # type: ignore[union-attr]
        assert longest == (len("> and so on and so forth, <") if jump else min(longest, 3))
        assert run.stats().generated_tokens == sum(len(run.tokens[f"r{i}"]) for i in range(5))
        check_empty(run)
    assert answers[0] == answers[1]
    assert steps[1] < steps[0]


@pytest.mark.parametrize("limit", [1, 2, 4, 9, 10, 28, 29, 30])
def test_text_that_comes_at_once_ends_where_the_request_does(limit: int) -> None:
    run = harness(grammar_jump=2)
    run.submit(request("r", encode("say"), limit, rules=rules_of(FORCED)))
    run_all(run)
    assert len(run.tokens["r"]) == limit
    assert run.ended["r"].finish is Finish.LENGTH  # type: ignore[union-attr]
    check_empty(run)


def test_a_stop_token_within_text_that_would_come_at_once_ends_the_answer() -> None:
    run = harness(grammar_jump=2)
    stop = encode("f")[0]
    run.submit(request("r", encode("say"), 100, stop=(stop,), rules=rules_of(FORCED)))
    run_all(run)
    assert answer(run, "r").endswith(" and so on and so f")
    assert run.ended["r"].stop_token == stop  # type: ignore[union-attr]


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"cache": CacheMode.BYPASS}], ids=str)
def test_where_it_would_cost_something_text_comes_token_by_token(fields: dict[str, Any]) -> None:
    run = harness(grammar_jump=2)
    run.submit(request("r", encode("say"), 100, stop=(EOS,), rules=rules_of(FORCED), **fields))
    run_all(run)
    assert re.fullmatch(FORCED, answer(run, "r"))
    assert all(len(message.token_ids) <= 1 for message in run.messages["r"])  # type: ignore[union-attr]


# ---- grammars on their way -----------------------------------------------------------------------


def test_a_request_waits_for_its_grammar_and_holds_up_no_other() -> None:
    ready = threading.Event()
    run = harness(load=load_once(ready))
    run.submit(request("ruled", encode("a"), 40, rules=rules_of("[0-9]{20}")))
    run.submit(request("free", encode("b"), 40))
    assert (run.stats().waiting, run.stats().awaiting_grammar) == (2, 1)
    while "free" not in run.ended:
        assert run.step()
    assert run.scheduler._lifecycle.requests["ruled"].state is RequestState.AWAITING_GRAMMAR
    ready.set()
    run_all(run)
    assert run.stats().awaiting_grammar == 0
    assert re.fullmatch("[0-9]{20}", answer(run, "ruled"))


def test_a_short_request_that_waits_for_its_grammar_passes_no_long_one() -> None:
    ready = threading.Event()
    run = harness(load=load_once(ready))
    run.submit(request("long", encode("a" * 64), 4))
    assert run.step()
    run.submit(request("ruled", encode("a"), 40, rules=rules_of("[0-9]{20}")))
    while "long" not in run.ended:
        assert run.step()
    assert run.scheduler._lifecycle.requests["ruled"].state is RequestState.AWAITING_GRAMMAR
    ready.set()
    run_all(run)
    assert re.fullmatch("[0-9]{20}", answer(run, "ruled"))


def test_a_request_may_end_while_it_waits_for_its_grammar() -> None:
    ready = threading.Event()
    run = harness(load=load_once(ready), queue_timeout=5.0)
    run.submit(request("aborted", encode("a"), 40, rules=rules_of("[0-9]{20}")))
    run.submit(request("late", encode("a"), 40, rules=rules_of("[0-9]{20}")))
    run.abort("aborted")
    run.now += 6.0
    run.step()
    assert isinstance(run.ended["late"], Refused)
    assert run.ended["late"].reason is RefusalReason.QUEUE_TIMEOUT
    ready.set()
    run_all(run)
    assert rules_left(run) == 0


def test_equal_grammars_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(text: str, known: LLTokenizer) -> LLMatcher:
        built.append(text)
        return build_matcher(text, known)

    monkeypatch.setattr(building, "build_matcher", build)
    run = harness()
    for i in range(5):
        run.submit(request(f"r{i}", encode("a"), 40, rules=rules_of("[0-9]{20}")))
    run_all(run)
    run.submit(request("again", encode("a"), 40, rules=rules_of("[0-9]{20}")))
    run.run()  # it need not wait
    assert len(built) == 1
    assert "again" in run.ended


def test_a_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time begins when its building does; the others go on."""
    ready = threading.Event()
    begun = threading.Event()

    def build(text: str, known: LLTokenizer) -> LLMatcher:
        begun.set()
        assert ready.wait(60)
        return build_matcher(text, known)

    monkeypatch.setattr(building, "build_matcher", build)
    run = harness(grammar_timeout=2.0)
    run.submit(request("r", encode("a"), 40, rules=rules_of("[0-9]{20}")))
    assert begun.wait(60)
    run.step()
    run.now += 1.9
    run.step()
    assert "r" not in run.ended
    run.now += 0.2
    run.step()
    end = run.ended["r"]
    assert isinstance(end, Refused)
    assert end.reason is RefusalReason.GRAMMAR_TOO_COMPLEX
    ready.set()
    run_all(run)


def test_a_tokenizer_that_is_not_known_refuses_grammars_alone() -> None:
    def load() -> LLTokenizer:
        raise ConstraintError("this model's tokenizer does not support it")

    run = harness(load=load)
    run.submit(request("r", encode("a"), 40, rules=rules_of("[0-9]{20}")))
    run.submit(request("allowed", encode("a"), 20, rules=TokenRules(allowed=(5,))))
    run_all(run)
    end = run.ended["r"]
    assert isinstance(end, Refused)
    assert "tokenizer" in end.detail
    assert run.tokens["allowed"] == [5] * 20


@pytest.mark.parametrize(
    "error", [ConstraintError("this model's tokenizer cannot be read"), MemoryError()]
)
def test_a_tokenizer_that_could_not_be_loaded_once_is_loaded_for_the_next_request(
    error: Exception,
) -> None:
    fails = [error]

    def load() -> LLTokenizer:
        if fails:
            raise fails.pop()
        return tokenizer()

    run = harness(load=load)
    for name in ("refused", "served"):
        run.submit(request(name, encode("a"), 40, rules=rules_of("[0-9]{20}")))
        run_all(run)
    assert isinstance(run.ended["refused"], Refused)
    assert len(answer(run, "served")) == 20


# ---- masks ---------------------------------------------------------------------------------------


def allowed_in(mask: Any) -> str:
    flags = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return "".join(TEXTS[token] for token in np.flatnonzero(flags))


def test_masks_are_made_behind_proposals_and_the_state_stays() -> None:
    """A position each behind what is proposed; where that cannot come, anything may."""
    one, two = (
        Grammar(build_matcher(rules_of(text).grammar or "", tokenizer()))
        for text in ("abc|axy", "[01]+")
    )
    rules, other, again = (SequenceRules(TokenRules(), grammar) for grammar in (one, two, one))
    masks = np.zeros((8, mask_words(VOCAB)), dtype=np.int32)
    entries = [
        (rules, encode("ab")),
        (other, []),
        (again, encode("xa")),
        (SequenceRules(TokenRules(), None), []),
    ]
    for _ in range(2):
        fill_masks(LLExecutor(1), entries, masks)
        assert [allowed_in(mask) for mask in masks[:4]] == ["a", "bx", "c", "01"]
        assert allowed_in(masks[4]) == "a"
        assert (masks[7] == -1).all()
    rules.consume(encode("ax"))
    fill_masks(LLExecutor(1), [(rules, [])], masks[:1])
    assert allowed_in(masks[0]) == "y"

"""What a request asks of its answer is checked before the engine hears of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from radixgrove.worker.messages import RefusalReason, Refused
from tests.conftest import wait_until
from tests.worker.frontend.conftest import Frontend, StartFrontend
from tests.worker.frontend.test_errors import error_of

IGNORED = "x-radixgrove-ignored-schema-keywords"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
BOTH = {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "z$"}]}


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


def both(frontend: Frontend, **fields: Any) -> list[httpx.Response]:
    """The request to either endpoint, streaming and not."""
    return [
        ask("hi", stream=stream, **fields)
        for ask in (frontend.chat, frontend.complete)
        for stream in (False, True)
    ]


def test_the_engine_gets_a_grammar_and_every_choice_the_same(frontend: Frontend) -> None:
    for response in both(frontend, response_format=json_schema(POINT), n=3):
        assert response.status_code == 200
        assert IGNORED not in response.headers
    rules = [submit.rules for submit in frontend.engine.submits]
    assert len(rules) == 12
    assert all(rule == rules[0] and rule is not None and rule.grammar for rule in rules)


def test_what_asks_for_nothing_gives_the_engine_nothing(frontend: Frontend) -> None:
    nothing = {"structured_outputs": None, "bad_words": [], "max_reasoning_tokens": 5}
    both(frontend, response_format={"type": "text"}, **nothing)
    assert [submit.rules for submit in frontend.engine.submits] == [None] * 4


def test_ignored_keywords_are_named_in_a_header(frontend: Frontend) -> None:
    schema = {"type": "object", "properties": {"a": UNIQUE, "b": BOTH}}
    for response in both(frontend, response_format=json_schema(schema)):
        assert response.status_code == 200
        assert response.headers[IGNORED] == "uniqueItems, oneOf"
    for response in both(frontend, response_format=json_schema(schema, strict=True)):
        assert "cannot be enforced" in error_of(response, 400)["message"]


def test_words_and_tokens_reach_the_engine(frontend: Frontend) -> None:
    frontend.complete("hi", bad_words=["word"], allowed_token_ids=[7, 5, 7])
    (submit,) = frontend.engine.submits
    assert submit.rules is not None
    assert submit.rules.grammar is None
    assert submit.rules.allowed == (7, 5)
    texts = [frontend.tokenizer.decode(list(ids)) for ids in submit.rules.banned]
    assert texts == ["word", " word"]


def test_tokens_that_may_not_come_yet_are_not_all_that_may(frontend: Frontend) -> None:
    ends = [frontend.tokenizer.token_to_id("<|im_end|>")]
    for response in both(frontend, allowed_token_ids=[*ends, 7], stop_token_ids=[7], min_tokens=2):
        assert error_of(response, 400)["param"] == "allowed_token_ids"
    for fields in ({"min_tokens": 0}, {"min_tokens": 2, "ignore_eos": True}):
        for response in both(frontend, allowed_token_ids=ends, **fields):
            assert response.status_code == 200


def test_integers_of_a_schema_may_be_larger_than_64_bits(frontend: Frontend) -> None:
    for response in both(frontend, guided_json={"type": "integer", "maximum": 1 << 64}):
        assert response.status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "code", "reason"),
    [
        ({"response_format": json_schema({"type": "no"})}, "response_format", None, "no"),
        ({"response_format": json_schema({"pattern": "("})}, "response_format", None, "unclosed"),
        ({"guided_json": {"pattern": "(?=a)"}}, "guided_json", None, "look-around"),
        ({"guided_json": {"$ref": "http://x.y/z"}}, "guided_json", None, "nothing is fetched"),
        ({"guided_json": {"$ref": "#/$defs/a"}}, "guided_json", None, "does not exist"),
        (
            {"response_format": json_schema(UNIQUE, strict=True)},
            *("response_format", None, "'uniqueItems'"),
        ),
        ({"guided_json": {"enum": []}}, "guided_json", "schema_unsatisfiable", ""),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "schema_unsatisfiable", ""),
        ({"guided_json": {"title": "x" * 300_000}}, "guided_json", "schema_too_large", "262144"),
        ({"guided_json": {"enum": list(range(100_000))}}, "guided_json", "schema_too_large", ""),
        ({"regex": r"(a)\1"}, "regex", None, "backreferences"),
        ({"ebnf": "root ::= nowhere"}, "ebnf", None, "nowhere"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", None, "unclosed"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_the_reason(
    frontend: Frontend, fields: dict[str, Any], param: str, code: str | None, reason: str
) -> None:
    for response in both(frontend, **fields):
        error = error_of(response, 400)
        assert (error["param"], error["code"]) == (param, code)
        assert reason in error["message"]
    assert frontend.engine.submits == []


def test_hostile_schemas_leave_other_requests_alone(frontend: Frontend) -> None:
    """They are answered or refused, and what comes meanwhile is answered as ever."""
    nested: dict[str, Any] = {}
    for i in range(9):
        nested = {
            "oneOf": [{"properties": {"a": nested, f"b{i}": {}}}, {"properties": {"c": nested}}]
        }
    hostile = [
        {"guided_json": nested},
        {"guided_json": {"enum": [f"{i:06}" for i in range(25_000)]}},
        {"guided_json": {"type": "string", "pattern": "(a{1,500}){1,500}"}},
        {"regex": "(" * 3000 + ")" * 3000},
        {"ebnf": "root ::= " + "( " * 3000},
    ]
    for fields in hostile:
        assert frontend.chat("x", **fields).status_code in (200, 400)
        assert frontend.chat("x").json()["choices"][0]["message"]["content"] == "Hello world"


def test_compiling_is_given_up_in_time_and_kept_once_it_ends(
    start_frontend: StartFrontend,
) -> None:
    frontend = start_frontend(grammar_timeout=0.001)
    frontend.answer("Hello world")
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}
    error = error_of(frontend.chat("x", guided_json=schema), 400)
    assert (error["param"], error["code"]) == ("guided_json", "grammar_too_complex")
    assert frontend.chat("x").status_code == 200
    wait_until(
        lambda: frontend.chat("x", guided_json=schema).status_code == 200, what="the grammar"
    )


def test_an_answer_that_ends_by_its_grammar_keeps_its_last_token(frontend: Frontend) -> None:
    frontend.answer('{"x":1,"y":2}')
    frontend.engine.ends_by_grammar = True
    whole = frontend.chat("x", response_format=json_schema(POINT)).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ('{"x":1,"y":2}', "stop")
    streamed = frontend.chat("x", response_format=json_schema(POINT), stream=True).text
    chunks = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert "".join(d["delta"].get("content") or "" for d in deltas) == '{"x":1,"y":2}'
    assert deltas[-1]["finish_reason"] == "stop"


def test_a_grammar_that_fails_in_mid_answer_is_an_error_and_counted(frontend: Frontend) -> None:
    frontend.engine.interrupt = lambda submit, came: (
        Refused(request_id=submit.request_id, reason=RefusalReason.GRAMMAR_FAILED, detail="No.")
        if came == 1
        else None
    )
    counter = 'radixgrove_grammar_failures_total{reason="grammar_failed"}'
    before = frontend.metrics().get(counter, 0.0)
    error = error_of(frontend.chat("x", regex="a+"), 400)
    assert error["code"] == "grammar_failed"
    stream = frontend.chat("x", regex="a+", stream=True).text
    assert '"code":"grammar_failed"' in stream
    assert "[DONE]" not in stream
    assert '"finish_reason":"stop"' not in stream
    assert frontend.metrics()[counter] == before + 2

"""The fields that ask for a form of the answer: one constraint, whatever its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixgrove.protocol.constraints.constraint import Constraint, Form
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.openai.parsing import parse_chat, parse_completion
from radixgrove.protocol.openai.requests import ModelLimits

TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<fn=a>", "schema": {"type": "object"}, "end": "</fn>"}],
    "triggers": ["<fn="],
}
LIMITS = ModelLimits(max_model_len=100, vocab_size=1000)
TEXT = '{"type":"object","properties":{"b":{"minimum":1.50},"a":{"minimum":10}}}'


def asked(**fields: Any) -> Constraint | None:
    body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
    found = parse_completion(body, LIMITS).generation.constraint
    messages = [{"role": "user", "content": "x"}]
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    assert parse_chat(body, LIMITS).generation.constraint == found
    return found


def error(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


def response_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": response_format(json.loads(TEXT))}, "response_format"),
        ({"guided_json": json.loads(TEXT)}, "guided_json"),
        ({"guided_json": TEXT}, "guided_json"),
        ({"json_schema": TEXT}, "json_schema"),
        ({"structured_outputs": {"json": TEXT}}, "structured_outputs.json"),
        (
            {"response_format": {"type": "json_object", "schema": json.loads(TEXT)}},
            "response_format",
        ),
    ],
)
def test_a_schema_keeps_its_order_and_numbers(fields: dict[str, Any], param: str) -> None:
    found = asked(**fields)
    assert found is not None
    assert (found.form, found.param, found.strict) == (Form.JSON_SCHEMA, param, False)
    assert json.loads(found.text) == json.loads(TEXT)
    assert found.text.index('"b"') < found.text.index('"a"')


def test_tags_have_three_names() -> None:
    found = [
        asked(response_format=TAGS),
        asked(structural_tag=json.dumps(TAGS)),
        asked(structured_outputs={"structural_tag": TAGS}),
    ]
    assert {each.form for each in found if each is not None} == {Form.TAGS}
    assert len({each.text for each in found if each is not None}) == 1


def test_only_openais_field_can_be_strict() -> None:
    assert asked(response_format=response_format({}, strict=True)).strict  # type: ignore[union-attr]
    assert not asked(response_format=response_format({}, strict=None)).strict  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "form", "text"),
    [
        ({"regex": "a+"}, Form.REGEX, "a+"),
        ({"guided_regex": "a+"}, Form.REGEX, "a+"),
        ({"structured_outputs": {"regex": "a+"}}, Form.REGEX, "a+"),
        ({"ebnf": "root ::= x"}, Form.GRAMMAR, "root ::= x"),
        ({"grammar": "root ::= x"}, Form.GRAMMAR, "root ::= x"),
        ({"guided_grammar": "start: x"}, Form.GRAMMAR, "start: x"),
        ({"structured_outputs": {"grammar": "start: x"}}, Form.GRAMMAR, "start: x"),
        ({"guided_choice": ["a", "b"]}, Form.CHOICE, '["a","b"]'),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Form.CHOICE, '["a","b"]'),
        ({"response_format": {"type": "json_object"}}, Form.JSON_SCHEMA, '{"type":"object"}'),
        ({"structured_outputs": {"json_object": True}}, Form.JSON_SCHEMA, '{"type":"object"}'),
    ],
)
def test_every_name_means_one_form(fields: dict[str, Any], form: Form, text: str) -> None:
    found = asked(**fields)
    assert found is not None
    assert (found.form, found.text) == (form, text)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "json_schema": None, "schema": None}},
        {"structured_outputs": None},
        {"structured_outputs": {"json_object": False, "json": None}},
        {"guided_json": None, "regex": None},
        {"grammar": ""},
    ],
)
def test_what_asks_for_nothing_is_none(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


def test_an_empty_grammar_of_llama_cpp_is_none_beside_others() -> None:
    found = asked(grammar="", response_format={"type": "json_object"})
    assert found is not None
    assert (found.form, found.param) == (Form.JSON_SCHEMA, "response_format")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
    ],
)
def test_there_is_one_constraint_at_a_time(fields: dict[str, Any], param: str) -> None:
    found = error(**fields)
    assert found.param == param
    assert "exclude each other" in found.message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"response_format": {}}, "response_format.type", None),
        ({"response_format": {"type": "xml"}}, "response_format", None),
        ({"response_format": {"type": "json_schema"}}, "response_format", None),
        ({"response_format": response_format(None)}, "response_format", None),
        ({"response_format": response_format([])}, "response_format", None),
        ({"guided_json": "{"}, "guided_json", None),
        ({"guided_json": "5"}, "guided_json", None),
        ({"guided_json": {"title": "x" * 300_000}}, "guided_json", "schema_too_large"),
        ({"regex": "a" * 70_000}, "regex", "schema_too_large"),
        ({"regex": ""}, "regex", None),
        ({"ebnf": ""}, "ebnf", None),
        ({"regex": 5}, "regex", None),
        ({"guided_choice": []}, "guided_choice", None),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]", None),
        ({"guided_choice": ["a"] * 10_000}, "guided_choice", None),
        ({"structured_outputs": {}}, "structured_outputs", None),
        ({"structured_outputs": {"json": None}}, "structured_outputs", None),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", None),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": "x"}},
            *("structured_outputs.whitespace_pattern", "unsupported_parameter"),
        ),
        (
            {"response_format": response_format({}, strct=True)},
            *("response_format.json_schema.strct", None),
        ),
        ({"response_format": {"type": "json_object", "shema": {}}}, "response_format.shema", None),
        (
            {"structured_outputs": {"structural_tag": {}}},
            *("structured_outputs.structural_tag.type", None),
        ),
        ({"structural_tag": "{"}, "structural_tag", None),
        ({"structural_tag": {"type": "structural_tag"}}, "structural_tag.structures", None),
        ({"structural_tag": {**TAGS, "schema": {}}}, "structural_tag.schema", None),
        ({"structural_tag": {**TAGS, "a` - at `$.foo": 1}}, "structural_tag.foo", None),
        ({"structural_tag": {**TAGS, "triggers": ["<other"]}}, "structural_tag", None),
        ({"structural_tag": {**TAGS, "triggers": [""]}}, "structural_tag", None),
        ({"structural_tag": {**TAGS, "type": "text"}}, "structural_tag.type", None),
        ({"structural_tag": {**TAGS, "trigers": []}}, "structural_tag.trigers", None),
        ({"structural_tag": {**TAGS, "structures": [5]}}, "structural_tag.structures[0]", None),
        (
            {"structural_tag": {**TAGS, "structures": [{**TAGS["structures"][0], "strict": True}]}},
            *("structural_tag.structures[0].strict", None),
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            *("response_format.json_schema", None),
        ),
        (
            {"response_format": {"type": "text", "schema": {}}},
            *("response_format.schema", None),
        ),
        (
            {"response_format": {**response_format({}), "schema": {}}},
            *("response_format.schema", None),
        ),
        (
            {"response_format": {**TAGS, "json_schema": {"schema": {}}}},
            *("response_format.json_schema", None),
        ),
        (
            {"response_format": {"type": "json_object", "triggers": ["<"]}},
            *("response_format.triggers", None),
        ),
        (
            {"structural_tag": {**TAGS, "structures": TAGS["structures"] * 129}},
            *("structural_tag", "schema_too_large"),
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids", None),
        ({"allowed_token_ids": [1000]}, "allowed_token_ids", None),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", None),
        ({"bad_words": [""]}, "bad_words[0]", None),
        ({"bad_words": ["x"] * 2000}, "bad_words", None),
    ],
)
def test_malformed_fields_are_refused_by_name(
    fields: dict[str, Any], param: str, code: str | None
) -> None:
    found = error(**fields)
    assert (found.param, found.code) == (param, code)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"structured_outputs": {"regx": "a"}},
            "Unknown parameter: 'structured_outputs.regx'. What 'structured_outputs' may have: "
            "json, json_object, regex, choice, grammar, structural_tag.",
        ),
        (
            {"structured_outputs": {}},
            "'structured_outputs' must have one of json, json_object, regex, choice, grammar, "
            "structural_tag.",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "'response_format.json_schema' is of the type 'json_schema', not of 'json_object'.",
        ),
        (
            {"structural_tag": {name: TAGS[name] for name in ("structures", "triggers")}},
            "Missing required parameter: 'structural_tag.type'.",
        ),
        (
            {"structural_tag": {**TAGS, "structures": [{"begin": "<fn=", "end": ""}]}},
            "Invalid value for 'structural_tag': a tag has no schema.",
        ),
    ],
)
def test_a_misspelt_form_never_leaves_the_answer_free(fields: dict[str, Any], said: str) -> None:
    assert error(**fields).message == said


def test_options_of_vllm_that_are_off_ask_for_nothing() -> None:
    off = {"disable_any_whitespace": False, "whitespace_pattern": None, "disable_fallback": True}
    found = asked(structured_outputs={"regex": "a", **off})
    assert found is not None
    assert found.text == "a"


def test_levels_are_bounded_wherever_the_schema_stands() -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    for fields in ({"guided_json": deep}, {"response_format": response_format(deep)}):
        assert error(**fields).status == 400


def test_which_tokens_are_allowed_is_kept_once_each() -> None:
    body = {"model": "m", "prompt": "x", "allowed_token_ids": [5, 3, 5], "bad_words": ["no"]}
    generation = parse_completion(json.dumps(body).encode(), LIMITS).generation
    assert generation.allowed_token_ids == (5, 3)
    assert generation.bad_words == ("no",)

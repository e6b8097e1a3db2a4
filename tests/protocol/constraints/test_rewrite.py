"""Schemas in other words hold for the same values: `jsonschema` judges both."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator

from radixgrove.protocol.constraints.constraint import json_schema
from radixgrove.protocol.constraints.grammar import build_matcher, compile_constraint
from radixgrove.protocol.constraints.rewrite import precise, rewrite
from tests.grammars import byte_tokenizer

NAMES = ("a", "b", "c")
plain = st.sampled_from([None, True, False, 0, 1, 2.5, 10, "", "a", "ab", "b-]^", "é"])
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=5,
)
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True)
types = st.sampled_from(["null", "boolean", "number", "integer", "string", "array", "object"])
simple: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    st.fixed_dictionaries({"type": types}),
    st.fixed_dictionaries({"const": values}),
    st.fixed_dictionaries({"enum": st.lists(plain, min_size=1, max_size=4)}),
    st.fixed_dictionaries({"required": names}),
    st.fixed_dictionaries({"minimum": st.integers(0, 3)}),
    st.fixed_dictionaries({"exclusiveMaximum": st.sampled_from([0, 2.5])}),
    st.fixed_dictionaries({"maxLength": st.integers(0, 2)}),
    st.fixed_dictionaries({"minItems": st.integers(0, 2)}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": st.sampled_from(["^a", "^b-"])}),
)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    keywords = {
        "type": types,
        "properties": st.dictionaries(st.sampled_from(NAMES), inner, min_size=1, max_size=2),
        "required": names,
        "patternProperties": st.dictionaries(
            st.sampled_from(["^[ab]$", "^b$", "^(a|c)$"]), inner, min_size=1, max_size=2
        ),
        "additionalProperties": st.booleans(),
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "oneOf": several,
        "anyOf": several,
        "allOf": several,
        "dependentRequired": st.dictionaries(st.sampled_from(NAMES), names, max_size=2),
        "dependentSchemas": st.dictionaries(st.sampled_from(NAMES), inner, max_size=1),
        "uniqueItems": st.booleans(),
        "items": inner | st.fixed_dictionaries({"enum": st.lists(plain, min_size=1, max_size=3)}),
        "minItems": st.integers(0, 2),
        "maxItems": st.integers(0, 3),
    }
    return st.sets(st.sampled_from(sorted(keywords)), min_size=1, max_size=4).flatmap(
        lambda chosen: st.fixed_dictionaries({key: keywords[key] for key in sorted(chosen)})
    )


schemas = st.recursive(simple, larger, max_leaves=6)


@given(schema=schemas, instances=st.lists(values, min_size=1, max_size=8))
@example({"not": {"enum": ["a", "ab", ""]}}, ["a", "ab", "", "abc", "b", 1, None])
@example({"not": {"const": True}}, [True, False, 1])
@example({"not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"a": 1, "b": 2}, 5])
@example(
    {"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    [{}, {"a": 1}, {"a": 1, "b": 2}, {"a": 2}, 5],
)
@example(
    {
        "properties": {"a": {}},
        "additionalProperties": False,
        "if": {"required": ["a"]},
        "then": {"patternProperties": {"^b": {"type": "string"}}},
    },
    [{"a": 1}, {"a": 1, "b": "b"}, {"b": 1}, 5],
)
@example({"uniqueItems": True, "items": {"enum": [1, "a"]}}, [[], [1], [1, 1], ["a", 1], 5, [2]])
@example(
    {"not": {"anyOf": [{"properties": {"a": False}}, {"required": ["a", "b"]}]}},
    [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, 5],
)
@example(
    {"not": {"dependentRequired": {"a": ["a", "b"]}}, "properties": {"a": False}},
    [{}, {"a": 1}, {"b": 1}],
)
def test_the_same_values_are_valid(schema: Any, instances: list[Any]) -> None:
    other = precise(rewrite(schema))
    before, after = Draft202012Validator(schema), Draft202012Validator(other)
    for value in instances:
        assert before.is_valid(value) == after.is_valid(value), (schema, other, value)


@pytest.mark.parametrize("reference", ["#/properties/a/items", "#/patternProperties/^a$/items"])
def test_references_into_properties_lead_where_they_did(reference: str) -> None:
    array = {"type": "array", "items": {"const": "x"}}
    schema = {
        "properties": {"a": array, "b": {"$ref": reference}},
        "patternProperties": {"^a$": array},
    }
    assert Draft202012Validator(precise(schema)).is_valid({"a": ["x"], "b": "x"})
    assert not Draft202012Validator(precise(schema)).is_valid({"b": "y"})


@given(
    needed=st.dictionaries(st.sampled_from(NAMES), names | simple, min_size=1, max_size=2),
    instances=st.lists(values, min_size=1, max_size=8),
)
def test_dependencies_of_older_drafts_are_the_same(needed: Any, instances: list[Any]) -> None:
    schema = {"dependencies": needed}
    before, after = Draft7Validator(schema), Draft202012Validator(rewrite(schema))
    for value in instances:
        assert before.is_valid(value) == after.is_valid(value), (schema, value)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"enum": [1, "a", None, True]}},
        {"not": {"type": ["string", "null"]}},
        {"not": {"required": ["a"]}},
        {"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
        {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"minimum": 5}}},
        {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}]},
        {"oneOf": [{"type": "string", "pattern": "c"}, {"const": 1}, {"type": "null"}]},
        {"dependentRequired": {"a": ["b"]}},
        {"dependencies": {"a": {"required": ["b"]}}},
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        {"type": "array", "uniqueItems": True, "maxItems": 1},
        {"then": {"type": "string"}},
    ],
)
def test_these_keywords_are_gone(schema: dict[str, Any]) -> None:
    text = str(rewrite(schema))
    for keyword in ("'not'", "'if'", "'then'", "'oneOf'", "'depend", "'uniqueItems'"):
        assert keyword not in text


@pytest.mark.parametrize("pattern", ["^a$", "^(?:a|a)$", r"^(a|\-)$"])
def test_no_key_begins_that_cannot_end(pattern: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "-": {}},
        "patternProperties": {pattern: {"minimum": 5}},
        "required": ["a", "-"],
        "additionalProperties": False,
    }
    asked = json_schema(json.dumps(schema).encode(), "schema", strict=True)
    grammar = compile_constraint(asked, byte_tokenizer(), 0).grammar
    matcher = build_matcher(grammar, byte_tokenizer())
    assert matcher.validate_tokens(list(b'{"a":4,')) == len(b'{"a":4')  # what the pattern asks
    begun = list(b'{"a":5,"-":5')
    assert matcher.consume_tokens(begun)
    assert matcher.validate_tokens([ord(",")]) == 0
    assert matcher.validate_tokens([ord("}")]) == 1


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("host-name", ["a.example"], ["-a"]),
        ("path", ["/a b", ""], []),
        ("byte", ["", "YQ==", "YWI=", "YWJj"], ["YQ=", "a", "YQ===", "YWJj YWJj"]),
        (
            "uri-reference",
            ["", "/a?b#c", "a/b", "//h:8/x", "http://[::1]:80/", "mailto:a@b", "?q"],
            ["a b", "#a\\b", ":a", "1:b", "http://[::1/", "%zz", "é"],
        ),
        (
            "iri",
            ["http://é.example/?é#é", "urn:é:1", "http://[V1.fe]/𐌀"],
            ["/é", "é", "http://a b"],
        ),
        ("iri-reference", ["/é", "#é"], ["#é\\b"]),
        ("uri-template", ["http://x/{a:1}/{b}", "{?x,y*}", "é'"], ["{a", "{}", "{a:0}", "a b"]),
        ("json-pointer", ["", "/", "/a/0", "/a~1b", '/"'], ["a", "#/", "/~2", "/~"]),
        (
            "date",
            ["2024-02-29", "2000-02-29", "0004-02-29", "2023-12-31", "1000-04-30"],
            ["2021-02-29", "1900-02-29", "2023-04-31", "0000-01-01", "2024-2-9", "2023-13-01"],
        ),
        (
            "time",
            ["23:59:59Z", "00:00:00.5+01:30", "12:00:00z"],
            ["24:00:00Z", "12:00:60Z", "12:00:00", "12:00Z", "12:00:00+24:00"],
        ),
        (
            "date-time",
            ["2024-02-29T12:00:00Z", "2023-01-01t00:00:00.123-05:00"],
            ["2023-02-29T12:00:00Z", "2023-01-01 00:00:00Z", "2023-01-01", "2023-01-01T00:00:60Z"],
        ),
        ("relative-json-pointer", ["1", "0/a", "0#", "120/a"], ["/a", "-1", "0##", "01", ""]),
    ],
)
def test_formats_that_are_said_as_patterns(name: str, valid: list[str], invalid: list[str]) -> None:
    schema = {"type": "string", "format": name}
    for strict in (schema, {"anyOf": [schema, {"type": "null"}]}):
        asked = json_schema(json.dumps(strict).encode(), "schema", strict=True)
        matcher = build_matcher(
            compile_constraint(asked, byte_tokenizer(), 0).grammar, byte_tokenizer()
        )
        for text in valid + invalid:
            tokens = list(json.dumps(text, ensure_ascii=False).encode())
            own = matcher.deep_copy()
            obeys = own.validate_tokens(tokens) == len(tokens) and own.consume_tokens(tokens)
            assert (obeys and own.is_accepting()) == (text in valid), text


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "a"}},
        {"not": {"const": {"a": 1}}},
        {"not": {"type": "integer"}},
        {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
        {"if": {"contains": {}}, "then": {"type": "string"}},
        {"uniqueItems": True},
        {"uniqueItems": True, "items": {"enum": [1, 2, 3, 4, 5, 6]}},
        {
            "not": {"$ref": "#/$defs/a"},
            "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}},
        },
    ],
)
def test_what_has_no_equivalent_is_left(schema: dict[str, Any]) -> None:
    assert rewrite(schema) == schema


def nested(depth: int) -> dict[str, Any]:
    """A `oneOf` whose branches hold the one within, twice."""
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        held = {"type": "object", "properties": {f"p{level}": schema}, "required": [f"p{level}"]}
        schema = {"oneOf": [schema, {"type": "object", "required": [f"q{level}"]}, held]}
    return schema


def test_a_schema_that_grows_too_much_is_left() -> None:
    """To compile it would take seconds, and hundreds of megabytes."""
    assert rewrite(nested(2)) != nested(2)
    assert rewrite(nested(5)) == nested(5)


KEYWORDS = (
    *("type", "properties", "required", "not", "if", "then", "else", "oneOf", "anyOf", "allOf"),
    *("dependencies", "dependentSchemas", "uniqueItems", "items", "minItems", "maxItems", "enum"),
    *("minimum", "maxLength", "$ref", "$defs", "additionalProperties", "patternProperties"),
)


@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), values, max_size=5))
def test_malformed_schemas_are_no_failure(schema: dict[str, Any]) -> None:
    rewrite(schema)
    rewrite({"not": schema})
    precise(schema)

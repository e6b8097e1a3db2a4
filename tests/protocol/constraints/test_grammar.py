"""What a compiled constraint accepts, and the words in which others are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from random import Random
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from radixgrove.protocol.constraints import constraint
from radixgrove.protocol.constraints.constraint import (
    TOO_COMPLEX,
    TOO_LARGE,
    UNSATISFIABLE,
    Constraint,
    ConstraintError,
    Form,
)
from radixgrove.protocol.constraints.grammar import (
    Compiled,
    build_matcher,
    compile_constraint,
    outgrown,
    refusal,
)
from radixgrove.protocol.constraints.numbers import fitted
from tests.checkout import ROOT
from tests.grammars import encode, tokenizer

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


def schema_of(schema: Any, *, strict: bool = False) -> Constraint:
    return constraint.json_schema(json.dumps(schema).encode(), "p", strict=strict)


def compiled(asked: Constraint, whitespace: int = 8) -> Compiled:
    return compile_constraint(asked, tokenizer(), whitespace)


def accepts(asked: Constraint, text: str, whitespace: int = 8) -> bool:
    matcher = build_matcher(compiled(asked, whitespace).grammar, tokenizer())
    return matcher.consume_tokens(encode(text)) and matcher.is_accepting()


def refused(asked: Constraint) -> ConstraintError:
    with pytest.raises(ConstraintError) as caught:
        compiled(asked)
    return caught.value


# ---- what is accepted ------------------------------------------------------------------------


def test_a_schema_accepts_its_values() -> None:
    assert accepts(schema_of(OBJECT), '{"a":1}')
    assert accepts(schema_of(OBJECT), '{ "a" : 1\n}')
    for text in ('{"a":1', '{"a":"1"}', "{}", '{"a":1,"b":2}'):
        assert not accepts(schema_of(OBJECT), text)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (constraint.text_form(Form.REGEX, "[a-c]{2,3}", "p"), "abc"),
        (constraint.choice(['say "hi"', "two\nlines", "ß"], "p"), 'say "hi"'),
        (constraint.choice(['say "hi"', "two\nlines", "ß"], "p"), "two\nlines"),
        (constraint.text_form(Form.GRAMMAR, 'start: "x" | "y" start', "p"), "yyx"),
        (constraint.text_form(Form.GRAMMAR, '?start: "x" | "y" start', "p"), "yyx"),
        (constraint.text_form(Form.GRAMMAR, 'root ::= "x" | "y" root', "p"), "yyx"),
        (constraint.text_form(Form.GRAMMAR, 'root ::= start\nstart ::= "x"+', "p"), "xxx"),
        (schema_of(True), "[1]"),
    ],
)
def test_other_forms_accept_theirs(asked: Constraint, text: str) -> None:
    assert accepts(asked, text)
    assert not accepts(asked, text + "?")


def test_gbnf_with_a_rule_start_hardly_grows_whatever_else_its_rules_are_named() -> None:
    names = ["begin", *(f"begin{'-s' * n}" for n in range(100)), "Begin-0", "begin_1", "begin-2"]
    rules = "\n".join(f'{name} ::= "x"' for name in names)
    used = " | ".join([*names, *["start"] * 1000])
    text = f'root ::= {used}\nstart ::= "y"\n{rules}'
    asked = constraint.text_form(Form.GRAMMAR, text, "p")
    assert len(compiled(asked).grammar) < 3 * len(text)
    assert accepts(asked, "y")


@pytest.mark.timeout(12)
@pytest.mark.parametrize(
    "text",
    [
        "\n" * (64 << 10),
        "root ::= " + "[" * (60 << 10),
        'root ::= "' + '\\"' * (30 << 10),
        "start: /" + "\\/" * (30 << 10),
    ],
    ids=["blank lines", "brackets", "quotes", "slashes"],
)
def test_a_text_that_is_no_grammar_is_refused_soon(text: str) -> None:
    """The longest ones that there are, of what an expression could try at each character anew."""
    assert refused(constraint.text_form(Form.GRAMMAR, text, "p"))


def test_expressions_of_a_grammar_may_have_several_lines() -> None:
    text = "root ::= start [\nstart]\nstart ::= [x]"
    assert accepts(constraint.text_form(Form.GRAMMAR, text, "p"), "xa")
    assert not accepts(constraint.text_form(Form.GRAMMAR, text, "p"), "xb")
    schema = json.dumps({"const": 1, "x-guidance": {"whitespace_pattern": "~"}})
    text = f"start: /a\nb/ %json {schema} /c/"
    assert not accepts(constraint.text_form(Form.GRAMMAR, text, "p"), "a\nb~1c")
    assert accepts(constraint.text_form(Form.GRAMMAR, text, "p"), "a\nb1c")


def test_a_grammar_embeds_schemas() -> None:
    text = 'start: "call " %json ' + json.dumps(OBJECT) + ' ";"\nOTHER: /%json x/'
    asked = constraint.text_form(Form.GRAMMAR, text, "p")
    assert accepts(asked, 'call {"a":1};')
    assert not accepts(asked, 'call {"b":1};')


def test_schemas_that_a_grammar_embeds_have_bounds() -> None:
    for levels in (65, 400):
        deep = '{"allOf":[' * (levels // 2) + "{}" * (levels % 2) + "]}" * (levels // 2)
        asked = constraint.text_form(Form.GRAMMAR, f"start: %json {deep}", "p")
        assert refused(asked).code == TOO_LARGE


@pytest.mark.parametrize("more", [{}, {"pattern": "^2"}])
def test_a_date_is_one_of_the_calendar_wherever_it_stands(more: dict[str, str]) -> None:
    date = {"type": "string", "format": "date", **more}
    data = {"const": {"format": "date"}}
    array = {"type": "array", "items": date, "prefixItems": [data], "minItems": 2}
    for asked in (
        schema_of(array, strict=True),
        constraint.text_form(Form.GRAMMAR, f"start: %json {json.dumps(array)}", "p"),
    ):
        assert accepts(asked, '[{"format":"date"},"2024-02-29"]')
        assert not accepts(asked, '[{"format":"date"},"2023-02-29"]')
        assert accepts(asked, '[{"format":"date"},"1999-02-28"]') == (not more)


def tags_of(*schemas: Any) -> Constraint:
    """`<1>`, a value of the first schema and `</>`, and so on."""
    tags = [
        constraint.Tag(
            begin=f"<{number}>", schema=msgspec.Raw(json.dumps(schema).encode()), end="</>"
        )
        for number, schema in enumerate(schemas, start=1)
    ]
    return constraint.tags(constraint.Tags(structures=tags, triggers=["<"]), "p")


def test_text_is_free_until_a_trigger_comes() -> None:
    """Then it goes on as one of the tags does, and is free again."""
    asked = tags_of(OBJECT, OBJECT)
    for text in ("", "any\n text", 'so <1>{"a":1}</> and <2>{"a": 2}</>.'):
        assert accepts(asked, text)
    for text in ("<", "<3>", '<1>{"b":1}</>', '<1>{"a":1}', f'<1>{{"a":{" " * 9}1}}</>'):
        assert not accepts(asked, text)


def test_schemas_of_tags_are_those_of_answers() -> None:
    """What can be said in other words is enforced, what cannot is named, as is a slip."""
    letter = {"type": "string", "maxLength": 1, "not": {"enum": ["x", "y"]}}
    asked = tags_of(letter, {"type": "integer", "multipleOf": 1 << 31, "Minimum": 2})
    assert compiled(asked).ignored == ("Minimum", "multipleOf")
    assert accepts(asked, '<1>"z"</> <2>1</>')
    assert not accepts(asked, '<1>"x"</>')
    assert not accepts(asked, '<2>"z"</>')
    error = refused(tags_of(OBJECT, {"type": "no-such-type"}))
    assert error.reason.startswith("in structures[1] ")
    assert refused(tags_of(OBJECT, False)).code == UNSATISFIABLE
    wide = {"properties": {f"p{number}": {} for number in range(2000)}}
    assert refused(tags_of(wide, wide, wide)).code == TOO_LARGE


# ---- white space -----------------------------------------------------------------------------

EMBEDDED = constraint.text_form(Form.GRAMMAR, f"start: %json {json.dumps(OBJECT)}", "p")


@pytest.mark.parametrize("asked", [schema_of(OBJECT), EMBEDDED], ids=["schema", "embedded"])
@pytest.mark.parametrize("blanks", [" ", "\n", "\t"])
def test_white_space_has_a_bound(asked: Constraint, blanks: str) -> None:
    for place in ('{%s"a":1}', '{"a"%s:1}', '{"a":%s1}', '{"a":1%s}'):
        assert accepts(asked, place % (blanks * 8))
        assert not accepts(asked, place % (blanks * 9))
    assert not accepts(asked, blanks + '{"a":1}')
    assert accepts(asked, '{"a":1}', whitespace=0)
    assert not accepts(asked, '{"a": 1}', whitespace=0)


@pytest.mark.parametrize("options", [{"whitespace_pattern": " *"}, {"lenient": True}, 5])
def test_the_compilers_options_are_not_for_clients(options: Any) -> None:
    asked = schema_of({**OBJECT, "x-guidance": options, "not": {"pattern": "a"}}, strict=True)
    assert "'not' cannot be enforced" in refused(asked).reason
    asked = schema_of({**OBJECT, "x-guidance": options})
    assert not accepts(asked, '{"a":' + 9 * " " + "1}")


def test_a_property_may_have_the_name_of_the_options() -> None:
    asked = schema_of({"type": "object", "properties": {"x-guidance": {"type": "integer"}}})
    assert accepts(asked, '{"x-guidance":1}')
    assert not accepts(asked, '{"x-guidance":""}')


# ---- keywords that cannot be enforced ----------------------------------------------------------

BOTH = {"oneOf": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "z$"}]}
UNENFORCED = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"const": 1}}, "contains"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"type": "string", "not": {"pattern": "a"}}, "not"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "string", "format": "no-such-format"}, "format"),
    (BOTH, "oneOf"),
]


@pytest.mark.parametrize(("schema", "keyword"), UNENFORCED)
def test_a_keyword_is_named_and_the_rest_enforced(schema: Any, keyword: str) -> None:
    whole = {"type": "object", "properties": {"v": schema, "n": {"type": "integer"}}}
    assert compiled(schema_of(whole)).ignored == (keyword,)
    assert not accepts(schema_of(whole), '{"n":""}')


@pytest.mark.parametrize(("schema", "keyword"), UNENFORCED)
def test_strictly_it_is_refused_by_name(schema: Any, keyword: str) -> None:
    assert f"'{keyword}'" in refused(schema_of({"properties": {"v": schema}}, strict=True)).reason


def test_what_can_be_said_in_other_words_is_enforced() -> None:
    """Also where it stands beside a keyword that cannot."""
    letter = {"type": "string", "maxLength": 1, "not": {"enum": ["x", "y"]}}
    for strict in (False, True):
        assert accepts(schema_of(letter, strict=strict), '"z"')
        assert not accepts(schema_of(letter, strict=strict), '"x"')
    both = {"type": "object", "properties": {"v": letter, "w": {"contains": {}}}, "required": ["v"]}
    assert compiled(schema_of(both)).ignored == ("contains",)
    assert not accepts(schema_of(both), '{"v":"x"}')


def test_an_exclusive_one_of_is_exact() -> None:
    schema = {"oneOf": [{"type": "string"}, {"type": "integer"}]}
    assert compiled(schema_of(schema, strict=True)).ignored == ()


def test_keywords_in_other_letters_are_named_or_refused() -> None:
    """Those alone: others may be anything, and say nothing of a value."""
    data = {"default": {"Type": 1}, "examples": [{"maxlength": 1}], "x-form": {"MaxLength": 2}}
    others = {"Title": "T", "order": 1, "properties": {"maxlength": {"type": "string"}}, **data}
    assert compiled(schema_of({"type": "object", **others}, strict=True)).ignored == ()
    schema = {"properties": {"a": {"anyOf": [{"type": "string", "maxlength": 3}]}}}
    assert compiled(schema_of(schema)).ignored == ("maxlength",)
    reason = refused(schema_of(schema, strict=True)).reason
    assert reason == "it is strict, but 'maxlength' is no keyword ('maxLength' is)"
    slip = {"type": "string", "minlength": 3}
    pointed = {"$ref": "#/components/x", "components": {"x": {"not": slip}}}
    for hidden in (pointed, {"dependencies": {"a": {"properties": {"b": slip}}}}):
        assert "minlength" in compiled(schema_of(hidden)).ignored
    lark = constraint.text_form(Form.GRAMMAR, f"start: %json {json.dumps(slip)}", "p")
    assert compiled(lark).ignored == ("minlength",)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "no-such-type"}, "no-such-type"),
        ({"type": "string", "pattern": "("}, "regular expression"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
        ({"$ref": "#/$defs/nowhere"}, "/$defs/nowhere"),
        ({"$ref": "#nowhere"}, "'$ref' leads nowhere"),
        ({"$ref": "https://example.org/x"}, "'$ref' must be local ('#/…'), and 'https://example"),
        ({"$ref": "x.json"}, "and 'x.json' is not: nothing is fetched"),
        ({"type": "string", "pattern": r"limit\b"}, r"\b, \B, and ^ or $ within it, are not"),
        ({"properties": 5}, "properties must be an object"),
        ({"required": "a"}, "required"),
        ({"minimum": "x"}, "Expected a number for 'minimum'"),
    ],
)
def test_a_malformed_schema_is_refused_with_the_reason(schema: Any, reason: str) -> None:
    error = refused(schema_of(schema))
    assert error.code is None
    assert reason in error.reason


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ({"type": "objekt"}, "type"),
        ({"type": ["string", "x"]}, "type"),
        ({"type": 5}, "type"),
        ({"pattern": "("}, "pattern"),
        ({"pattern": "^a\n(b$"}, "pattern"),
        ({"pattern": r"a\bc"}, "pattern"),
        ({"patternProperties": {"[": {}}}, "patternProperties"),
        ({"$ref": "#/$defs/x"}, "$ref"),
        ({"$ref": "x.json"}, "$ref"),
        ({"properties": []}, "properties"),
        ({"properties": {"x": 5}}, "properties"),
        ({"items": 5}, "items"),
        ({"anyOf": [5]}, "anyOf"),
        ({"anyOf": {}}, "anyOf"),
        ({"minLength": -1}, "minLength"),
        ({"minimum": "ä"}, "minimum"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_refusal_says_where_the_fault_is(fault: Any, place: str, strict: bool) -> None:
    sound = {"type": "string", "pattern": "x", "default": fault, "minLength": 1}
    names = dict.fromkeys(("properties", "items", "enum", "$ref"), sound)
    schema = {"type": "object", "properties": {**names, "a/b": {"allOf": [fault]}}}
    reason = refused(schema_of(schema, strict=strict)).reason
    assert reason.endswith(f" (at #/properties/a~1b/allOf/0/{place})")


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"enum": []},
        {"type": "object", "required": ["a"], "properties": {"a": {"enum": []}}},
        {"not": {}},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "array", "minItems": 3, "maxItems": 1},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}},
        {"$ref": "#"},
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_no_value_satisfies_is_refused(schema: Any, strict: bool) -> None:
    assert refused(schema_of(schema, strict=strict)).code == UNSATISFIABLE


def test_numbers_of_properties_bind_where_all_are_required_and_are_named_elsewhere() -> None:
    counted = {
        "type": "object",
        "properties": {"a": {"type": "array"}, "b": {"const": 1}},
        "required": ["a"],
        "maxProperties": 1,
    }
    assert compiled(schema_of(counted)).ignored == ("maxProperties",)
    assert accepts(schema_of(counted), '{"a":[],"b":1}')
    whole = {**counted, "required": ["a", "b"], "maxProperties": 2}
    assert compiled(schema_of(whole, strict=True)).ignored == ()
    assert not accepts(schema_of(whole), '{"a":[],"b":1,"c":1}')
    assert "'maxProperties'" in refused(schema_of(counted, strict=True)).reason


@pytest.mark.parametrize(
    "dialect",
    [
        "http://json-schema.org/draft-04/schema#",
        "https://json-schema.org/draft-07/schema#",
        "http://json-schema.org/draft/2020-12/schema",
        "http://json-schema.org/schema#",
        "https://example.com/dialect",
        "mine",
    ],
)
def test_any_dialect_is_taken_and_none_fetched(dialect: str) -> None:
    inner = {"$schema": dialect, "type": "object", "properties": {"$schema": {"type": "null"}}}
    schema = {"$schema": dialect, "properties": {"a": inner}, "required": ["a"]}
    asked = schema_of({"type": "object", **schema, "additionalProperties": False}, strict=True)
    assert accepts(asked, '{"a":{"$schema":null}}')
    assert not accepts(asked, '{"a":{"$schema":1}}')


def test_keywords_that_are_null_are_not_there() -> None:
    text = {"type": "string", "minLength": 1, "maxLength": None, "properties": None}
    schema = {"type": "object", "properties": {"a": text}, "required": None, "items": None}
    lark = constraint.text_form(Form.GRAMMAR, f"start: %json {json.dumps(schema)}", "p")
    for asked in (schema_of(schema, strict=True), lark):
        assert accepts(asked, "{}")
        assert accepts(asked, '{"a":"xy"}')
        assert not accepts(asked, '{"a":""}')
    for kept in ({"const": None}, {"enum": [None]}):
        assert accepts(schema_of(kept), "null")
        assert not accepts(schema_of(kept), "1")
    assert refused(schema_of({"type": None}))


def test_lists_of_items_are_read_by_the_dialect() -> None:
    """Before 2020 `items` had a schema for each of the first ones."""
    schema = {"type": "array", "items": [{"type": "null", "minimum": None}], "minItems": 1}
    for scheme in ("http", "https"):
        dialect = f"{scheme}://json-schema.org/draft-07/schema#"
        asked = schema_of({"$schema": dialect, **schema}, strict=True)
        assert accepts(asked, "[null,1]")
        assert not accepts(asked, "[1]")


# ---- numbers ---------------------------------------------------------------------------------

LEAST, MOST = -(1 << 63), (1 << 63) - 1


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"minimum": (1 << 53) + 1}, (1 << 53) + 2, 1 << 53),
        ({"maximum": (1 << 53) + 3}, (1 << 53) + 2, (1 << 53) + 4),
        ({"exclusiveMaximum": -(1 << 53) - 1}, -(1 << 53) - 4, -(1 << 53) - 1),
        ({"minimum": LEAST, "maximum": MOST}, LEAST + 1024, MOST + 1),
        ({"minimum": 0, "maximum": (1 << 64) - 1}, MOST - 1023, 1 << 64),
        ({"minimum": -1.7e308, "maximum": 1.7e308}, -1, 10**400),
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_hold_for_numbers_of_any_size(
    schema: Any, inside: int, outside: int, kind: str
) -> None:
    asked = schema_of({"type": kind, **schema}, strict=True)
    assert accepts(asked, str(inside))
    assert not accepts(asked, str(outside))


@pytest.mark.parametrize("value", [(1 << 53) + 1, MOST, LEAST, LEAST - 1, 1 << 80, 10**400])
def test_values_of_more_digits_than_are_kept_are_named_or_refused(value: int) -> None:
    """The least integer of 64 bits ends the process if it reaches the compiler."""
    for schema, name in (
        ({"const": value}, "const"),
        ({"enum": [1, value]}, "enum"),
        ({"type": "integer", "const": -1e19}, "const"),
        ({"const": [{"a": value}]}, "const"),
        ({"default": {"const": value}, "properties": {"a": {"$ref": "#/default"}}}, "const"),
    ):
        assert f"'{name}'" in refused(schema_of(schema, strict=True)).reason
        assert compiled(schema_of(schema)).ignored == (name,)
    assert accepts(schema_of({"const": value}), "17")
    assert not accepts(schema_of({"const": value}), '"17"')
    lark = f'start: %json {{"const": {value}}}'
    assert "'const'" in refused(constraint.text_form(Form.GRAMMAR, lark, "p")).reason


def test_values_that_are_kept_are_exact() -> None:
    for value in (1 << 53, -(1 << 53), MOST - 1023, LEAST + 1024):
        asked = schema_of({"const": value}, strict=True)
        assert accepts(asked, str(value))
        assert not accepts(asked, str(value - 1))


DIGITS = "a number of more digits than are kept"
STEPS = "too many steps, alone or with others"


def test_steps_are_positive_and_of_few_digits() -> None:
    for step in (0, -3, -0.5):
        for strict in (True, False):
            reason = refused(schema_of({"multipleOf": step}, strict=strict)).reason
            assert reason == f"'multipleOf' must be greater than 0, not {step}"
    for step in (0.07, 3e-9, 1e-300):
        reason = refused(schema_of({"multipleOf": step}, strict=True)).reason
        assert reason == f"it is strict, but 'multipleOf' cannot be enforced: {DIGITS}"
        assert compiled(schema_of({"multipleOf": step})).ignored == ("multipleOf",)
    assert accepts(schema_of({"multipleOf": 0.01}, strict=True), "1.25")
    assert not accepts(schema_of({"multipleOf": 0.01}, strict=True), "1.255")
    assert accepts(schema_of({"multipleOf": 1e-06}, strict=True), "0.000007")


@pytest.mark.parametrize("step", [604_800, 1_000_003, 1 << 20, 86_400_000, 1 << 31, 10**400])
def test_steps_that_take_long_to_compile_are_named(step: int) -> None:
    reason = refused(schema_of({"multipleOf": step}, strict=True)).reason
    assert reason == f"it is strict, but 'multipleOf' cannot be enforced: {STEPS}"
    assert compiled(schema_of({"multipleOf": step})).ignored == ("multipleOf",)
    lark = f'start: %json {{"multipleOf": {step}}}'
    reason = refused(constraint.text_form(Form.GRAMMAR, lark, "p")).reason
    assert reason == f"in a schema after %json 'multipleOf' cannot be enforced: {STEPS}"


@pytest.mark.parametrize("step", [120_000, 250_000, 1_000_000])
def test_steps_that_end_in_zeros_are_enforced(step: int) -> None:
    asked = schema_of({"type": "integer", "multipleOf": step}, strict=True)
    assert accepts(asked, str(7 * step))
    assert not accepts(asked, str(7 * step + 1))


@pytest.mark.parametrize(
    ("range_", "step", "enforced"),
    [
        ({"minimum": 0}, 1_000_000, True),
        ({"maximum": 0}, 1_000_000, True),
        ({"minimum": 1, "maximum": 10**9}, 1_000_000, False),
        ({"maximum": 10**9}, 12_000, False),
        ({"minimum": -(10**9)}, 12_000, False),
        ({"minimum": 1, "maximum": 10**9}, 7_200, True),
        ({"minimum": 1, "maximum": 50_000}, 10_000, True),
    ],
)
def test_steps_within_a_range_are_few_or_named(range_: Any, step: int, enforced: bool) -> None:
    """More would fail in mid-answer."""
    asked = schema_of({"type": "integer", **range_, "multipleOf": step})
    assert compiled(asked).ignored == (() if enforced else ("multipleOf",))
    sign = -1 if range_.get("maximum") == 0 else 1
    assert accepts(asked, str(sign * 3 * step))
    assert accepts(asked, str(sign * (3 * step + 1))) != enforced


@pytest.mark.parametrize(
    ("steps", "texts"),
    [
        ({"lat": 1e-6, "count": 1}, ("0.000001", "0.5")),
        ({"cents": 0.01, "day": 1440}, ("0.07", "1441")),
        ({"cents": 0.01, "ms": 5000}, ("0.07", "5001")),
        ({"price": 0.01, "n": 12, "t": 3600}, ("0.01", "13")),
        ({"price": 1e-8, "qty": 1}, ("0.00000001", "1.5")),
    ],
)
def test_steps_of_different_values_do_not_meet(
    steps: dict[str, float], texts: tuple[str, str]
) -> None:
    properties = {name: {"multipleOf": step} for name, step in steps.items()}
    asked = schema_of({"type": "object", "properties": properties}, strict=True)
    (first, second, *_), (right, wrong) = steps, texts
    assert accepts(asked, f'{{"{first}":{right},"{second}":0}}')
    assert not accepts(asked, f'{{"{first}":{right},"{second}":{wrong}}}')


def test_steps_of_branches_meet_the_one_beside_them_alone() -> None:
    schema = {"type": "integer", "anyOf": [{"multipleOf": 60_000}, {"multipleOf": 99_999}]}
    for more, values in (({}, (60_000, 99_999)), ({"multipleOf": 7}, (420_000,))):
        asked = schema_of({**schema, **more}, strict=not more)
        assert all(accepts(asked, str(value)) for value in values)
        assert not accepts(asked, "5")
    assert compiled(schema_of({**schema, "multipleOf": 7})).ignored == ("multipleOf",)


def test_names_of_parts_alone_do_not_make_steps_meet() -> None:
    properties = {"cents": {"$id": "a", "multipleOf": 0.01}, "seconds": {"multipleOf": 3600}}
    asked = schema_of({"type": "object", "properties": properties}, strict=True)
    assert accepts(asked, '{"cents":0.07,"seconds":7200}')
    assert not accepts(asked, '{"cents":0.07,"seconds":7201}')


def test_ways_to_meet_are_not_counted_without_end() -> None:
    """Each definition stands twice in the one before it, and the last allows nothing."""
    defined: dict[str, Any] = {"d40": {"anyOf": []}}
    for level in range(40):
        after = {"$ref": f"#/$defs/d{level + 1}"}
        defined[f"d{level}"] = {"allOf": [after, after]}
    properties = {"never": {"$ref": "#/$defs/d0"}, "five": {"multipleOf": 5}}
    asked = schema_of({"type": "object", "properties": properties, "$defs": defined})
    assert refused(asked).reason == "Unsatisfiable schema: anyOf is empty"


def step_of(units: float) -> dict[str, Any]:
    return {"multipleOf": units}


# Two for a value each, which together are more than there is room for.
MEETING: list[dict[str, Any]] = [
    {"allOf": [step_of(9973), step_of(9967)]},
    {"allOf": [step_of(70_000), step_of(70_000)]},
    {"allOf": [step_of(1e-6), step_of(5000)]},
    {**step_of(9967), "anyOf": [step_of(9973), {"type": "string"}]},
    {**step_of(9967), "$ref": "#/$defs/v"},
    {"$defs": {"v": {"$anchor": "v", **step_of(9973)}}, "$ref": "#v", **step_of(9967)},
    {"allOf": [{"properties": {"a": step_of(9973)}}, {"properties": {"a": step_of(9967)}}]},
    {"allOf": [{"properties": {"a": step_of(9973)}}, {"additionalProperties": step_of(9967)}]},
    {"properties": {"ab": step_of(9973)}, "patternProperties": {"^a": step_of(9967)}},
    {"allOf": [{"items": step_of(9973)}, {"prefixItems": [step_of(9967)]}]},
    {"allOf": [{"$ref": "#/$defs/n"}, {"properties": {"n": {"properties": {"v": step_of(9967)}}}}]},
]
APART: list[dict[str, Any]] = [
    {"allOf": [{"properties": {"a": step_of(9973)}}, {"properties": {"b": step_of(9967)}}]},
    {"properties": {"a": step_of(9973)}, "additionalProperties": step_of(9967)},
    {"prefixItems": [step_of(9973)], "items": step_of(9967)},
    {"properties": {"a": {"$ref": "#/$defs/v"}, "b": step_of(9967)}},
    {"anyOf": [{"$ref": "#/$defs/v"}, step_of(9967)]},
]
DEFINED = {
    "v": step_of(9973),
    "n": {"properties": {"v": step_of(9973), "n": {"$ref": "#/$defs/n"}}},
}


@pytest.mark.parametrize("schema", MEETING)
def test_steps_that_hold_for_one_value_are_bounded_together(schema: dict[str, Any]) -> None:
    asked = {"$defs": DEFINED, **schema}
    assert "'multipleOf'" in refused(schema_of(asked, strict=True)).reason
    assert compiled(schema_of(asked)).ignored == ("multipleOf",)


@pytest.mark.parametrize("schema", APART)
def test_steps_that_hold_for_values_of_their_own_are_not(schema: dict[str, Any]) -> None:
    assert compiled(schema_of({"$defs": DEFINED, **schema}, strict=True)).ignored == ()


def test_all_steps_of_a_schema_together_compile_soon() -> None:
    """Each of them takes a tenth of a second."""
    steps = (19_997, 19_993, 19_991, 19_979, 19_973, 3_600_000, 86_400, 0.01)
    properties = {f"p{i}": step_of(step) for i, step in enumerate(steps)}
    schema, removed = fitted({"properties": {**properties, "again": step_of(19_997)}})
    kept = [name for name, part in schema["properties"].items() if part]
    assert kept == ["p0", "p1", "p2", "p3", "p4", "p7", "again"]
    assert removed == {"multipleOf": STEPS}


def test_what_holds_for_one_value_is_not_looked_for_for_ever() -> None:
    """Each definition takes the one before it twice."""
    definitions: dict[str, Any] = {"d0": step_of(3)}
    for i in range(1, 60):
        definitions[f"d{i}"] = {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2}
    multiples, removed = fitted({"$defs": definitions, "$ref": "#/$defs/d59"})
    assert (multiples["$defs"]["d0"], removed) == (step_of(3), {})


def test_bounds_beyond_64_bits_and_whole_counts_are_read() -> None:
    for schema in ({"minimum": 1 << 80}, {"maximum": LEAST}, {"exclusiveMinimum": 10**400}):
        (name,) = schema
        refusal = refused(schema_of({"type": "integer", **schema}))
        assert refusal.code is None
        assert f"'{name}'" in refusal.reason
    assert "out of range" in refused(schema_of({"default": 10**400})).reason
    beyond = {"type": "integer", "minimum": 1 << 80}
    for other, text in (({"type": "string"}, '"a"'), ({"type": "integer", "maximum": 5}, "4")):
        asked = schema_of({"anyOf": [beyond, other]}, strict=True)
        assert accepts(asked, text)
        assert not accepts(asked, str(1 << 80))
    assert "'minimum'" in refused(schema_of({"anyOf": [beyond, beyond]})).reason
    assert not accepts(schema_of({"maxLength": 1.0}, strict=True), '"ab"')
    for most in (10**11, 1 << 80):
        longest = {"type": "string", "minLength": 1, "maxLength": most}
        assert accepts(schema_of(longest, strict=True), '"a"')
        assert not accepts(schema_of({"type": "string", "minLength": most}, strict=True), '"a"')


def test_what_an_error_repeats_of_a_schema_says_nothing_of_its_size() -> None:
    for schema in ({"$ref": "#/$defs/limit"}, {"type": "limit"}):
        assert refused(schema_of(schema)).code is None


@pytest.mark.parametrize(
    ("form", "text", "reason"),
    [
        (Form.REGEX, "(", "unclosed group"),
        (Form.REGEX, "(?<=a)b", "look-around"),
        (Form.REGEX, r"\bParis\b", r"are not supported: /\bParis\b/"),
        (Form.GRAMMAR, "start: nowhere", "nowhere"),
        (Form.GRAMMAR, "no grammar at all", "neither Lark nor GBNF"),
        (Form.GRAMMAR, "start: %json {", "%json"),
        (Form.GRAMMAR, "start: %json {'a'}", "%json"),
    ],
)
def test_a_malformed_grammar_is_refused_with_the_reason(form: Form, text: str, reason: str) -> None:
    assert reason in refused(constraint.text_form(form, text, "p")).reason


def test_what_is_too_complex_is_refused() -> None:
    """Each definition takes what the one before it has, twice: 2 to the 12th alternatives."""
    definitions: dict[str, Any] = {"a0": {"type": "object"}}
    for i in range(1, 13):
        required = [{"type": "object", "required": [name]} for name in (f"x{i}", f"y{i}", f"z{i}")]
        before = {"$ref": f"#/$defs/a{i - 1}"}
        definitions[f"a{i}"] = {
            "allOf": [{"anyOf": [before, required[0]]}, {"anyOf": required[1:]}]
        }
    assert refused(schema_of({"$ref": "#/$defs/a12", "$defs": definitions})).code == TOO_COMPLEX


def test_too_many_symbols_are_too_complex() -> None:
    error = refusal("panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10\n<b>")
    assert (error.code, error.reason) == (TOO_COMPLEX, "the grammar has too many symbols")


def test_properties_that_take_seconds_to_compile_are_refused() -> None:
    properties = {f"p{i}": {} for i in range(3000)}
    error = refused(schema_of({"type": "object", "properties": properties}))
    assert (error.code, "too many properties" in error.reason) == (TOO_LARGE, True)


_CHAINS = """
import json
from radixgrove.protocol.constraints import constraint
from radixgrove.protocol.constraints.grammar import compile_constraint, compiler_threads
from tests.grammars import tokenizer
links = {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(2800)}
schema = json.dumps({"$ref": "#/$defs/0", "$defs": {**links, "2800": {"type": "string"}}})
rules = "start: r0\\n" + "".join(f'r{i}: "b" r{i+1}\\n' for i in range(3500)) + 'r3500: "a"'
asked = [
    constraint.json_schema(schema.encode(), "p"),
    constraint.text_form(constraint.Form.GRAMMAR, rules, "p"),
]
with compiler_threads(2, "test") as threads:
    for each in asked:
        assert threads.submit(compile_constraint, each, tokenizer(), 8).result().grammar
"""


def test_the_longest_chains_of_references_and_rules_end_no_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", _CHAINS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]


def test_an_object_of_two_thousand_properties_can_be_written() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}
    assert accepts(schema_of(schema), '{"p7":1,"p1999":2}')


def test_an_answer_of_many_readings_goes_further_with_a_matcher_of_its_own() -> None:
    """Each letter may begin a part anew, in as many ways as there are lists of letters."""
    parts = "|".join(f"[{first}-z]{{2,{30 + number}}}" for number, first in enumerate("abcdefgh"))
    text = LLMatcher.grammar_from_regex(f"({parts}){{0,3000}}")
    letters = Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=250)
    errors = []
    for long in (False, True):
        matcher = build_matcher(text, tokenizer(), long=long)
        for letter in letters:
            matcher.compute_bitmask()
            if not matcher.consume_tokens(encode(letter)):
                break
        errors.append(matcher.get_error())
    assert outgrown(errors[0])
    assert "too many ways to read the answer" in refusal(errors[0]).reason
    assert errors[1] == ""


def test_reasons_are_short_and_for_clients() -> None:
    for asked in (schema_of({"type": "x" * 10_000}), schema_of({"$ref": "#/" + "y" * 10_000})):
        reason = refused(asked).reason
        assert len(reason) < 400
        assert "<state>" not in reason

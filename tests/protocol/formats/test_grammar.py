"""Grammars of calls: what they let through reads as calls of the tools, and obeys their schemas."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import cache
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from radixgrove.protocol.constraints import constraint
from radixgrove.protocol.constraints.constraint import ConstraintError, Form
from radixgrove.protocol.constraints.grammar import build_matcher, load_tokenizer, token_of
from radixgrove.protocol.constraints.schema import type_of
from radixgrove.protocol.formats.grammar import CallGrammar, Extent, compile_calls
from radixgrove.protocol.formats.lark import ToolError
from radixgrove.protocol.formats.shapes import Calls, LooseBody, PythonBody
from radixgrove.protocol.formats.table import FORMATS
from radixgrove.protocol.openai.tools import Tool
from radixgrove.protocol.token_bytes import byte_characters
from radixgrove.worker.frontend.call_reader import Properties
from radixgrove.worker.frontend.markers import Markers
from tests.worker.frontend.samples import OFFERED, PROPERTIES, SAMPLES, TEXT, Turn, read

EOS = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Zürich", "a\nb"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, *, strict: bool = False) -> Tool:
    text = None if parameters is None else json.dumps(parameters)
    return Tool(name=name, parameters=text, strict=strict, param="tools[0].function.parameters")


TOOLS = (tool("weather", SCHEMA), tool("now", {"type": "object", "additionalProperties": False}))


@cache
def vocabulary(name: str, special: bool = False) -> tuple[Tokenizer, LLTokenizer, Markers]:
    """A token a byte, and the markers of a format, as special tokens or others."""
    tokenizer = Tokenizer(
        models.BPE(vocab={text: byte for byte, text in enumerate(byte_characters())}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", normalized=False)])
    markers = [AddedToken(text, normalized=False) for text in FORMATS[name].all_markers]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(markers)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return (
        tokenizer,
        load_tokenizer(tokenizer, size, [EOS]),
        Markers(FORMATS[name], tokenizer, ()),
    )


def matcher_of(name: str, extent: Extent = Extent.CALLS, **fields: Any) -> LLMatcher:
    calls = FORMATS[name].calls
    assert calls is not None
    wanted = {"tools": TOOLS, "parallel": True, "schemas": True, "text": None} | fields
    _, tokenizer, _ = vocabulary(name)
    compiled = compile_calls(CallGrammar(calls=calls, extent=extent, **wanted), tokenizer, 2)
    return build_matcher(compiled.grammar, tokenizer)


def ids_of(name: str, text: str) -> list[int]:
    """Tokens of an output; the marker within an argument was written letter by letter."""
    secret = "not </tool_call>"
    found: list[int] = []
    for place, part in enumerate(text.split(secret)):
        found += list(secret.encode()) if place else []
        found += vocabulary(name)[0].encode(part, add_special_tokens=False).ids
    return found


def takes(matcher: LLMatcher, ids: list[int]) -> bool:
    return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())


def walk(matcher: LLMatcher, tokenizer: LLTokenizer, seed: int) -> list[int]:
    """An answer drawn from the masks; it prefers to end."""
    draw = random.Random(seed)
    tokens: list[int] = []
    while not matcher.is_stopped() and len(tokens) < 2000:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: tokenizer.vocab_size])
        assert len(allowed)
        token = EOS if EOS in allowed and draw.random() < 0.3 else int(draw.choice(allowed))
        matcher.consume_token(token)
        tokens.append(token)
    return [token for token in tokens if token != EOS]


def turn_of(name: str, ids: list[int], offered: Properties = OFFERED) -> Turn:
    tokenizer, _, markers = vocabulary(name)
    runs = itertools.groupby(ids, lambda token: markers.chars.get(token))
    pieces = [char * len([*run]) if char else tokenizer.decode([*run]) for char, run in runs]
    return read(FORMATS[name], markers, pieces, offered=offered)[0]


def sample_tools() -> tuple[Tool, ...]:
    return tuple(
        tool(name, {"type": "object", "properties": PROPERTIES[name]}) for name in PROPERTIES
    )


NAMES = list(SAMPLES)


@pytest.mark.parametrize("name", FORMATS)
def test_grammars_and_readers_know_the_same_tokens(name: str) -> None:
    _, tokenizer, markers = vocabulary(name)
    for text in FORMATS[name].all_markers:
        assert markers.ids.get(text) == token_of(text, tokenizer)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_is_taught_to_write_passes(name: str) -> None:
    assert takes(matcher_of(name, tools=sample_tools()), ids_of(name, SAMPLES[name]))


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_passes_is_calls_that_obey(name: str, parallel: bool) -> None:
    tokenizer = vocabulary(name)[1]
    counts = set()
    for seed in range(12):
        ids = walk(matcher_of(name, parallel=parallel), tokenizer, seed)
        turn = turn_of(name, ids)
        assert turn.text.strip() == ""
        assert turn.read
        assert len(turn.ended) == len(turn.calls)
        counts.add(len(turn.calls))
        for called, arguments in turn.read:
            wanted = {each.name: each for each in TOOLS}[called]
            if called == "weather" and not isinstance(
                FORMATS[name].calls.body,  # type: ignore[union-attr]
                PythonBody | LooseBody,
            ):
                jsonschema.validate(arguments, SCHEMA)
            assert set(arguments) <= set(wanted.argument_types)
    assert counts == {1} or (parallel and max(counts) > 1)


@pytest.mark.parametrize("name", NAMES)
def test_other_names_do_not_pass(name: str) -> None:
    ids = ids_of(name, SAMPLES[name].replace("now", "how"))
    assert not takes(matcher_of(name, tools=sample_tools()), ids)


def _begins_with_a_token(name: str) -> bool:
    calls = FORMATS[name].calls
    if not isinstance(calls, Calls) or calls.bare:
        return False
    return calls.trigger.strip() in FORMATS[name].all_markers


@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize("name", ["deepseek-v3.2", "deepseek-v4.1", "kimi-k3"])
def test_where_no_single_token_begins_calls_they_come_behind_any_text(
    name: str, special: bool
) -> None:
    tokenizer, known, _ = vocabulary(name, special)
    calls = FORMATS[name].calls
    assert calls is not None
    wanted = CallGrammar(calls, TOOLS, True, True, Extent.ANSWER)
    grammar = compile_calls(wanted, known, 2).grammar
    where = r'<[^<]*where.*?parameter>\n|<\|open\|>argument key="where.*?argument<\|sep\|>'
    sample = re.sub(where, "", SAMPLES[name].replace(TEXT, "Paris"))
    sample = sample.removeprefix("<|open|>response<|sep|>")  # a prompt may end in it
    for text, passes in (
        ("Is 1 < 2? ", True),
        ("", True),
        ("Is 1 < 2? " + sample, True),
        (sample, True),
        ("So: " + sample.replace("now", "how"), False),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert takes(build_matcher(grammar, known), ids) == passes, text


@pytest.mark.parametrize("name", [name for name in NAMES if _begins_with_a_token(name)])
def test_behind_the_trigger_the_same_holds(name: str) -> None:
    calls = FORMATS[name].calls
    assert calls is not None
    first = ids_of(name, SAMPLES[name])
    matcher = matcher_of(name, Extent.REST, tools=sample_tools())
    taken = matcher.try_consume_tokens(first[1:])
    if calls.section[0] or getattr(calls.body, "listed", False):
        assert taken == len(first) - 1
    assert matcher.is_stopped()


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral"])
def test_an_answer_is_calls_or_what_else_was_asked_for(name: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    text = constraint.json_schema(json.dumps(schema).encode(), "response_format")
    sample = ids_of(name, SAMPLES[name])
    for ids, passes in (
        (sample, True),
        (list(b'{"x": 1}'), True),
        (list(b'{"y": "1"}'), False),
        (list(b"Hello"), False),
    ):
        matcher = matcher_of(name, Extent.ANSWER, tools=sample_tools(), text=text)
        assert takes(matcher, ids) == passes
    matcher = matcher_of("llama3", Extent.ANSWER, tools=sample_tools())
    assert takes(matcher, list(b"Hello, {world}"))


TAG = constraint.Tag(begin="<f>", schema=msgspec.Raw(b'{"const": 1}'), end="</f>")
TAGS = constraint.tags(constraint.Tags(structures=[TAG], triggers=["<f"]), "p")


@pytest.mark.parametrize(
    ("form", "said", "other"),
    [
        (constraint.text_form(Form.REGEX, "[a-c]{3}", "p"), "abc", "abd"),
        (constraint.text_form(Form.GRAMMAR, 'start: "x" %json {"const": 1}', "p"), "x1", "x2"),
        (constraint.text_form(Form.GRAMMAR, 'root ::= "x" | "y" root', "p"), "yx", "yz"),
        (constraint.choice(["yes", "no"], "p"), "no", "maybe"),
        (TAGS, "so <f>1</f>.", "so <f>2</f>."),
    ],
)
def test_every_form_of_an_answer_stands_beside_calls(
    form: constraint.Constraint, said: str, other: str
) -> None:
    for ids, passes in (
        (ids_of("hermes", SAMPLES["hermes"]), True),
        (list(said.encode()), True),
        (list(other.encode()), False),
    ):
        matcher = matcher_of("hermes", Extent.ANSWER, tools=sample_tools(), text=form)
        assert takes(matcher, ids) == passes


def test_arguments_that_refer_to_themselves_do_so_within_a_call_too() -> None:
    tree = {"type": "object", "properties": {"of": {"$ref": "#"}}, "additionalProperties": False}
    text = constraint.json_schema(b'{"const": 1}', "response_format")
    for name, call in (
        ("llama3", '{"name": "f", "parameters": %s}'),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
    ):
        for arguments, passes in (('{"of": {"of": {}}}', True), ('{"of": {"name": "f"}}', False)):
            matcher = matcher_of(name, Extent.ANSWER, tools=(tool("f", tree),), text=text)
            assert takes(matcher, ids_of(name, call % arguments)) == passes


def test_schemas_bind_strict_tools_always_and_others_by_setting() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    ids = ids_of("hermes", call)
    strict = (tool("weather", SCHEMA, strict=True),)
    assert takes(matcher_of("hermes", schemas=False), ids)
    assert not takes(matcher_of("hermes", schemas=True), ids)
    assert not takes(matcher_of("hermes", schemas=False, tools=strict), ids)


@pytest.mark.parametrize(
    ("parameters", "strict", "says"),
    [
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, False, "strin"),
        ({"type": "object", "properties": {"a": {"pattern": "("}}}, False, "expression"),
        ({"$ref": "https://example.org/schema"}, False, None),
        ({"type": "array"}, False, "object"),
        ({"type": "object", "minProperties": 3, "maxProperties": 1}, False, None),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, True, "propertyNames"),
    ],
)
def test_a_schema_that_cannot_be_enforced_names_its_tool(
    parameters: Any, strict: bool, says: str | None
) -> None:
    with pytest.raises(ToolError, match=says) as refused:
        matcher_of("hermes", tools=(TOOLS[1], tool("f", parameters, strict=strict)))
    assert refused.value.param == "tools[0].function.parameters"
    assert isinstance(refused.value, ConstraintError)


@pytest.mark.parametrize(
    ("parameters", "empty"),
    [
        (None, True),
        ({"type": "object", "properties": {}, "required": []}, True),
        ({"type": "object", "properties": {}, "required": None}, True),
        ({"type": "object", "properties": None, "required": None}, False),
        ({}, True),
        ({"$schema": "x", "description": "None."}, True),
        ({"type": ["object", "null"], "properties": {}}, True),
        ({"type": "object"}, False),
        ({"type": ["object"]}, False),
        ({"properties": {}, "additionalProperties": True}, False),
    ],
)
def test_a_tool_without_parameters_is_called_without_any(parameters: Any, empty: bool) -> None:
    called = (tool("f", parameters),)
    for name, text in (
        ("hermes", '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
        ("mistral", "[TOOL_CALLS]f[ARGS]%s"),
    ):
        assert takes(matcher_of(name, tools=called), ids_of(name, text % "{}"))
        assert takes(matcher_of(name, tools=called), ids_of(name, text % '{"a": 1}')) != empty
    call = one_argument("qwen3-coder", "a", "b")
    assert takes(matcher_of("qwen3-coder", tools=called), ids_of("qwen3-coder", call)) != empty


def test_messages_are_thoughts_and_then_one_call_or_an_answer() -> None:
    thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    final = "<|channel|>final<|message|>Yes."
    for text, extents in (
        (thoughts + call, {Extent.CALLS, Extent.ANSWER}),
        (call, {Extent.CALLS, Extent.ANSWER}),
        (thoughts + final, {Extent.ANSWER}),
        (call.replace("now", "how"), set()),
        ("Yes.", set()),
    ):
        for extent in (Extent.CALLS, Extent.ANSWER):
            assert takes(matcher_of("gpt-oss", extent), ids_of("gpt-oss", text)) == (
                extent in extents
            )


def test_what_a_format_cannot_hold_to_is_refused_or_named() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    calls = FORMATS["qwen3-coder"].calls
    assert calls is not None
    _, tokenizer, _ = vocabulary("qwen3-coder")
    wanted = CallGrammar(calls, (tool("f", schema),), True, True, Extent.CALLS)
    assert compile_calls(wanted, tokenizer, 2).ignored == ("maxLength",)
    for name, says in (("qwen3-coder", "maxLength"), ("llama4", "no JSON")):
        with pytest.raises(ToolError, match=says):
            matcher_of(name, tools=(tool("f", schema, strict=True),))


# As pydantic writes them: values that others define, that may be nothing, or of several types.
VALUES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "color": ({"$ref": "#/$defs/Color"}, ["red"], ["green"]),
    "size": (
        {"anyOf": [{"enum": ["S", "M"]}, {"type": "null"}]},
        ["S", "M", None],
        ["L", 5],
    ),
    "kind": (
        {"type": "string", "oneOf": [{"const": "x", "title": "X"}, {"const": "y"}]},
        ["x", "y"],
        ["z"],
    ),
    "shade": ({"allOf": [{"$ref": "#/$defs/Color"}, {"type": "string"}]}, ["red"], ["green"]),
    "note": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["a\nb", "", "nothing", None], []),
    "either": (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        ["x [1]", [1, 2]],
        [["a"], {"a": 1}],
    ),
    "count": ({"type": ["integer", "null"]}, [3, None], ["three"]),
    "anything": ({}, ["x", {"a": ["b"]}, 1.5, True], []),
    "child": ({"$ref": "#/properties/count"}, [3, None], ["three"]),
    "nested": (
        {"type": "object", "properties": {"of": {"$ref": "#/properties/nested"}}},
        [{"of": {"of": {}}}],
        [{"of": {"of": 5}}],
    ),
}
DEFINITIONS = {"Color": {"enum": ["red", "blue"], "type": "string"}}


def one_argument(name: str, key: str, value: Any) -> str:
    """A call of `f` with one argument, as these formats write it."""
    text = value if isinstance(value, str) else json.dumps(value)
    flag = "true" if isinstance(value, str) else "false"
    kind = type_of(value)
    return {
        "qwen3-coder": f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n"
        "</function>\n</tool_call>",
        "glm": f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n"
        "</tool_call>",
        "deepseek-v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        f'<｜DSML｜parameter name="{key}" string="{flag}">{text}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "kimi-k3": '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
    }[name]


@pytest.mark.parametrize("key", VALUES)
@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "deepseek-v3.2", "kimi-k3"])
def test_a_value_between_tags_obeys_and_is_read_as_it_was_meant(name: str, key: str) -> None:
    """A text stands as it is wherever one may come, and nowhere else."""
    schema, passing, others = VALUES[key]
    properties = {"count": VALUES["count"][0], key: schema}
    if key == "nested":
        properties = {key: schema}
    called = tool("f", {"type": "object", "$defs": DEFINITIONS, "properties": properties})
    if key == "color":  # as of a model that refers to itself
        whole = {"type": "object", "properties": properties}
        called = tool("f", {"$ref": "#/$defs/F", "$defs": DEFINITIONS | {"F": whole}})
    for value in [*passing, *others]:
        ids = (
            vocabulary(name)[0].encode(one_argument(name, key, value), add_special_tokens=False).ids
        )
        assert takes(matcher_of(name, tools=(called,)), ids) == (value in passing), value
        if value in passing:
            assert turn_of(name, ids, {"f": called.argument_types}).read == [("f", {key: value})]


@pytest.mark.parametrize(
    ("key", "text", "passes"),
    [
        ("color", "'red'", True),
        ("color", "'green'", False),
        ("size", "None", True),
        ("size", "'L'", False),
        ("note", "5", False),
        ("count", "None", True),
        ("anything", "[1]", True),
    ],
)
def test_literals_are_of_the_types_that_others_define(key: str, text: str, passes: bool) -> None:
    schema = {"type": "object", "$defs": DEFINITIONS, "properties": {key: VALUES[key][0]}}
    text = text.replace("'", '"')
    ids = ids_of("llama4", f"[f({key}={text})]")
    assert takes(matcher_of("llama4", tools=(tool("f", schema),)), ids) == passes


def test_an_argument_without_a_value_is_left_out() -> None:
    never = {"type": "string", "enum": [1]}
    schema = {"type": "object", "properties": {"x": never, "count": {"type": "integer"}}}
    matcher = matcher_of("llama4", tools=(tool("f", schema),))
    for text, passes in (("[f(count=5)]", True), ("[f()]", True), ("[f(x=)]", False)):
        assert takes(matcher.deep_copy(), ids_of("llama4", text)) == passes


def test_what_tags_cannot_hold_to_is_named_wherever_it_stands() -> None:
    text = {"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}
    number = {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}
    schema = {
        "type": "object",
        "$defs": {"Code": {"type": "string", "pattern": "^[A-Z]$"}},
        "properties": {"a": text, "b": number},
        "minProperties": 1,
    }
    calls = FORMATS["glm"].calls
    assert calls is not None
    _, tokenizer, _ = vocabulary("glm")
    wanted = CallGrammar(calls, (tool("f", schema),), True, True, Extent.CALLS)
    assert set(compile_calls(wanted, tokenizer, 2).ignored) == {
        *("pattern", "minimum", "minProperties"),
    }
    with pytest.raises(ToolError, match="strict"):
        matcher_of("glm", tools=(tool("f", schema, strict=True),))

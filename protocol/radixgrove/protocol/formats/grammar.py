"""Grammars of calls, in the format of a model: only workers import this.

A call of such a grammar names one of the tools and has arguments of its schema. Where they are no
JSON (`tagged`, `literals`), they are held to less of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from llguidance import LLTokenizer

from radixgrove.protocol.constraints.constraint import Constraint, ConstraintError, Form
from radixgrove.protocol.constraints.flatten import text_expression
from radixgrove.protocol.constraints.grammar import Compiled, compile_grammar
from radixgrove.protocol.constraints.schema import ANNOTATIONS
from radixgrove.protocol.constraints.values import Values
from radixgrove.protocol.formats.lark import OF_ROOTS, OPTIONS, Lark, ToolError
from radixgrove.protocol.formats.literals import LOOSE, PYTHON, literal_arguments
from radixgrove.protocol.formats.shapes import (
    Calls,
    Channels,
    JsonBody,
    LooseBody,
    NamedBody,
    PythonBody,
    TaggedBody,
)
from radixgrove.protocol.formats.tagged import tagged_call
from radixgrove.protocol.openai.tools import INPUT, Tool

_ANY_OBJECT = '{"type":"object"}'
_NO_ARGUMENTS = '{"type":"object","additionalProperties":false}'
_MARKUP = """
BLANKS: /[ \\t\\n]{1,8}/
DIGITS: /[0-9]{1,4}/
TEXT: /(.|\\n)+/
PLAIN: /[ \\t\\r\\n]*[^ \\t\\r\\n\\[{](.|\\n)*/
"""


class Extent(StrEnum):
    """What a grammar of calls is of."""

    CALLS = "calls"  # an answer that is calls
    REST = "rest"  # what follows the format's trigger
    ANSWER = "answer"  # an answer with calls, or without


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """What is to be compiled: calls of these tools, each held to its schema if `schemas`.

    `text`: what an `ANSWER` without calls must be; None: any text.
    """

    calls: Calls | Channels
    tools: Sequence[Tool]
    parallel: bool
    schemas: bool
    extent: Extent
    text: Constraint | None = None

    @property
    def identity(self) -> str:
        """Equal for equal grammars."""
        text = None if self.text is None else (self.text.form, self.text.strict, self.text.text)
        return repr((self.calls, self.tools, self.parallel, self.schemas, self.extent, text))


def compile_calls(wanted: CallGrammar, tokenizer: LLTokenizer, whitespace: int) -> Compiled:
    """In one of `compiler_threads`, its first mask included.

    Raises:
        ToolError: a tool's schema is malformed, or cannot be enforced and must be.
        ConstraintError: the whole is too complex, or what an answer may be instead is at fault.
    """
    lark = Lark(tokenizer, whitespace)
    calls = wanted.calls
    names = []
    if isinstance(calls, Channels):
        start = _messages(lark, calls, wanted)
        return _finished(lark, [f"start: {start}", _MARKUP])
    for number, tool in enumerate(wanted.tools):
        raw = isinstance(calls.body, TaggedBody | PythonBody | LooseBody)
        schema = _schema_of(lark, tool, schemas=wanted.schemas, raw=raw)
        names.append(f"call_{number}")
        if calls.bare and wanted.text is not None and isinstance(calls.body, JsonBody):
            call = lark.schema(f"tool_{number}", _call_schema(calls.body, tool, schema))
        else:
            call = _call(lark, calls.body, tool, schema, number)
        lark.rules.append(f"call_{number}: {call}")
    lark.rules.append(f"one: {' | '.join(names)}")
    start = _whole(lark, calls, wanted)
    if wanted.extent is Extent.ANSWER and wanted.text is not None:
        start = f"({start}) | ({_framed(lark, calls, lark.constraint('text', wanted.text))})"
    elif wanted.extent is Extent.ANSWER:
        start = _or_any_text(lark, calls, wanted, start)
    head = [f"start: {start}", _MARKUP]
    if isinstance(calls.body, PythonBody):
        head.append(PYTHON)
    if isinstance(calls.body, LooseBody):
        head += [LOOSE.replace("QUOTE", lark.literal(calls.body.quote))]
    return _finished(lark, head)


def _finished(lark: Lark, head: list[str]) -> Compiled:
    source = "\n".join(["%llguidance {}", *head, *lark.rules])
    parts = [{"name": "calls", "lark_grammar": source}, *lark.grammars]
    grammar = json.dumps({"grammars": parts})
    compile_grammar(grammar, lark.tokenizer)
    return Compiled(grammar, tuple(lark.ignored))


def _messages(lark: Lark, channels: Channels, wanted: CallGrammar) -> str:
    """Thoughts, then one call, or an answer behind what else there is to say."""

    def header(channel: str, recipient: str = "", form: str = "") -> str:
        return lark.literal(channels.channel + channel + recipient + form + channels.message)

    following = lark.literal(channels.end + channels.start + channels.role)
    lark.rules.append(f"thoughts: {header(channels.thoughts)} TEXT? {following}")
    lark.rules.append(f"aside: {header(channels.calls)} TEXT? {following}")
    names = []
    for number, tool in enumerate(wanted.tools):
        schema = _schema_of(lark, tool, schemas=wanted.schemas)
        recipient = channels.recipient.replace("{name}", tool.name)
        arguments = lark.schema(f"tool_{number}", schema)
        begin = header(channels.calls, recipient, channels.form)
        lark.rules.append(f"call_{number}: {begin} {arguments}")
        names.append(f"call_{number}")
    if wanted.extent is Extent.ANSWER:
        answer = "TEXT?" if wanted.text is None else lark.constraint("text", wanted.text)
        names.append(f"({header(channels.answer)} {answer})")
    return f"(thoughts | aside)* ({' | '.join(names)})"


def _whole(lark: Lark, calls: Calls, wanted: CallGrammar) -> str:
    """All calls of an answer, or what follows their trigger."""
    begin, end = (lark.literal(text) for text in calls.call)
    many = wanted.parallel
    one = f"BLANKS? one {'BLANKS?' if end else ''} {end}"
    if isinstance(calls.body, PythonBody) or (
        isinstance(calls.body, JsonBody) and calls.body.listed
    ):
        more = '(BLANKS? "," BLANKS? one)*' if many else ""
        one = f'BLANKS? "[" one {more} "]" {end}'
        many = False
    elif isinstance(calls.body, JsonBody) and calls.body.separator:
        more = f"({json.dumps(calls.body.separator)} one)*" if many else ""
        one = f"one {more}"
        many = False
    if not calls.section[0]:
        if wanted.extent is Extent.REST:
            return one  # behind it text is free again, up to the next trigger
        again = f"(BLANKS? {begin} {one})*" if many else ""
        return f"{begin if not calls.bare else ''} {one} {again}"
    section, section_end = (lark.literal(text.strip()) for text in calls.section)
    if calls.bare:
        section = section_end = ""
    again = f"(BLANKS? {begin} {one})*" if many else ""
    opening = "" if wanted.extent is Extent.REST else section
    closing = f"BLANKS? {section_end}" if section_end else ""
    whole = f"{opening} BLANKS? {begin} {one} {again} {closing}"
    return _framed(lark, calls, "", whole) if wanted.extent is Extent.CALLS else whole


def _framed(lark: Lark, calls: Calls, text: str, whole: str = "") -> str:
    """An answer's text, and its calls, with what may stand around them."""
    begin, end, last = (f"({lark.literal(f)})?" if f else "" for f in (*calls.around, calls.last))
    return f"{begin} {text} {end} {whole} {last}"


def _or_any_text(lark: Lark, calls: Calls, wanted: CallGrammar, whole: str) -> str:
    """Calls, or a text that does not begin like them; without a bare form, calls behind a text."""
    bare = calls.bare
    if bare:
        lark.rules.append(rf"OTHER: /[^\{bare}](.|\n)*/")
        return f"({whole}) | OTHER"
    if calls.around[0]:  # markers that are no text
        return _framed(lark, calls, "TEXT?", f"({whole})?")
    before = lark.until("before", calls.trigger.strip())
    rest = _whole(lark, calls, dataclasses.replace(wanted, extent=Extent.REST))
    many = "*" if wanted.parallel and not calls.section[0] else "?"
    return f"({before} {rest}){many} TEXT?"


def _schema_of(lark: Lark, tool: Tool, *, schemas: bool, raw: bool = False) -> dict[str, Any]:
    """The schema of a tool's arguments, as it is enforced; `raw`: but for a custom tool's text,
    which stands between tags as it is."""
    text = _ANY_OBJECT
    if tool.input is not None and not raw:
        text = _pattern_schema(tool, tool.input)
    elif schemas or tool.strict or tool.custom:
        text = _NO_ARGUMENTS if tool.parameters is None else _object_schema(tool.parameters, tool)
    constraint = Constraint(form=Form.JSON_SCHEMA, text=text, param=tool.param, strict=tool.strict)
    try:
        schema: dict[str, Any] = lark.compiled("", constraint)["json_schema"]
    except ConstraintError as error:
        raise ToolError(error, tool.param) from None
    return schema


def _pattern_schema(tool: Tool, given: Constraint) -> str:
    """Of a custom tool, where its text is a JSON string."""
    assert tool.parameters is not None
    schema = msgspec.json.decode(tool.parameters)
    try:
        schema["properties"][INPUT]["pattern"] = f"^{text_expression(given)}$"
    except ConstraintError as error:
        raise ToolError(error, tool.param) from None
    return json.dumps(schema)


def _object_schema(parameters: str, tool: Tool) -> str:
    """Arguments are an object, whether the schema says so or not; one of no properties is empty."""
    schema = msgspec.json.decode(parameters)
    if not isinstance(schema, dict):
        return _ANY_OBJECT if schema else parameters
    if not schema.keys() - ANNOTATIONS:
        return _NO_ARGUMENTS
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        error = ConstraintError("the arguments of a function are an object")
        raise ToolError(error, tool.param)
    schema["type"] = "object"
    said = {key for key in schema if key not in ANNOTATIONS and schema[key] not in ([], None)}
    if said == {"type", "properties"} and schema["properties"] == {}:
        return _NO_ARGUMENTS
    return json.dumps(schema)


def _call_schema(body: JsonBody, tool: Tool, schema: dict[str, Any]) -> dict[str, Any]:
    """A call as a JSON value: beside another one; its tokens are those of JSON."""
    own = {key: value for key, value in schema.items() if key not in OF_ROOTS}
    part = {key: schema[key] for key in OPTIONS if key in schema} | Values(schema).alone(own)
    whole = {key: part[key] for key in OF_ROOTS if key in part}
    arguments = {key: value for key, value in part.items() if key not in whole}
    return whole | {
        "type": "object",
        "properties": {"name": {"const": tool.name}, body.arguments: arguments},
        "required": ["name", body.arguments],
        "additionalProperties": False,
    }


def _call(lark: Lark, body: object, tool: Tool, schema: dict[str, Any], number: int) -> str:
    """One call, without what is around each."""
    name = tool.name
    match body:
        case JsonBody():
            head = f'{{"name": {json.dumps(name)}, "{body.arguments}": '
            return f"{json.dumps(head)} {lark.schema(f'tool_{number}', schema)} {json.dumps('}')}"
        case NamedBody():
            head = lark.filled(body.headers[0], name=name)
            return f"{head} {lark.schema(f'tool_{number}', schema)} {lark.literal(body.footer)}"
        case TaggedBody():
            return tagged_call(lark, body, tool, schema, number)
        case PythonBody() | LooseBody() if tool.strict:
            reason = "it is strict, and this model's way to write calls has no JSON to hold to it"
            raise ToolError(ConstraintError(reason), tool.param)
        case PythonBody():
            arguments = literal_arguments(lark, schema, number, body)
            return f'{json.dumps(name + "(")} {arguments} ")"'
        case LooseBody():
            head = json.dumps(body.header.format(name=name) + "{")
            return f'{head} {literal_arguments(lark, schema, number, body)} "}}"'
    raise TypeError(body)

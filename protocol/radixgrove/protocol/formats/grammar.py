"""Grammars of calls, in the format of a model: only workers import this.

A call of such a grammar names one of the tools and has arguments of its schema. In formats without
JSON, arguments are held to their names and to the types that the schema gives them; in those with
tags, values that are no texts to their schemas.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
from llguidance import LLTokenizer

from radixgrove.protocol.constraints.constraint import (
    TOO_COMPLEX,
    Constraint,
    ConstraintError,
    Form,
)
from radixgrove.protocol.constraints.flatten import expression_of
from radixgrove.protocol.constraints.grammar import (
    Compiled,
    compile_constraint,
    compile_grammar,
    token_of,
)
from radixgrove.protocol.constraints.schema import ANNOTATIONS, type_of
from radixgrove.protocol.constraints.values import ALL_TYPES, Values
from radixgrove.protocol.formats.shapes import (
    Calls,
    Channels,
    JsonBody,
    LooseBody,
    NamedBody,
    PythonBody,
    TaggedBody,
)
from radixgrove.protocol.openai.tools import INPUT, Tool

_PLACES = re.compile(r"\{(name|id|number|key|string|type)\}")
_OPTIONS = ("x-guidance",)  # of the compiler
_OF_ROOTS = ("$defs", "definitions", *_OPTIONS)  # what only a schema as a whole has
_CONTAINERS = frozenset({"array", "object"})
# Keywords that texts between tags cannot be held to, nor plain values that stand where a text may.
_OF_TEXTS = frozenset({"minLength", "maxLength", "pattern", "format", "enum", "const", "not"})
_OF_NUMBERS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# What tags hold the arguments as a whole to.
_OF_ARGUMENTS = frozenset({"type", "properties", "required", "additionalProperties", *_OF_ROOTS})
# Of rules and schemas, in which definitions may come again and again.
_MOST_BYTES = 4 << 20
_ANY_OBJECT = '{"type":"object"}'
_NO_ARGUMENTS = '{"type":"object","additionalProperties":false}'
_MARKUP = """
BLANKS: /[ \\t\\n]{1,8}/
DIGITS: /[0-9]{1,4}/
TEXT: /(.|\\n)+/
PLAIN: /[ \\t\\r\\n]*[^ \\t\\r\\n\\[{](.|\\n)*/
"""
_LITERALS = r"""
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
INTEGER: /-?(0|[1-9][0-9]*)/
"""
_PYTHON = (
    _LITERALS
    + r"""
STRING: /"([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*'/
boolean: "True" | "False"
null: "None"
list: "[" (value (", " value)*)? "]"
dict: "{" (STRING ": " value (", " STRING ": " value)*)? "}"
string: STRING
value: string | NUMBER | boolean | null | list | dict
"""
)
_LOOSE = (
    _LITERALS
    + r"""
KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/
boolean: "true" | "false"
null: "null"
list: "[" (value ("," value)*)? "]"
dict: "{" (KEY ":" value ("," KEY ":" value)*)? "}"
string: QUOTE TEXT? QUOTE
value: string | NUMBER | boolean | null | list | dict
"""
)
_RULES = {
    "string": "string",
    "integer": "INTEGER",
    "number": "NUMBER",
    "boolean": "boolean",
    "null": "null",
    "array": "list",
    "object": "dict",
}


class ToolError(ConstraintError):
    """A tool's arguments cannot be held to their schema."""

    def __init__(self, error: ConstraintError, param: str) -> None:
        super().__init__(error.reason, error.code)
        self.param = param


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


@dataclass(slots=True)
class _Lark:
    """A grammar as it grows."""

    tokenizer: LLTokenizer
    whitespace: int  # most characters of it between two tokens of JSON
    rules: list[str] = field(default_factory=list)
    grammars: list[dict[str, Any]] = field(default_factory=list)
    ignored: dict[str, None] = field(default_factory=dict)
    size: int = 0  # of what grows with the tools' schemas

    def literal(self, text: str) -> str:
        """A text of the format: its markers as tokens, the rest as it stands."""
        return " ".join(self._literals(text))

    def _literals(self, text: str) -> Iterable[str]:
        for piece in _marked(text, self.tokenizer):
            yield f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece)

    def until(self, rule: str, end: str, *, plain: bool = False) -> str:
        """A rule of any text, and the `end` that follows it; `plain`: of a text that does not begin
        like an array or an object."""
        pieces = list(_marked(end, self.tokenizer))
        first = pieces[0] if pieces else ""
        text = r"([ \t\r\n]*[^ \t\r\n\[{](.|\n)*)?" if plain else r"(.|\n)*"
        if isinstance(first, int):  # a token, which no text has
            return f"{'PLAIN' if plain else 'TEXT'}? {self.literal(end)}"
        if len(pieces) == 1:
            self.rules.append(f"{rule}[lazy]: /{text}/ {json.dumps(end)}")
            return rule
        self.rules.append(f"{rule.upper()}: /{text}{_regex(first)}/")
        return f"{rule.upper()} {self.literal(end[len(first) :])}"

    def charge(self, size: int) -> None:
        """So many bytes become part of the grammar.

        Raises:
            ConstraintError: it has too many.
        """
        self.size += size
        if self.size > _MOST_BYTES:
            raise ConstraintError("the tools' schemas repeat too much", TOO_COMPLEX)

    def schema(self, name: str, schema: dict[str, Any]) -> str:
        self.charge(len(json.dumps(schema)))
        self.grammars.append({"name": name, "json_schema": schema})
        return f"@{name}"

    def constraint(self, name: str, constraint: Constraint) -> str:
        self.grammars.append(self.compiled(name, constraint))
        return f"@{name}"

    def compiled(self, name: str, constraint: Constraint) -> dict[str, Any]:
        """A constraint as a part of the whole."""
        compiled = compile_constraint(constraint, self.tokenizer, self.whitespace)
        self.ignored.update(dict.fromkeys(compiled.ignored))
        if not compiled.grammar.startswith('{"grammars"'):
            return {"name": name, "lark_grammar": compiled.grammar}
        (part,) = json.loads(compiled.grammar)["grammars"]
        return {key: value for key, value in part.items() if value is not None} | {"name": name}


def compile_calls(wanted: CallGrammar, tokenizer: LLTokenizer, whitespace: int) -> Compiled:
    """In one of `compiler_threads`, its first mask included.

    Raises:
        ToolError: a tool's schema is malformed, or cannot be enforced and must be.
        ConstraintError: the whole is too complex, or what an answer may be instead is at fault.
    """
    lark = _Lark(tokenizer, whitespace)
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
        head.append(_PYTHON)
    if isinstance(calls.body, LooseBody):
        head += [_LOOSE.replace("QUOTE", lark.literal(calls.body.quote))]
    return _finished(lark, head)


def _finished(lark: _Lark, head: list[str]) -> Compiled:
    source = "\n".join(["%llguidance {}", *head, *lark.rules])
    parts = [{"name": "calls", "lark_grammar": source}, *lark.grammars]
    grammar = json.dumps({"grammars": parts})
    compile_grammar(grammar, lark.tokenizer)
    return Compiled(grammar, tuple(lark.ignored))


def _messages(lark: _Lark, channels: Channels, wanted: CallGrammar) -> str:
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


def _whole(lark: _Lark, calls: Calls, wanted: CallGrammar) -> str:
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


def _framed(lark: _Lark, calls: Calls, text: str, whole: str = "") -> str:
    """An answer's text, and its calls, with what may stand around them."""
    begin, end, last = (f"({lark.literal(f)})?" if f else "" for f in (*calls.around, calls.last))
    return f"{begin} {text} {end} {whole} {last}"


def _or_any_text(lark: _Lark, calls: Calls, wanted: CallGrammar, whole: str) -> str:
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


def _schema_of(lark: _Lark, tool: Tool, *, schemas: bool, raw: bool = False) -> dict[str, Any]:
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


def _expression(given: Constraint) -> str:
    """What a custom tool's text must be, as a regular expression of all of it."""
    if given.form is Form.REGEX:
        return f"(?:{given.text})"
    return expression_of(given.text)


def _pattern_schema(tool: Tool, given: Constraint) -> str:
    """Of a custom tool, where its text is a JSON string."""
    assert tool.parameters is not None
    schema = msgspec.json.decode(tool.parameters)
    try:
        schema["properties"][INPUT]["pattern"] = f"^{_expression(given)}$"
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
    said = {key for key in schema if key not in ANNOTATIONS and schema[key] != []}
    if said == {"type", "properties"} and schema["properties"] == {}:
        return _NO_ARGUMENTS
    return json.dumps(schema)


def _call_schema(body: JsonBody, tool: Tool, schema: dict[str, Any]) -> dict[str, Any]:
    """A call as a JSON value: beside another one; its tokens are those of JSON."""
    own = {key: value for key, value in schema.items() if key not in _OF_ROOTS}
    part = {key: schema[key] for key in _OPTIONS if key in schema} | Values(schema).alone(own)
    whole = {key: part[key] for key in _OF_ROOTS if key in part}
    arguments = {key: value for key, value in part.items() if key not in whole}
    return whole | {
        "type": "object",
        "properties": {"name": {"const": tool.name}, body.arguments: arguments},
        "required": ["name", body.arguments],
        "additionalProperties": False,
    }


def _call(lark: _Lark, body: object, tool: Tool, schema: dict[str, Any], number: int) -> str:
    """One call, without what is around each."""
    name = tool.name
    match body:
        case JsonBody():
            head = f'{{"name": {json.dumps(name)}, "{body.arguments}": '
            return f"{json.dumps(head)} {lark.schema(f'tool_{number}', schema)} {json.dumps('}')}"
        case NamedBody():
            head = _filled(lark, body.headers[0], name=name)
            return f"{head} {lark.schema(f'tool_{number}', schema)} {lark.literal(body.footer)}"
        case TaggedBody():
            return _tagged(lark, body, tool, schema, number)
        case PythonBody() | LooseBody() if tool.strict:
            reason = "it is strict, and this model's way to write calls has no JSON to hold to it"
            raise ToolError(ConstraintError(reason), tool.param)
        case PythonBody():
            arguments = _literal_arguments(lark, schema, number, body)
            return f'{json.dumps(name + "(")} {arguments} ")"'
        case LooseBody():
            head = json.dumps(body.header.format(name=name) + "{")
            return f'{head} {_literal_arguments(lark, schema, number, body)} "}}"'
    raise TypeError(body)


def _tagged(lark: _Lark, body: TaggedBody, tool: Tool, schema: dict[str, Any], number: int) -> str:
    parts = [_filled(lark, body.header.strip("\n"), name=tool.name), "BLANKS?"]
    values = Values(schema)
    arguments = values.members()
    options = {key: schema[key] for key in _OPTIONS if key in schema}
    _name_ignored(lark, set(arguments) - ANNOTATIONS - _OF_ARGUMENTS, tool)
    required = arguments.get("required", [])
    properties = arguments.get("properties") or {}
    for place, (key, given) in enumerate(properties.items()):
        if given is False or values.listed(given) == []:
            continue
        value = _Value(values.plain(given), values, options | values.alone(given))
        entry = _entry(lark, body, tool, key, value, f"value_{number}_{place}")
        lark.charge(len(entry))
        parts.append(f"({entry} BLANKS?){'' if key in required else '?'}")
    if not properties and arguments.get("additionalProperties") is not False:
        anything = lark.until(f"any_{number}", body.after)
        lark.rules.append(f"KEY_{number}: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/")
        before = _PLACES.split(body.before)
        head = lark.literal(before[0]) + f" KEY_{number} "
        rest = body.before.split("{key}", 1)[1]
        rest = rest.replace("{string}", "true").replace("{type}", "string")
        parts.append(f"({head} {lark.literal(rest)} {anything} BLANKS?)*")
    parts.append(lark.literal(body.footer.strip("\n")))
    return " ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class _Value:
    """What an argument may be, by a part of its tool's schema."""

    own: Any  # the part, or that to which it refers
    values: Values
    schema: dict[str, Any]  # the part with what it refers to

    def of_types(self, types: Collection[str]) -> dict[str, Any]:
        """A schema of those values that are of one of these types."""
        own = {key: value for key, value in self.schema.items() if key not in _OF_ROOTS}
        roots = {key: value for key, value in self.schema.items() if key in _OF_ROOTS}
        return roots | {"allOf": [own, {"type": sorted(types)}]}


def _entry(lark: _Lark, body: TaggedBody, tool: Tool, key: str, value: _Value, rule: str) -> str:
    """An argument between its tags: a text as it stands, other values as JSON."""
    after = lark.literal(body.after)

    def tag(types: Collection[str]) -> str:
        return _tag(lark, body, key, types)

    if tool.input is not None:
        return f"{tag(('string',))} {_raw_input(lark, body, tool, tool.input, rule)}"
    listed = value.values.listed(value.own)
    if listed is not None:
        texts = [json.dumps(each) for each in listed if isinstance(each, str)]
        others = [each for each in listed if not isinstance(each, str)]
        words = [json.dumps(json.dumps(each)) for each in others]
        kinds = dict.fromkeys(type_of(each) for each in others)
        entries = [(("string",), texts), (tuple(kinds), words)]
        found = [f"{tag(types)} ({' | '.join(each)}) {after}" for types, each in entries if each]
        return f"({' | '.join(found)})"
    types = value.values.types(value.own)
    others_of = _written(types - {"string"})
    if "string" not in types:
        return f"{tag(others_of)} {lark.schema(rule, value.schema)} {after}"
    keywords = value.values.keywords(value.own)
    _name_ignored(lark, keywords & _OF_TEXTS, tool)
    containers = types & _CONTAINERS
    flagged = "{string}" in body.before or "{type}" in body.before
    if not flagged:  # a text that reads as a number, a truth or nothing is that
        _name_ignored(lark, keywords & _OF_NUMBERS, tool)
    if flagged and others_of:
        other = lark.schema(f"{rule}_other", value.of_types(others_of))
        text = f"{tag(('string',))} {lark.until(rule, body.after)}"
        return f"({text} | {tag(others_of)} {other} {after})"
    if containers:
        other = lark.schema(f"{rule}_other", value.of_types(containers))
        plain = lark.until(rule, body.after, plain=True)
        return f"{tag(('string',))} ({plain} | {other} {after})"
    return f"{tag(('string',))} {lark.until(rule, body.after)}"


def _written(types: Collection[str]) -> tuple[str, ...]:
    """Names of types as tags have them, which know numbers alone."""
    numbers = ("number" if name == "integer" else name for name in sorted(types))
    return tuple(dict.fromkeys(numbers))


def _tag(lark: _Lark, body: TaggedBody, key: str, types: Collection[str]) -> str:
    """What stands before a value of one of these types."""
    if body.attributes:
        key = key.replace("&", "&amp;").replace('"', "&quot;")
    string = "true" if "string" in types else "false"
    before, found, after = body.before.partition("{type}")
    filled = _filled(lark, before, key=key, string=string)
    if not found:
        return filled
    return f"{filled} ({' | '.join(map(json.dumps, types))}) {lark.literal(after)}"


def _raw_input(lark: _Lark, body: TaggedBody, tool: Tool, given: Constraint, rule: str) -> str:
    """A custom tool's text, and the tag behind it."""
    try:
        # One terminal with the tag, so that a text that could go on does not hide it.
        expression = re.sub(r"\\.|/", _slash, _expression(given), flags=re.DOTALL)
    except ConstraintError:
        try:
            return f"{lark.constraint(rule, given)} {lark.literal(body.after)}"
        except ConstraintError as error:
            raise ToolError(error, tool.param) from None
    first, *_ = [*_marked(body.after, lark.tokenizer), 0]
    if isinstance(first, int):
        lark.rules.append(f"{rule.upper()}: /{expression}/")
        return f"{rule.upper()} {lark.literal(body.after)}"
    end = _regex(first)
    lark.rules.append(f"{rule.upper()}_TEXT: /{expression}/ & ~/(.|\\n)*{end}(.|\\n)*/")
    lark.rules.append(f"{rule.upper()}: {rule.upper()}_TEXT /{end}/")
    return f"{rule.upper()} {lark.literal(body.after[len(first) :])}"


def _slash(found: re.Match[str]) -> str:
    return "\\/" if found[0] == "/" else found[0]


def _name_ignored(lark: _Lark, keywords: Collection[str], tool: Tool) -> None:
    """Keywords of values that stand between tags as they are.

    Raises:
        ToolError: the tool is strict, and there are any.
    """
    for keyword in sorted(keywords):
        if tool.strict:
            reason = f"it is strict, but '{keyword}' cannot be enforced as this model writes texts"
            raise ToolError(ConstraintError(reason), tool.param)
        lark.ignored[keyword] = None


def _filled(lark: _Lark, text: str, **values: str) -> str:
    """A header with what stands in its places; a number may be any."""
    text = _PLACES.sub(lambda place: values.get(place[1], place[0]), text)
    before, found, after = text.partition("{number}")
    if not found:
        return lark.literal(text)
    return f"{lark.literal(before)} DIGITS {lark.literal(after)}"


def _literal_arguments(
    lark: _Lark, schema: dict[str, Any], number: int, body: PythonBody | LooseBody
) -> str:
    """Named values in the schema's order; those that are not required may be left out."""
    values = Values(schema)
    arguments = values.members()
    properties = {
        key: given
        for key, given in (arguments.get("properties") or {}).items()
        if given is not False and values.listed(given) != []
    }
    if not properties:
        return ""
    required = arguments.get("required", [])
    equals, comma = ("=", '", "') if isinstance(body, PythonBody) else (":", '","')
    rest = f"rest_{number}_{len(properties)}"
    lark.rules.append(f'{rest}: ""')
    firsts = []
    optional_so_far = True
    for place, (key, given) in reversed(list(enumerate(properties.items()))):
        entry = f"{json.dumps(key + equals)} {_literal_rule(lark, given, values, body)}"
        lark.charge(len(entry))
        lark.rules.append(f"entry_{number}_{place}: {entry}")
        after, rest = rest, f"rest_{number}_{place}"
        with_it = f"{comma} entry_{number}_{place} {after}"
        skipped = "" if key in required else f" | {after}"
        lark.rules.append(f"{rest}: {with_it}{skipped}")
    for place, key in enumerate(properties):
        firsts.append(f"entry_{number}_{place} rest_{number}_{place + 1}")
        if key in required:
            optional_so_far = False
            break
    return f"({' | '.join(firsts)}){'?' if optional_so_far else ''}"


def _literal_rule(lark: _Lark, given: Any, values: Values, body: PythonBody | LooseBody) -> str:
    listed = values.listed(given)
    if listed is not None:
        return f"({' | '.join(_literal(lark, value, body) for value in listed)})"
    types = values.types(given)
    if types == ALL_TYPES:
        return "value"
    if "number" in types:
        types -= {"integer"}
    return f"({' | '.join(_RULES[name] for name in sorted(types))})"


def _literal(lark: _Lark, value: Any, body: PythonBody | LooseBody) -> str:
    """A value as these formats write it."""
    if isinstance(value, str) and isinstance(body, LooseBody):
        return f"({lark.literal(body.quote)} {json.dumps(value)} {lark.literal(body.quote)})"
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(body, PythonBody):
        text = {"true": "True", "false": "False", "null": "None"}.get(text, text)
    return json.dumps(text)


def _marked(text: str, tokenizer: LLTokenizer) -> Iterable[str | int]:
    """A text of a format in pieces: ids of its markers that are tokens, and what is between."""
    start = 0
    for found in re.finditer(r"<[^<>\n]+>|\[/?[A-Z_]+\]|｜DSML｜", text):
        token = token_of(found[0], tokenizer)
        if token is None and "｜DSML｜" in found[0]:
            at = found[0].index("｜DSML｜")
            token = token_of("｜DSML｜", tokenizer)
            begin, end = found.start() + at, found.start() + at + len("｜DSML｜")
        else:
            begin, end = found.span()
        if token is None:
            continue
        if begin > start:
            yield text[start:begin]
        yield token
        start = end
    if start < len(text):
        yield text[start:]


def _regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\n", "n")  # behind its backslash

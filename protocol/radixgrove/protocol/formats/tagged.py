"""Grammars of calls with their arguments between tags: only workers import this.

Texts stand there as they are, and are held to no keyword of their schema; other values are JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from radixgrove.protocol.constraints.constraint import Constraint, ConstraintError
from radixgrove.protocol.constraints.flatten import text_expression
from radixgrove.protocol.constraints.schema import ANNOTATIONS, type_of
from radixgrove.protocol.constraints.values import Values
from radixgrove.protocol.formats.lark import (
    OF_ROOTS,
    OPTIONS,
    PLACES,
    Lark,
    ToolError,
    escaped,
    marked,
)
from radixgrove.protocol.formats.shapes import TaggedBody
from radixgrove.protocol.openai.tools import Tool

_CONTAINERS = frozenset({"array", "object"})
# Keywords that texts between tags cannot be held to, nor plain values that stand where a text may.
_OF_TEXTS = frozenset({"minLength", "maxLength", "pattern", "format", "enum", "const", "not"})
_OF_NUMBERS = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
# What tags hold the arguments as a whole to.
_OF_ARGUMENTS = frozenset({"type", "properties", "required", "additionalProperties", *OF_ROOTS})


def tagged_call(
    lark: Lark, body: TaggedBody, tool: Tool, schema: dict[str, Any], number: int
) -> str:
    """One call, without what is around each."""
    parts = [lark.filled(body.header.strip("\n"), name=tool.name), "BLANKS?"]
    values = Values(schema)
    arguments = values.members()
    options = {key: schema[key] for key in OPTIONS if key in schema}
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
        before = PLACES.split(body.before)
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
        own = {key: value for key, value in self.schema.items() if key not in OF_ROOTS}
        roots = {key: value for key, value in self.schema.items() if key in OF_ROOTS}
        return roots | {"allOf": [own, {"type": sorted(types)}]}


def _entry(lark: Lark, body: TaggedBody, tool: Tool, key: str, value: _Value, rule: str) -> str:
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


def _tag(lark: Lark, body: TaggedBody, key: str, types: Collection[str]) -> str:
    """What stands before a value of one of these types."""
    if body.attributes:
        key = key.replace("&", "&amp;").replace('"', "&quot;")
    string = "true" if "string" in types else "false"
    before, found, after = body.before.partition("{type}")
    filled = lark.filled(before, key=key, string=string)
    if not found:
        return filled
    return f"{filled} ({' | '.join(map(json.dumps, types))}) {lark.literal(after)}"


def _raw_input(lark: Lark, body: TaggedBody, tool: Tool, given: Constraint, rule: str) -> str:
    """A custom tool's text, and the tag behind it."""
    try:
        # One terminal with the tag, so that a text that could go on does not hide it.
        expression = re.sub(r"\\.|/", _slash, text_expression(given), flags=re.DOTALL)
    except ConstraintError:
        try:
            return f"{lark.constraint(rule, given)} {lark.literal(body.after)}"
        except ConstraintError as error:
            raise ToolError(error, tool.param) from None
    first, *_ = [*marked(body.after, lark.tokenizer), 0]
    if isinstance(first, int):
        lark.rules.append(f"{rule.upper()}: /{expression}/")
        return f"{rule.upper()} {lark.literal(body.after)}"
    end = escaped(first)
    lark.rules.append(f"{rule.upper()}_TEXT: /{expression}/ & ~/(.|\\n)*{end}(.|\\n)*/")
    lark.rules.append(f"{rule.upper()}: {rule.upper()}_TEXT /{end}/")
    return f"{rule.upper()} {lark.literal(body.after[len(first) :])}"


def _slash(found: re.Match[str]) -> str:
    return "\\/" if found[0] == "/" else found[0]


def _name_ignored(lark: Lark, keywords: Collection[str], tool: Tool) -> None:
    """Keywords of values that stand between tags as they are.

    Raises:
        ToolError: the tool is strict, and there are any.
    """
    for keyword in sorted(keywords):
        if tool.strict:
            reason = f"it is strict, but '{keyword}' cannot be enforced as this model writes texts"
            raise ToolError(ConstraintError(reason), tool.param)
        lark.ignored[keyword] = None

"""Grammars of calls with their arguments as literals of Python, or of JSON written loosely: only
workers import this.

Arguments are held to their names and to the types that the schema gives them.
"""

from __future__ import annotations

import json
from typing import Any

from radixgrove.protocol.constraints.values import ALL_TYPES, Values
from radixgrove.protocol.formats.lark import Lark
from radixgrove.protocol.formats.shapes import LooseBody, PythonBody

_LITERALS = r"""
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
INTEGER: /-?(0|[1-9][0-9]*)/
"""
PYTHON = (
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
LOOSE = (
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


def literal_arguments(
    lark: Lark, schema: dict[str, Any], number: int, body: PythonBody | LooseBody
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


def _literal_rule(lark: Lark, given: Any, values: Values, body: PythonBody | LooseBody) -> str:
    listed = values.listed(given)
    if listed is not None:
        return f"({' | '.join(_literal(lark, value, body) for value in listed)})"
    types = values.types(given)
    if types == ALL_TYPES:
        return "value"
    if "number" in types:
        types -= {"integer"}
    return f"({' | '.join(_RULES[name] for name in sorted(types))})"


def _literal(lark: Lark, value: Any, body: PythonBody | LooseBody) -> str:
    """A value as these formats write it."""
    if isinstance(value, str) and isinstance(body, LooseBody):
        return f"({lark.literal(body.quote)} {json.dumps(value)} {lark.literal(body.quote)})"
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(body, PythonBody):
        text = {"true": "True", "false": "False", "null": "None"}.get(text, text)
    return json.dumps(text)

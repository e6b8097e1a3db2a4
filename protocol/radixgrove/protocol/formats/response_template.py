"""A checkpoint's own description of its output: `response_template` of transformers 5.13 and later.

Its regions of reasoning and of calls are taken where the shapes of formats have their like: between
fixed texts, with calls as JSON or as Python has them. What they have not is left to the table.
"""

from __future__ import annotations

import re
from typing import Any

from radixgrove.protocol.formats.shapes import Body, Calls, JsonBody, PythonBody, Reasoning

VERSION = 1
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_BLANKS = (r"\s*", r"\s+")
_PLAIN = re.compile(r"(?:[^\\.^$*+?{}\[\]|()]|\\[^A-Za-z0-9])+")
_ARGUMENTS = re.compile(r"\{(?:content\.)?(\w+)\}")


def reasoning_of(spec: Any) -> Reasoning | None:
    """The region of reasoning, if there is one between fixed texts."""
    fields = _fields(spec)
    field = next((fields[name] for name in _THOUGHTS if name in fields), None)
    begin, end = _text(field, "open"), _text(field, "close")
    if begin is None or end is None:
        return None
    return Reasoning(begin, end, ends_at_calls=True)


def calls_of(spec: Any) -> Calls | None:
    """The regions of calls, if they are of a known shape."""
    field = _fields(spec).get("tool_calls")
    begin, end = _text(field, "open"), _text(field, "close")
    if not isinstance(field, dict) or begin is None or (end is None and "close_pattern" in field):
        return None
    body = _body(field)
    if body is None:
        return None
    around = begin.strip(), (end or "").strip()
    if isinstance(body, PythonBody):
        return Calls(body, section=around)
    return Calls(body, call=around)


def _body(field: dict[str, Any]) -> Body | None:
    if field.get("content") == "python-call-list":
        return PythonBody()
    if field.get("content") != "json" or field.get("content_args"):
        return None
    transform, listed = field.get("transform"), bool(field.get("transform_each"))
    function = transform.get("function") if isinstance(transform, dict) else None
    if function == "{content}":
        return JsonBody()
    if not isinstance(function, dict) or set(function) != {"name", "arguments"}:
        return None
    names = [_ARGUMENTS.fullmatch(str(function[key])) for key in ("name", "arguments")]
    if names[0] is None or names[1] is None or names[0][1] != "name":
        return None
    if names[1][1] not in ("arguments", "parameters"):
        return None
    return JsonBody(arguments=names[1][1], listed=listed)


def _fields(spec: Any) -> dict[str, Any]:
    if not isinstance(spec, dict) or spec.get("version", VERSION) != VERSION:
        return {}
    fields = spec.get("fields")
    return fields if isinstance(fields, dict) else {}


def _text(field: Any, side: str) -> str | None:
    """The text that begins or ends a region, blanks around it left out of an expression; None: it
    is no single one."""
    if not isinstance(field, dict):
        return None
    given = field.get(side)
    if isinstance(given, list) and len(given) == 1:
        (given,) = given
    if isinstance(given, str) and given.strip():
        return given
    pattern = field.get(f"{side}_pattern")
    if not isinstance(pattern, str):
        return None
    for blanks in _BLANKS:
        pattern = pattern.removeprefix(blanks).removesuffix(blanks)
    if not pattern.strip() or not _PLAIN.fullmatch(pattern):
        return None
    return re.sub(r"\\(.)", r"\1", pattern)

"""Where in a JSON schema the fault is that a compiler names without its place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from radixgrove.protocol.constraints.schema import LISTS, MAPS, SINGLES

_DATA = frozenset({"const", "default", "enum", "examples"})
_KINDS = {"object": dict, "array": list, "string": str}
_PATTERN = "pattern"
_REFERENCE = "$ref"

_Blames = Callable[[re.Match[str], str, Any], bool]


def place_of(schema: Any, reason: str) -> str | None:
    """
    Args:
        reason: of a refusal, in the words that clients read.

    Returns:
        A pointer (`#/properties/a/type`) to the first keyword of which it speaks; None: unknown.
    """
    for expression, blames in _REASONS:
        if found := expression.search(reason):
            keywords = _keywords(schema)
            return next((at for at, key, value in keywords if blames(found, key, value)), None)
    return None


def _keywords(schema: Any) -> Iterator[tuple[str, str, Any]]:
    """All keywords, as pointer, keyword and value, in their order; names of `patternProperties` as
    patterns. Names of properties and definitions are no keywords."""
    parts = [("#", schema, False)]
    while parts:
        at, part, holds_names = parts.pop()
        inner: list[tuple[str, Any, bool]] = []
        if isinstance(part, list):
            inner = [(f"{at}/{number}", item, False) for number, item in enumerate(part)]
        elif isinstance(part, dict):
            for key, value in part.items():
                here = f"{at}/{key.replace('~', '~0').replace('/', '~1')}"
                if holds_names:
                    inner.append((here, value, False))
                    continue
                yield here, key, value
                if key == "patternProperties" and isinstance(value, dict):
                    yield from ((here, _PATTERN, name) for name in value)
                if key not in _DATA:
                    inner.append((here, value, key in MAPS))
        parts += reversed(inner)


def _is_of_type(found: re.Match[str], key: str, value: Any) -> bool:
    return key == "type" and (value == found[1] or (isinstance(value, list) and found[1] in value))


def _is_pattern(found: re.Match[str], key: str, value: Any) -> bool:
    return key == _PATTERN and isinstance(value, str) and value.replace("\n", "\\n") == found[1]


def _leads_nowhere(found: re.Match[str], key: str, value: Any) -> bool:
    return key == _REFERENCE and isinstance(value, str) and value.endswith(found[1])


def _is_of_other_kind(found: re.Match[str], key: str, value: Any) -> bool:
    kinds = (_KINDS[found[2]], list) if key == "type" else _KINDS[found[2]]
    return key == found[1] and not isinstance(value, kinds)


def _is_given(found: re.Match[str], key: str, value: Any) -> bool:
    return key == found[1] and json.dumps(value, ensure_ascii=False) == found[2]


def _holds_no_schema(_: re.Match[str], key: str, value: Any) -> bool:
    inner: list[Any] = []
    if key in SINGLES:
        inner = value if isinstance(value, list) else [value]
    elif key in MAPS and isinstance(value, dict):
        inner = list(value.values())
    elif key in LISTS and isinstance(value, list):
        inner = value
    return not all(isinstance(part, dict | bool) for part in inner)


_REASONS: tuple[tuple[re.Pattern[str], _Blames], ...] = (
    (re.compile(r"^Invalid type: (.*)$", re.DOTALL), _is_of_type),
    (re.compile(r"^a regular expression is not valid here: .*?: /(.*)/$", re.DOTALL), _is_pattern),
    (re.compile(r"^'\$ref' must be local \('#/…'\), and '(.*)' is not"), _leads_nowhere),
    (re.compile(r"^'\$ref' leads nowhere: (?:Pointer|Anchor) '(.*)' does"), _leads_nowhere),
    (re.compile(r"^schema must be an object or boolean$"), _holds_no_schema),
    (re.compile(r"^(\$?\w+) must be an? (object|array|string)"), _is_of_other_kind),
    (re.compile(r"^Expected .* for '(.*)', got (.*)$"), _is_given),
)

"""Values that models write as plain texts, to JSON by what a schema says of them."""

from __future__ import annotations

import json
from collections.abc import Set

import msgspec

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}
_BLANKS = " \t\r\n"  # of JSON


def as_object(text: str) -> str:
    """Arguments that came as an object, as a string that holds it, or not at all."""
    if text.startswith('"'):
        try:
            return msgspec.json.decode(text, type=str)
        except msgspec.DecodeError:
            return text
    return text if text and text != "null" else "{}"


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def typed(text: str, types: Set[str]) -> str:
    """A value as JSON: what it reads as, if that is of one of the types, else a string."""
    stripped = text.strip(_BLANKS)
    try:
        value = json.loads(stripped, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        words = {"True": True, "False": False, "None": None}
        if stripped not in words:
            return json.dumps(text, ensure_ascii=False)
        value = words[stripped]
        stripped = json.dumps(value)
    kinds = [kind for name in types for kind in _TYPES.get(name, ())]
    fits = type(value) in kinds or (
        "integer" in types and isinstance(value, float) and value.is_integer()
    )
    if isinstance(value, str):
        fits = "string" not in types
    return stripped if fits else json.dumps(text, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(name)

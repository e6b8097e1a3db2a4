"""JSON schemas before they are compiled: what clients may not set, and what no value satisfies."""

from __future__ import annotations

import re
from collections import deque
from typing import Any
from urllib.parse import unquote

from radixgrove.protocol.constraints.constraint import TOO_LARGE, ConstraintError

TYPES = ("null", "boolean", "number", "string", "array", "object")
# Keywords with a schema for each of their names.
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# With a list of schemas, and with one.
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLES = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else")
# They say nothing about a value.
ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "id", "$defs", "definitions"),
    }
)
# They do: those that schemas have most.
RULES = frozenset(
    {
        *("type", "const", "enum", "not", "if", "then", "else", "anyOf", "oneOf", "allOf", "$ref"),
        *("properties", "patternProperties", "additionalProperties", "required", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("minLength", "maxLength", "pattern", "format", "contains", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
# To compile an object takes time by the square of its properties, half a second for 2,000. The sum
# over a schema is bounded: 2,828 properties in one object, or 2,000 each in two.
_MOST_SQUARES = 8_000_000
# Visits of a schema's nodes after which it counts as satisfiable.
_MOST_VISITS = 200_000
_DEFINITION = re.compile(r"#|#/(?:\$defs|definitions)/[^/]*")


def check_properties(schema: Any) -> None:
    """
    Raises:
        ConstraintError: objects have so many properties that compiling them takes seconds.
    """
    squares = 0
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            squares += len(part) ** 2
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    if squares > _MOST_SQUARES:
        raise ConstraintError("an object of the schema has too many properties", TOO_LARGE)


def has_value(schema: Any) -> bool:
    """Whether some finite value may satisfy the schema; False only where surely none does.

    A compiler sees contradictions in one place. This sees the others: references that go round for
    ever, like an object that must contain itself.
    """
    return _Productive(schema).root()


class _Productive:
    """The least fixed point: a schema has a value if its parts do without it."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._proven: set[str] = set()  # references to what has a value
        self._waiting: dict[str, set[str]] = {}  # reference -> those that need it
        self._visits = 0

    def root(self) -> bool:
        root = "#"
        queue = deque([root])
        seen = {root}
        while queue:
            name = queue.popleft()
            if name in self._proven:
                continue
            needed: set[str] = set()
            if self._holds(resolve(self._schema, name), needed):
                self._proven.add(name)
                queue.extend(self._waiting.pop(name, ()))
            for other in needed - self._proven:
                self._waiting.setdefault(other, set()).add(name)
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
        return root in self._proven

    def _holds(self, schema: Any, needed: set[str]) -> bool:
        """Whether it has a value by what is proven; collects the references that it looks at."""
        self._visits += 1
        if self._visits > _MOST_VISITS:
            return True
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            return True
        if "enum" in schema or "const" in schema:
            return schema.get("enum") != []
        if "not" in schema and schema["not"] in (True, {}):
            return False
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            needed.add(reference)
            if reference not in self._proven:
                return False
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                branches = [self._holds(branch, needed) for branch in schema[key]]
                if not any(branches):
                    return False
        if isinstance(schema.get("allOf"), list):
            merged = [self._holds(part, needed) for part in schema["allOf"]]
            if not all(merged):
                return False
        return self._has_kind(schema, needed)

    def _has_kind(self, schema: dict[str, Any], needed: set[str]) -> bool:
        """Whether a value of one of its types may exist."""
        given = schema.get("type")
        kinds = given if isinstance(given, list) else [given]
        if not all(kind in ("object", "array") for kind in kinds):
            return True
        found = False
        if "object" in kinds:
            names, known = schema.get("required"), schema.get("properties")
            if isinstance(names, list) and isinstance(known, dict):
                parts = [known[name] for name in names if isinstance(name, str) and name in known]
                held = [self._holds(part, needed) for part in parts]
                found = all(held)
            else:
                found = True
        if "array" in kinds:
            least = schema.get("minItems")
            filled = isinstance(least, int) and least > 0 and "prefixItems" not in schema
            found |= not filled or self._holds(schema.get("items", True), needed)
        return found


def resolve(schema: Any, reference: str) -> Any:
    """What a local reference (`#`, `#/$defs/x`) points to; True, which says nothing, if nothing."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    found = schema
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return True
    return found


def is_pointed_into(root: Any) -> bool:
    """Whether references lead to other places than definitions."""
    parts = [root]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            reference = part.get("$ref")
            if isinstance(reference, str) and not _DEFINITION.fullmatch(reference):
                return True
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return False


def type_of(value: Any) -> str:
    """A JSON value's type, one of `TYPES`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"

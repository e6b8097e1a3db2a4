"""Whether two JSON schemas can hold for one value: a proof that they cannot, or none.

Branches of a `oneOf` that exclude each other are those of an `anyOf`. They do by their types, their
values, their bounds, the fixed beginning of their patterns, or a property that one of them requires
and both do not allow the same of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from radixgrove.protocol.constraints.schema import TYPES, resolve, type_of

# Proofs that take more, for all of a schema, or go deeper are not worth the time.
_MOST_COMPARED = 5000
_MOST_LEVELS = 8
# What a pattern surely begins with: characters without a meaning of their own.
_BEGINNING = re.compile(r"\^((?:[\w \-/:,@#%&=~;!<>\"']|\\[./\-+*?()\[\]{}|^$])+)")
_REPEATED = re.compile(r"[*+?{]")
_LEAST = (("minimum", "exclusiveMinimum"), ("minLength",), ("minItems",), ("minProperties",))
_MOST = (("maximum", "exclusiveMaximum"), ("maxLength",), ("maxItems",), ("maxProperties",))
_BOUNDED = ("number", "string", "array", "object")


class Prover:
    """Compares parts of one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MOST_COMPARED
        self._level = 0

    def disjoint(self, ones: list[Any], others: list[Any]) -> bool:
        """Whether surely no value satisfies all of `ones` and all of `others`.

        Raises:
            AttributeError, TypeError: the schema is malformed.
        """
        self._left -= 1
        if self._left < 0 or self._level == _MOST_LEVELS:
            return False
        self._level += 1
        try:
            return self._compare(_Parts(ones, self._root), _Parts(others, self._root))
        finally:
            self._level -= 1

    def _compare(self, one: _Parts, other: _Parts) -> bool:
        if one.never or other.never:
            return True
        types = one.types & other.types
        if not types:
            return True
        return (
            _no_common_value(one, other)
            or all(_out_of_bounds(one, other, kind) for kind in types)
            or (types == {"string"} and _begin_otherwise(one, other))
            or (types == {"object"} and self._differ_in_property(one, other))
            or self._split(one, other)
            or self._split(other, one)
        )

    def _differ_in_property(self, one: _Parts, other: _Parts) -> bool:
        """Whether there must be a property that cannot be what both say."""
        return any(
            self.disjoint(first, second)
            for name in one.required | other.required
            if (first := one.of_property(name)) and (second := other.of_property(name))
        )

    def _split(self, one: _Parts, other: _Parts) -> bool:
        """Whether one of several alternatives must hold, and none can."""
        rest = [*other.plain, *({"anyOf": branches} for branches in other.alternatives)]
        return any(
            all(self.disjoint([*one.plain, branch], rest) for branch in branches)
            for branches in one.alternatives
        )


class _Parts:
    """What must hold together: schemas without others joined to them, and alternatives."""

    def __init__(self, schemas: Iterable[Any], root: Any) -> None:
        self.plain: list[dict[str, Any]] = []
        self.alternatives: list[list[Any]] = []
        self.never = False
        self._root = root
        self._seen: set[str] = set()
        for schema in schemas:
            self._add(schema)
        self.types = set(TYPES)
        self.required: set[str] = set()
        for part in self.plain:
            self.types &= _types(part)
            names = part.get("required")
            self.required |= set(names) if isinstance(names, list) else set()

    def _add(self, schema: Any) -> None:
        if schema is False:
            self.never = True
        if not isinstance(schema, dict):
            return
        reference = schema.get("$ref")
        if isinstance(reference, str):  # older drafts ignore what is beside it
            if reference not in self._seen:
                self._seen.add(reference)
                self._add(resolve(self._root, reference))
            return
        self.plain.append({key: schema[key] for key in schema if key not in _JOINED})
        for part in schema.get("allOf", ()):
            self._add(part)
        for key in ("anyOf", "oneOf"):
            if schema.get(key):
                self.alternatives.append(schema[key])

    def of_property(self, name: str) -> list[Any]:
        """What holds for a property."""
        found = []
        for part in self.plain:
            properties = part.get("properties", {})
            if name in properties:
                found.append(properties[name])
            elif "patternProperties" not in part and part.get("additionalProperties") is False:
                found.append(False)
        return found

    @property
    def values(self) -> list[Any] | None:
        """All that it may be, if they are listed."""
        for part in self.plain:
            if "const" in part:
                return [part["const"]]
            if isinstance(part.get("enum"), list):
                return list(part["enum"])
        return None

    def beginnings(self) -> Iterator[str]:
        for part in self.plain:
            if isinstance(part.get("pattern"), str) and (text := _beginning(part["pattern"])):
                yield text

    def bounds(self, kind: str) -> tuple[float, float]:
        """Within which a number lies, or the length of another value."""
        place = _BOUNDED.index(kind)
        low = [part[key] for part in self.plain for key in _LEAST[place] if _is_number(part, key)]
        high = [part[key] for part in self.plain for key in _MOST[place] if _is_number(part, key)]
        return max(low, default=float("-inf")), min(high, default=float("inf"))


_JOINED = ("allOf", "anyOf", "oneOf")


def _types(schema: dict[str, Any]) -> set[str]:
    given = schema.get("type", TYPES)
    names = {given} if isinstance(given, str) else set(given)
    return {"number" if name == "integer" else name for name in names}


def _is_number(schema: dict[str, Any], key: str) -> bool:
    return isinstance(schema.get(key), (int, float)) and not isinstance(schema[key], bool)


def _no_common_value(one: _Parts, other: _Parts) -> bool:
    for first, second in ((one, other), (other, one)):
        values = first.values
        if values is not None and all(_excluded(second, value) for value in values):
            return True
    return False


def _excluded(parts: _Parts, value: Any) -> bool:
    """Whether a value is surely none of theirs."""
    kind = type_of(value)
    if kind not in parts.types:
        return True
    values = parts.values
    if values is not None and all(type_of(v) != kind or v != value for v in values):
        return kind not in ("array", "object")  # 1 and true are equal within them
    if isinstance(value, str):
        return any(not value.startswith(text) for text in parts.beginnings())
    if isinstance(value, dict):
        return not parts.required <= set(value)
    if kind == "number":
        low, high = parts.bounds(kind)
        return not low <= value <= high
    return False


def _out_of_bounds(one: _Parts, other: _Parts, kind: str) -> bool:
    if kind not in _BOUNDED:
        return False
    (low, high), (least, most) = one.bounds(kind), other.bounds(kind)
    return low > most or least > high


def _begin_otherwise(one: _Parts, other: _Parts) -> bool:
    return any(
        not first.startswith(second) and not second.startswith(first)
        for first in one.beginnings()
        for second in other.beginnings()
    )


def _beginning(pattern: str) -> str:
    """The literal text that every match of a pattern begins with; empty if it cannot be seen."""
    found = _BEGINNING.match(pattern)
    if found is None or "|" in re.sub(r"\\.", "", pattern):
        return ""
    text = re.sub(r"\\(.)", r"\1", found[1])
    return text[:-1] if _REPEATED.match(pattern, found.end()) else text

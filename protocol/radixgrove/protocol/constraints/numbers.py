"""Numbers of JSON schemas, which llguidance keeps as doubles and writes in 64 bits.

A bound between two doubles becomes the inner one, and one beyond 64 bits the last within: what is
written obeys all the same. Other numbers that it would change cannot be enforced. None of them may
reach it: two bounds at the least integer of 64 bits would end the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any, TypeGuard

from radixgrove.protocol.constraints.constraint import ConstraintError
from radixgrove.protocol.constraints.schema import is_pointed_into, type_of

_FURTHEST = (1 << 63) - 1024  # the last double within 64 bits
# Of what is a multiple of each `multipleOf`, in units of its last decimal: compiling takes time by
# it, a tenth of a second for this, and `allOf` and `$ref` may join any of them.
_MOST_STEPS = 100_000
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"const", "enum", "default", "examples"})


def fitted(schema: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The schema with numbers that llguidance keeps, and the keywords that were taken out of it.

    Raises:
        ConstraintError: a `multipleOf` is not positive, or all values are beyond 64 bits.
    """
    fitting = _Fitting(frozenset() if is_pointed_into(schema) else _DATA)
    return fitting.schema(schema), tuple(fitting.removed)


class _Fitting:
    def __init__(self, data: frozenset[str]) -> None:
        """`data`: keywords that hold no schemas, to which no reference leads either."""
        self._data = data
        self.removed: dict[str, None] = {}
        self._joined: tuple[int, int] | None = None  # a multiple of each step so far, as written

    def schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, dict):
                out[key] = {name: self._any(part) for name, part in value.items()}
            elif key in self._data:
                out[key] = value
            else:
                out[key] = self._any(value)
        for key in _LOWER:
            _move(out, key, _at_least)
        for key in _UPPER:
            _move(out, key, _at_most)
        for key in _COUNTS:
            if isinstance(out.get(key), float) and out[key].is_integer():
                out[key] = int(out[key])
        self._multiple(out)
        self._values(out)
        return out

    def _any(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._any(part) for part in value]
        return self.schema(value) if isinstance(value, dict) else value

    def _multiple(self, out: dict[str, Any]) -> None:
        step = out.get("multipleOf")
        if not _is_number(step):
            return
        if step <= 0:
            raise ConstraintError(f"'multipleOf' must be greater than 0, not {step}")
        whole, units = _written(step)
        before, before_units = self._joined or (whole, units)
        most = max(units, before_units)
        steps = math.lcm(before * (most // before_units), whole * (most // units))
        if steps > _MOST_STEPS or Decimal(whole) / units != Decimal(repr(step)):
            self._remove(out, "multipleOf")
        else:
            self._joined = (steps, most)

    def _values(self, out: dict[str, Any]) -> None:
        """Leave nothing but the types of values that would be others."""
        for key in ("const", "enum"):
            if key not in out or _is_kept(out[key]):
                continue
            values = out[key] if key == "enum" and isinstance(out[key], list) else [out[key]]
            out.setdefault("type", sorted({_kind(value) for value in values}))
            self._remove(out, key)

    def _remove(self, out: dict[str, Any], key: str) -> None:
        del out[key]
        self.removed[key] = None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return "integer" if _is_number(value) and value % 1 == 0 else type_of(value)


def _move(out: dict[str, Any], key: str, move: Callable[[float], float | None]) -> None:
    bound = out.get(key)
    if not _is_number(bound):
        return
    moved = move(bound)
    if moved is None:
        raise ConstraintError(f"'{key}' leaves only numbers of more than 64 bits")
    out[key] = moved


def _at_least(bound: float) -> float | None:
    """A lower bound that is kept and not below this one; None if there is none."""
    if bound > _FURTHEST:
        return None
    if bound < -_FURTHEST:
        return -_FURTHEST
    nearest = float(bound)
    if nearest == bound:
        return bound
    return int(nearest if nearest > bound else math.nextafter(nearest, math.inf))


def _at_most(bound: float) -> float | None:
    lower = _at_least(-bound)
    return None if lower is None else -lower


def _written(step: float) -> tuple[int, int]:
    """A `multipleOf` as llguidance reads it: a whole number of units, and how many make 1."""
    if isinstance(step, int):
        return step, 1
    whole, units = step, 1
    while whole % 1:
        whole *= 10
        units *= 10
    return int(whole), units


def _is_kept(value: Any) -> bool:
    """Whether a plain value, or each one within, is written as it is."""
    if isinstance(value, dict):
        return all(map(_is_kept, value.values()))
    if isinstance(value, list):
        return all(map(_is_kept, value))
    if not _is_number(value):
        return True
    return abs(value) <= _FURTHEST and float(value) == value

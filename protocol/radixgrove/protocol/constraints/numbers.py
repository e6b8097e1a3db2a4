"""Numbers of JSON schemas, which llguidance keeps as doubles and writes in 64 bits.

A bound between two doubles becomes the inner one, and one beyond 64 bits the last within: what is
written obeys all the same. Other numbers that it would change cannot be enforced. None of them may
reach it: two bounds at the least integer of 64 bits would end the process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from radixgrove.protocol.constraints.constraint import ConstraintError
from radixgrove.protocol.constraints.multiples import (
    Step,
    is_number,
    joined,
    remove_unjoinable,
    states_of,
)
from radixgrove.protocol.constraints.schema import MAPS, is_pointed_into, type_of

_FURTHEST = (1 << 63) - 1024  # the last double within 64 bits
# Why a keyword cannot be enforced.
_DIGITS = "a number of more digits than are kept"
_STEPS = "too many steps, alone or with others"
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MOST_COUNTED = (1 << 32) - 1  # that llguidance reads; no answer has as many of anything
_DATA = frozenset({"const", "enum", "default", "examples"})


def fitted(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The schema with numbers that llguidance keeps, and why each of the keywords that were taken
    out of it cannot be enforced.

    Raises:
        ConstraintError: a `multipleOf` is not positive, or all values are beyond 64 bits.
    """
    fitting = _Fitting(movable=not is_pointed_into(schema))
    root = fitting.schema(schema)
    if remove_unjoinable(root, fitting.parts):
        fitting.removed.setdefault("multipleOf", _STEPS)
    return root, fitting.removed


class _Fitting:
    def __init__(self, *, movable: bool) -> None:
        """`movable`: no reference leads to data or to branches."""
        self._movable = movable
        self._data = _DATA if movable else frozenset()
        self.parts: list[dict[str, Any]] = []  # all schemas, those within others before them
        self.removed: dict[str, str] = {}

    def schema(self, schema: dict[str, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in schema.items():
            if key in MAPS and isinstance(value, dict):
                out[key] = {name: self._any(part) for name, part in value.items()}
            elif key in self._data:
                out[key] = value
            elif key == "anyOf" and isinstance(value, list) and self._movable:
                out[key] = [self._any(part) for part in _within_64_bits(value)]
            else:
                out[key] = self._any(value)
        for key in _LOWER:
            _move(out, key, _at_least)
        for key in _UPPER:
            _move(out, key, _at_most)
        for key in _COUNTS:
            if isinstance(out.get(key), float) and out[key].is_integer():
                out[key] = int(out[key])
            if is_number(out.get(key)):
                out[key] = min(out[key], _MOST_COUNTED)
        self._multiple(out)
        self._values(out)
        self.parts.append(out)
        return out

    def _any(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._any(part) for part in value]
        return self.schema(value) if isinstance(value, dict) else value

    def _multiple(self, out: dict[str, Any]) -> None:
        step = out.get("multipleOf")
        if not is_number(step):
            return
        if step <= 0:
            raise ConstraintError(f"'multipleOf' must be greater than 0, not {step}")
        read = Step.of(step)
        if not read.is_kept(step):
            self._remove(out, "multipleOf", _DIGITS)
        elif joined([read]) is None or states_of(read) is None:
            self._remove(out, "multipleOf", _STEPS)

    def _values(self, out: dict[str, Any]) -> None:
        """Leave nothing but the types of values that would be others."""
        for key in ("const", "enum"):
            if key not in out or _is_kept(out[key]):
                continue
            values = out[key] if key == "enum" and isinstance(out[key], list) else [out[key]]
            out.setdefault("type", sorted({_kind(value) for value in values}))
            self._remove(out, key, _DIGITS)

    def _remove(self, out: dict[str, Any], key: str, reason: str) -> None:
        del out[key]
        self.removed.setdefault(key, reason)


def _within_64_bits(branches: list[Any]) -> list[Any]:
    """Those of an `anyOf` that may have a value which is written; all if none has."""
    return [branch for branch in branches if not _is_beyond(branch)] or branches


def _is_beyond(branch: Any) -> bool:
    if not isinstance(branch, dict) or branch.get("type") not in ("integer", "number"):
        return False
    lower = any(is_number(branch.get(key)) and _at_least(branch[key]) is None for key in _LOWER)
    return lower or any(
        is_number(branch.get(key)) and _at_most(branch[key]) is None for key in _UPPER
    )


def _kind(value: Any) -> str:
    return "integer" if is_number(value) and value % 1 == 0 else type_of(value)


def _move(out: dict[str, Any], key: str, move: Callable[[float], float | None]) -> None:
    bound = out.get(key)
    if not is_number(bound):
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


def _is_kept(value: Any) -> bool:
    """Whether a plain value, or each one within, is written as it is."""
    if isinstance(value, dict):
        return all(map(_is_kept, value.values()))
    if isinstance(value, list):
        return all(map(_is_kept, value))
    if not is_number(value):
        return True
    return abs(value) <= _FURTHEST and float(value) == value

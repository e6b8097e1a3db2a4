"""The `multipleOf`s of a JSON schema: which of them llguidance can compile, alone and joined.

It joins those that hold for one value to their least common multiple: of `allOf`, of `$ref`, of the
branches of a union with what is beside it, and of the same property or item in schemas that are
joined themselves. Here schemas are joined as it does it; each that holds alone stands alone.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, TypeGuard

from radixgrove.protocol.constraints.schema import resolve
from radixgrove.protocol.errors import RadixgroveError

# The automaton has a state for each remainder, of which compiling may visit all: half a second for
# 100,000. A step that ends in zeros comes to its end soon: 98 * 10^5 takes 0.2 s, but 864 * 10^5
# takes 2 s, so that zeros count within bounds alone. All multiples of a schema have a sum.
_MOST_STATES = 105_000
_STATES_BEFORE_ZEROS = 350
_MOST_WITH_ZEROS = 10_000_000
# Within a range it visits each remainder again for each length, and fails in mid-answer beyond
# this, but where the range is small.
_MOST_IN_RANGE = 8_000
_SMALL_RANGE = 100_000
_WORD = 1 << 32  # llguidance multiplies in 32 bits without looking whether they suffice
_MOST_DECIMALS = 8  # more than these are not within a word
_MOST_VISITS = 50_000
# Keywords that say something of numbers, or of the values within a value.
_BEARING = frozenset(
    {
        *("multipleOf", "properties", "patternProperties", "additionalProperties"),
        *("items", "prefixItems", "additionalItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    }
)
_ADDRESSES = ("$id", "id", "$anchor", "$dynamicAnchor")


@dataclass(frozen=True, slots=True)
class Step:
    """A `multipleOf` as llguidance reads it: a whole number of units of its last decimal."""

    units: int
    decimals: int

    @classmethod
    def of(cls, given: float) -> Step:
        """It multiplies by ten until the double is whole, which may make it another one."""
        decimals = 0
        while given % 1:
            given *= 10
            decimals += 1
        return cls.reduced(int(given), decimals)

    @classmethod
    def reduced(cls, units: int, decimals: int) -> Step:
        while decimals and units % 10 == 0:
            units //= 10
            decimals -= 1
        return cls(units, decimals)

    def is_kept(self, given: float) -> bool:
        """Whether it is what was given, and its decimals can be counted."""
        if self.decimals > _MOST_DECIMALS:
            return False
        return Fraction(self.units, 10**self.decimals) == Fraction(repr(given))


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def joined(steps: list[Step]) -> Step | None:
    """The multiple of all, as llguidance finds it in any order; None: it may find another one."""
    decimals = max(step.decimals for step in steps)
    units = [step.units * 10 ** (decimals - step.decimals) for step in steps]
    if len(units) > 1 and math.prod(units) >= _WORD:
        return None
    found = Step.reduced(math.lcm(*units), decimals)
    return found if found.units * 10 + 9 * 10**found.decimals < _WORD else None


def states_of(step: Step, low: float = -math.inf, high: float = math.inf) -> int | None:
    """What compiling the multiples of a step within a range takes; None: too much."""
    is_ray = (low >= 0 and high == math.inf) or (low == -math.inf and high <= 0)
    is_small = max(-low, high) * 10**step.decimals <= _SMALL_RANGE
    is_open = is_ray or (low, high) == (-math.inf, math.inf)
    if step.units > _MOST_IN_RANGE and not is_open and not is_small:
        return None
    states = step.units
    if states <= _MOST_WITH_ZEROS:
        before = states
        while before % 10 == 0:
            before //= 10
        states = min(states, before * _STATES_BEFORE_ZEROS)
    return states if states <= _MOST_STATES else None


def remove_unjoinable(root: dict[str, Any], parts: list[dict[str, Any]]) -> bool:
    """Take each `multipleOf` out of a schema that cannot be joined to those before it, which hold
    for the same value; whether there was one.

    Args:
        parts: all schemas within it, and itself.
    """
    holders = [part for part in parts if is_number(part.get("multipleOf"))]
    if not holders:
        return False
    joining = _Joining(root)
    try:
        refers = any("$ref" in part for part in parts)
        if refers and any(_is_elsewhere(part, root) for part in parts):
            raise _UnclearError
        joining.visit()
    except (_UnclearError, RecursionError):  # then any may hold for one value, and twice
        joining.join(holders * 2)
    return any("multipleOf" not in holder for holder in holders)


class _UnclearError(RadixgroveError):
    """What holds for one value cannot be seen, or not soon."""


class _Joining:
    """A walk over the values of a schema, with all that holds for each."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._left = _MOST_VISITS
        self._found: set[tuple[Step, float, float]] = set()  # multiples, and their ranges
        self._states = 0  # of all of them

    def visit(self) -> None:
        """Join what holds for one value."""
        waiting: deque[list[Any]] = deque([[self._root]])
        seen: set[tuple[int, ...]] = set()
        while waiting:
            schemas = waiting.popleft()
            identity = tuple(map(id, schemas))
            if identity in seen:
                continue
            seen.add(identity)
            for parts in self._joined(schemas, frozenset()):
                self.join(parts)
                waiting += map(_twice_at_most, self._within(parts))

    def join(self, parts: list[dict[str, Any]]) -> None:
        """Keep the steps of schemas that hold together as far as there is room."""
        holders = [part for part in parts if is_number(part.get("multipleOf"))]
        if not holders:
            return
        low, high = _range(parts)
        steps: list[Step] = []
        for holder in holders:
            if "multipleOf" not in holder:
                continue  # it stands twice
            step = Step.of(holder["multipleOf"])
            if steps.count(step) == 2:  # once more changes nothing
                continue
            multiple = joined([*steps, step])
            if multiple is not None and self._has_room(multiple, low, high):
                steps.append(step)
            else:
                del holder["multipleOf"]
        multiple = joined(steps) if steps else None
        if multiple is not None and (multiple, low, high) not in self._found:
            self._found.add((multiple, low, high))
            self._states += states_of(multiple, low, high) or 0

    def _has_room(self, multiple: Step, low: float, high: float) -> bool:
        states = states_of(multiple, low, high)
        if states is None or (multiple, low, high) in self._found:
            return states is not None
        return self._states + states <= _MOST_STATES

    def _joined(self, schemas: list[Any], above: frozenset[str]) -> list[list[dict[str, Any]]]:
        """The schemas that hold together, without those that say nothing of numbers, where all of
        these do: once for each choice of branches."""
        found: list[list[dict[str, Any]]] = [[]]
        for schema in schemas:
            found = self._each(found, self._alternatives(schema, above))
        return found

    def _alternatives(self, schema: Any, above: frozenset[str]) -> list[list[dict[str, Any]]]:
        if not isinstance(schema, dict):
            return [[]]
        self._pay(1)
        found = [[schema] if _BEARING & schema.keys() else []]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in above:
            target = resolve(self._root, reference)
            found = self._each(found, self._alternatives(target, above | {reference}))
        if isinstance(schema.get("allOf"), list):
            found = self._each(found, self._joined(schema["allOf"], above))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                branches = [self._alternatives(branch, above) for branch in schema[key]]
                found = self._each(found, list(chain.from_iterable(branches)))
        return found

    def _each(
        self, ones: list[list[dict[str, Any]]], others: list[list[dict[str, Any]]]
    ) -> list[list[dict[str, Any]]]:
        """Each of the ones with each of the others, and what is the same once."""
        schemas = len(others) * sum(map(len, ones)) + len(ones) * sum(map(len, others))
        self._pay(len(ones) * len(others) + schemas)
        pairs = [_twice_at_most([*one, *other]) for one in ones for other in others]
        return list({tuple(map(id, pair)): pair for pair in pairs}.values())

    def _pay(self, visits: int) -> None:
        self._left -= visits
        if self._left < 0:
            raise _UnclearError

    def _within(self, parts: list[dict[str, Any]]) -> Iterator[list[Any]]:
        """What holds for each property and for each item of a value of all parts."""
        names = dict.fromkeys(chain(*(_map(part, "properties") for part in parts)))
        patterns = dict.fromkeys(chain(*(_map(part, "patternProperties") for part in parts)))
        for pattern in (None, *patterns):  # llguidance refuses patterns that match one name
            for name in (None, *names):
                self._pay(len(parts))
                yield [each for part in parts for each in _of_property(part, name, pattern)]
        longest = max((len(_first_items(part)) for part in parts), default=0)
        for place in range(longest + 1):
            self._pay(len(parts))
            yield [_item(part, place) for part in parts]


def _range(parts: list[dict[str, Any]]) -> tuple[float, float]:
    """The bounds of a number that all parts hold for."""
    lowest = [part.get(key) for part in parts for key in ("minimum", "exclusiveMinimum")]
    highest = [part.get(key) for part in parts for key in ("maximum", "exclusiveMaximum")]
    return max(filter(is_number, lowest), default=-math.inf), min(
        filter(is_number, highest), default=math.inf
    )


def _twice_at_most(schemas: list[Any]) -> list[Any]:
    """Without what says nothing, and without more than a second time of each: one may be joined to
    itself."""
    times: Counter[int] = Counter()
    found = []
    for schema in schemas:
        times[id(schema)] += 1
        if isinstance(schema, dict) and times[id(schema)] <= 2:
            found.append(schema)
    return found


def _of_property(part: dict[str, Any], name: str | None, pattern: str | None) -> list[Any]:
    """What a part says of a property that it may name, and that a pattern may match."""
    properties, patterns = _map(part, "properties"), _map(part, "patternProperties")
    found = [properties[name]] if name in properties else []
    if pattern in patterns:
        found.append(patterns[pattern])
    return found or [part.get("additionalProperties")]


def _map(part: dict[str, Any], key: str) -> dict[Any, Any]:
    value = part.get(key)
    return value if isinstance(value, dict) else {}


def _first_items(part: dict[str, Any]) -> list[Any]:
    """Those with schemas of their own, which older drafts have in `items`."""
    found = part["items"] if isinstance(part.get("items"), list) else part.get("prefixItems")
    return found if isinstance(found, list) else []


def _item(part: dict[str, Any], place: int) -> Any:
    first = _first_items(part)
    if place < len(first):
        return first[place]
    return part.get("additionalItems" if isinstance(part.get("items"), list) else "items")


def _is_elsewhere(part: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether references may lead to where `resolve` does not follow."""
    reference = part.get("$ref")
    if isinstance(reference, str) and reference != "#" and not reference.startswith("#/"):
        return True
    return part is not root and any(isinstance(part.get(key), str) for key in _ADDRESSES)

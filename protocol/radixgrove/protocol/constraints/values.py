"""What kinds of values a part of a JSON schema has, where it refers to others and joins them too.

A format that writes a text as it stands, and other values as JSON, has to know which of both a
value may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from typing import Any

from radixgrove.protocol.constraints.schema import ANNOTATIONS, MAPS, TYPES, resolve, type_of

# `integer` beside `number`: all numbers, alone: those that are whole.
ALL_TYPES = frozenset({*TYPES, "integer"})
_MOST_LEVELS = 64  # of references and of schemas joined to others
_DEFINITIONS = ("#/$defs/", "#/definitions/")
# Keywords of data, in which nothing is a reference, and of parts by names, of which none is one.
_DATA = ("const", "enum", "default", "examples")
# Keywords that types and lists of values are made of.
_OF_LISTS = frozenset({"type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref"})
_WHOLE = "whole"  # the definition that a schema becomes when others refer to its parts


class Values:
    """Of the parts of one schema. What others refer to is looked at once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._types_at: dict[str, frozenset[str]] = {}
        self._listed_at: dict[int, list[Any] | None] = {}  # by the identity of parts
        self._keywords_of: dict[int, Set[str]] = {}
        self._definitions: dict[str, Any] = {}  # of parts that stand alone
        # Whether references lead to other places than definitions; None: it is not known yet.
        self._moves: bool | None = None

    def plain(self, part: Any) -> Any:
        """What a part says itself: that to which it does nothing but refer."""
        for _ in range(_MOST_LEVELS):
            if not isinstance(part, dict):
                break
            keys = set(part) - ANNOTATIONS
            if keys == {"$ref"} and isinstance(part["$ref"], str):
                part = resolve(self._root, part["$ref"])
            elif keys == {"allOf"} and isinstance(part["allOf"], list) and len(part["allOf"]) == 1:
                part = part["allOf"][0]
            else:
                break
        return part

    def members(self) -> dict[str, Any]:
        """What the whole, a schema of objects, says of their properties; empty where it is none."""
        root = self._root if isinstance(self._root, dict) else {}
        part = self.plain({key: root[key] for key in root if key not in ("type", "x-guidance")})
        return part if isinstance(part, dict) else {}

    def types(self, part: Any) -> frozenset[str]:
        """Types that its values may have, some of them perhaps in vain; all where nothing says."""
        return self._types(part, 0) or ALL_TYPES

    def listed(self, part: Any) -> list[Any] | None:
        """All values that it may have, if they are named one by one, and are no arrays or objects;
        None: they are not."""
        return self._listed(part, 0)

    def _listed(self, part: Any, level: int) -> list[Any] | None:
        part = self.plain(part)
        if part is False:
            return []
        if not isinstance(part, dict) or level > _MOST_LEVELS:
            return None
        if id(part) not in self._listed_at:
            self._listed_at[id(part)] = None  # what it is where it leads back to itself
            self._listed_at[id(part)] = self._common(part, level)
        return self._listed_at[id(part)]

    def _common(self, part: dict[str, Any], level: int) -> list[Any] | None:
        """Values that are in all lists of a part, each list without those of other types."""
        if not set(part) - ANNOTATIONS <= _OF_LISTS:
            return None
        types = self._types(part, 0)
        common: dict[tuple[str, Any], Any] | None = None
        for values in self._lists(part, level):
            if values is None:
                return None
            found = [value for value in values if type_of(value) in types or _whole(value, types)]
            if any(isinstance(value, (list, dict)) for value in found):
                return None
            distinct = {_identity(value): value for value in found}
            if common is None:
                common = distinct
            common = {key: value for key, value in common.items() if key in distinct}
        return None if common is None else list(common.values())

    def _lists(self, part: dict[str, Any], level: int) -> Iterator[list[Any] | None]:
        """Of each keyword that names values one by one; None: one does not, and says more than
        types."""
        if part.get("type") in ("null", "boolean"):
            yield [None] if part["type"] == "null" else [True, False]
        if "const" in part:
            yield [part["const"]]
        if "enum" in part:
            yield part["enum"] if isinstance(part["enum"], list) else None
        joined = [resolve(self._root, part["$ref"])] if isinstance(part.get("$ref"), str) else []
        joined += part["allOf"] if isinstance(part.get("allOf"), list) else []
        for each in joined:
            values = self._listed(each, level + 1)
            if values is not None or self._keywords(each):
                yield values
        for union in ("anyOf", "oneOf"):
            if isinstance(part.get(union), list):
                branches = [self._listed(each, level + 1) for each in part[union]]
                listed = [branch for branch in branches if branch is not None]
                if len(listed) == len(branches):
                    yield _united(listed, once=union == "oneOf")
                elif self._keywords({union: part[union]}):
                    yield None

    def keywords(self, part: Any) -> Set[str]:
        """All that say something of a part's values, within arrays and objects not."""
        part = self.plain(part)
        if id(part) not in self._keywords_of:
            self._keywords_of[id(part)] = self._keywords(part)
        return self._keywords_of[id(part)]

    def _keywords(self, part: Any) -> Set[str]:
        found: set[str] = set()
        seen: set[str] = set()
        parts = [part]
        while parts:
            each = parts.pop()
            if not isinstance(each, dict):
                continue
            for key, value in each.items():
                if key in ("anyOf", "oneOf", "allOf") and isinstance(value, list):
                    parts += value
                elif key != "$ref":
                    found.add(key)
                elif isinstance(value, str) and value not in seen:
                    seen.add(value)
                    parts.append(resolve(self._root, value))
        return found - ANNOTATIONS - {"type"}

    def alone(self, part: Any) -> dict[str, Any]:
        """A part as a schema of its own, with the definitions to which it refers."""
        own: dict[str, Any] = {"allOf": [part]} if isinstance(part, bool) else part
        if not any(_references(own)):
            return own
        if self._moves is None:
            self._moves = not all(each.startswith(_DEFINITIONS) for each in _references(self._root))
            self._definitions = (
                {"$defs": {_WHOLE: _moved(_without_address(self._root))}}
                if self._moves
                else {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            )
        moved: dict[str, Any] = _moved(own) if self._moves else own
        # Of definitions of the part itself references know the places within the whole.
        return self._definitions | {
            key: value for key, value in moved.items() if key not in ("$defs", "definitions")
        }

    def _types(self, part: Any, level: int) -> frozenset[str]:
        if part is False:
            return frozenset()
        if not isinstance(part, dict) or level > _MOST_LEVELS:
            return ALL_TYPES
        found = ALL_TYPES & _declared(part.get("type"))
        for union in ("anyOf", "oneOf"):
            if isinstance(part.get(union), list):
                branches = [self._types(branch, level + 1) for branch in part[union]]
                found &= frozenset().union(*branches)
        if isinstance(part.get("allOf"), list):
            for each in part["allOf"]:
                found &= self._types(each, level + 1)
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(values, list):
            found &= frozenset().union(*(_declared(type_of(value)) for value in values))
        if isinstance(part.get("$ref"), str):
            found &= self._referenced(part["$ref"], level)
        return found

    def _referenced(self, reference: str, level: int) -> frozenset[str]:
        if reference not in self._types_at:
            self._types_at[reference] = ALL_TYPES  # what it is where it leads back to itself
            target = resolve(self._root, reference)
            self._types_at[reference] = self._types(target, level + 1)
        return self._types_at[reference]


def _references(schema: Any) -> Iterator[str]:
    """All local ones."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            reference = part.get("$ref")
            if isinstance(reference, str) and _is_local(reference):
                yield reference
            for key, value in part.items():
                if key in MAPS and isinstance(value, dict):
                    parts += value.values()
                elif key not in _DATA:
                    parts.append(value)
        elif isinstance(part, list):
            parts += part


def _without_address(root: dict[str, Any]) -> dict[str, Any]:
    """Without what would make it a document of its own, in which references begin anew."""
    return {key: value for key, value in root.items() if key not in ("$id", "id", "$schema")}


def _moved(part: Any) -> Any:
    """With references as they are where the whole is a definition."""
    if isinstance(part, list):
        return [_moved(each) for each in part]
    if not isinstance(part, dict):
        return part
    out: dict[str, Any] = {}
    for key, value in part.items():
        if key in MAPS and isinstance(value, dict):
            out[key] = {name: _moved(each) for name, each in value.items()}
        else:
            out[key] = value if key in _DATA else _moved(value)
    reference = part.get("$ref")
    if isinstance(reference, str) and _is_local(reference):
        out["$ref"] = f"#/$defs/{_WHOLE}{reference[1:]}"
    return out


def _is_local(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")


def _declared(given: Any) -> frozenset[str]:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list):
        return ALL_TYPES
    found = {name for name in names if isinstance(name, str)}
    return frozenset(found | ({"integer"} if "number" in found else set()))


def _united(branches: list[list[Any]], *, once: bool) -> list[Any]:
    """Plain values that a branch has; `once`: those that one alone has."""
    counts = Counter(key for branch in branches for key in {*map(_identity, branch)})
    values = [value for branch in branches for value in branch]
    return [value for value in values if not once or counts[_identity(value)] == 1]


def _identity(value: Any) -> tuple[str, Any]:
    """Of a plain value: one and true are the same in Python, and not in JSON."""
    return type_of(value), value


def _whole(value: Any, kinds: frozenset[str]) -> bool:
    """Whether it is a whole number, where those may come."""
    if type_of(value) != "number" or "integer" not in kinds:
        return False
    return isinstance(value, int) or float(value).is_integer()

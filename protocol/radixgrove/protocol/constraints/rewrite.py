"""JSON schemas in other words: keywords that llguidance does not know, by those that it does.

`not`, `if`/`then`/`else`, `oneOf` of branches that overlap, `dependencies` and their successors,
and `uniqueItems` of few values become `anyOf` and `allOf` of schemas that hold for the same values.
What has no such equivalent is left as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise, permutations
from typing import Any

from radixgrove.protocol.constraints.disjoint import Prover
from radixgrove.protocol.constraints.schema import (
    ANNOTATIONS,
    LISTS,
    MAPS,
    RULES,
    SINGLES,
    TYPES,
    is_pointed_into,
    resolve,
    type_of,
)
from radixgrove.protocol.constraints.string_formats import ANY_TEXT, OLDER, PATTERNS, PRECISE

Schema = dict[str, Any] | bool

# Larger results would take longer to compile than they are worth.
_MOST_OVERLAPS = 72  # of the branches of a `oneOf`: those of nine, each with each
_MOST_VALUES = 5  # of items that are unique: 326 arrays
_MOST_NEGATED = 2000  # keywords, those of references again and again
# Characters that a schema may grow by. Few grow by more than 5,000; what repeats its parts in
# alternatives to each other takes 500 MB and seconds to compile at 70,000.
_MOST_GROWTH = 16 << 10

# Where null is a value, or no type: elsewhere serializers write it for what is not there.
_NULLS = frozenset({"const", "default", "type"})
_BY_LETTERS = {rule.lower(): rule for rule in RULES}
# Drafts under either scheme, of which llguidance knows one for each.
_DIALECT = re.compile(
    r"https?://json-schema\.org/(?:(draft-0[3-7])|(draft/20(?:19-09|20-12)))/schema#?"
)
# A pattern of a few texts: `^text$` or `^(one|other)$`.
_TEXT = r"(?:[^\\^$.|?*+()\[\]{}]|\\[^\w\s|])*"
_FEW_TEXTS = re.compile(rf"\^(?:({_TEXT})|\((?:\?:)?({_TEXT}(?:\|{_TEXT})*)\))\$")


def rewrite(schema: Any) -> Any:
    """The schema, with what it can say in other words said so; as it is where those are too many,
    or it is malformed, which the compiler refuses with the reason."""
    try:
        other = _Rewriter(schema).schema(schema)
    except (AttributeError, TypeError, RecursionError):
        return schema
    growth = len(json.dumps(other)) - len(json.dumps(schema))
    return other if growth <= _MOST_GROWTH else schema


def precise(schema: Any) -> Any:
    """The schema, with patterns in place of the formats that llguidance takes loosely, without
    patterns that declared properties alone match, for which it lets further keys begin, without
    the name of a dialect that it does not know, which it would fetch, and without keywords that are
    null."""
    return _precise(schema, declare=not is_pointed_into(schema))


def _precise(schema: Any, *, declare: bool) -> Any:
    """`declare`: whether what declared properties are may move within them."""
    if not isinstance(schema, dict):
        return schema
    said = {key: schema[key] for key in schema if schema[key] is not None or key in _NULLS}
    out = _within(said, partial(_precise, declare=declare))
    if declare:
        _declare(out)
    _name_dialect(out)
    name = out.get("format")
    if not isinstance(name, str) or name not in PRECISE:
        return out
    del out["format"]
    pattern = {"pattern": PRECISE[name]}
    if "pattern" in out:
        return {**out, "allOf": [*out.get("allOf", []), pattern]}
    return {**out, **pattern}


def misspelt(schema: Any) -> dict[str, str]:
    """Unknown keywords that are known ones but for the case of their letters, each with that one.
    Schemas may hold others, which say nothing of a value."""
    found: dict[str, str] = {}
    seen: set[int] = set()

    def look(part: Any) -> Any:
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            meant = ((key, _BY_LETTERS.get(key.lower())) for key in part if key not in RULES)
            found.update((key, rule) for key, rule in meant if rule is not None)
            _within(part, look)
            # Not by recursion: chains of references may be long.
            if isinstance(part.get("$ref"), str):
                todo.append(resolve(schema, part["$ref"]))
            if isinstance(part.get("dependencies"), dict):
                todo.extend(part["dependencies"].values())
        return part

    todo = [schema]
    while todo:
        look(todo.pop())
    return found


def _within(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A copy with its parts, which are schemas, changed."""
    out = dict(schema)
    for key in MAPS:
        if isinstance(out.get(key), dict):
            out[key] = {name: change(part) for name, part in out[key].items()}
    for key in (*LISTS, "items"):  # which is a list in older drafts
        if isinstance(out.get(key), list):
            out[key] = [change(part) for part in out[key]]
    for key in SINGLES:
        if isinstance(out.get(key), dict):
            out[key] = change(out[key])
    return out


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._prover = Prover(root)
        self._left = _MOST_NEGATED
        self._pointed = is_pointed_into(root)
        self._negating: set[str] = set()  # references on the way

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        out = _within(schema, self.schema)
        added = [
            *self._negated(out),
            *self._conditional(out),
            *self._exclusive(out),
            *self._dependent(out),
            *_formatted(out),
        ]
        added += self._unique(out)
        added = [part for part in added if part is not True]
        if len(added) == 1 and not self._pointed:
            return self._distributed(out, added[0])
        if added:
            out["allOf"] = [*out.get("allOf", []), *added]
        return out

    def _distributed(self, base: dict[str, Any], added: Schema) -> Any:
        """The base with what was added: once in each branch where that can be, so that properties
        keep the base's order."""
        kept = {key: base[key] for key in base if key in ANNOTATIONS}
        rest = {key: base[key] for key in base if key not in ANNOTATIONS}
        joined = [merged(rest, branch) for branch in _branches(added)]
        if any(branch is None for branch in joined):
            return {**base, "allOf": [*base.get("allOf", []), added]}
        found = any_of(joined)
        if isinstance(found, dict):
            return {**kept, **found}
        return {**kept, "not": {}} if not found else kept

    # ---- keywords: each takes itself out, and says the same in other words -----------------------

    def _negated(self, out: dict[str, Any]) -> list[Schema]:
        if "not" not in out:
            return []
        negation = self.negation(out["not"])
        if negation is None:
            return []
        del out["not"]
        return [negation]

    def _conditional(self, out: dict[str, Any]) -> list[Schema]:
        if "if" not in out:
            out.pop("then", None)
            out.pop("else", None)
            return []
        condition = out["if"]
        negation = self.negation(condition)
        if negation is None:
            return []
        holds = [condition, out.pop("then", True)]
        fails = [negation, out.pop("else", True)]
        del out["if"]
        return [any_of([all_of(holds), all_of(fails)])]

    def _exclusive(self, out: dict[str, Any]) -> list[Schema]:
        """Each branch without those that it may hold together with; none if they exclude each
        other."""
        branches = out.get("oneOf")
        if not isinstance(branches, list) or not branches:
            return []
        rest = {key: value for key, value in out.items() if key != "oneOf"}
        overlaps = self._overlaps(branches, rest)
        negations = {place: self.negation(branches[place]) for place in set().union(*overlaps)}
        if sum(map(len, overlaps)) > _MOST_OVERLAPS or None in negations.values():
            return []
        del out["oneOf"]
        return [
            any_of(
                [
                    all_of([branch, *(negations[other] for other in sorted(others))])
                    for branch, others in zip(branches, overlaps, strict=True)
                ]
            )
        ]

    def _overlaps(self, branches: list[Any], rest: dict[str, Any]) -> list[set[int]]:
        """The branches that each may hold together with."""
        found: list[set[int]] = [set() for _ in branches]
        for one, other in combinations(range(len(branches)), 2):
            if not self._prover.disjoint([rest, branches[one]], [branches[other]]):
                found[one].add(other)
                found[other].add(one)
        return found

    def _dependent(self, out: dict[str, Any]) -> list[Schema]:
        added = []
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            if not isinstance(out.get(key), dict):
                continue
            for name, needed in out.pop(key).items():
                then = {"required": needed} if isinstance(needed, list) else self.schema(needed)
                absent: Schema = {"properties": {name: False}}
                added.append(any_of([absent, then]))
        return added

    def _unique(self, out: dict[str, Any]) -> list[Schema]:
        if out.get("uniqueItems") is not True:
            return []
        if isinstance(out.get("maxItems"), int) and out["maxItems"] <= 1:
            del out["uniqueItems"]
            return []
        values = _values(out.get("items"))
        if values is None or len(values) > _MOST_VALUES or "prefixItems" in out:
            return []
        least, most = out.get("minItems", 0), out.get("maxItems", len(values))
        sizes = [size for size in range(len(values) + 1) if least <= size <= most]
        arrays: list[Schema] = [
            {
                "type": "array",
                "prefixItems": [{"const": value} for value in chosen],
                "items": False,
                "minItems": size,
                "maxItems": size,
            }
            for size in sizes
            for chosen in permutations(values, size)
        ]
        for key in ("uniqueItems", "items", "minItems", "maxItems"):
            out.pop(key, None)
        return [any_of([_of_types(set(TYPES) - {"array"}), *arrays])]

    # ---- negation --------------------------------------------------------------------------------

    def negation(self, schema: Any) -> Schema | None:
        """A schema for exactly the other values; None where there is none in words we have."""
        if isinstance(schema, bool):
            return not schema
        self._left -= 1
        if not isinstance(schema, dict) or self._left < 0:
            return None
        parts: list[Schema] = []
        for key, value in schema.items():
            if key in ANNOTATIONS or (key == "additionalProperties" and value in (True, {})):
                continue
            part = self._negated_keyword(key, value)
            if part is None:
                return None
            parts.append(part)
        return any_of(parts)

    def _negated_keyword(self, key: str, value: Any) -> Schema | None:
        match key:
            case "type":
                return _without_types(value)
            case "const":
                return _without_values([value])
            case "enum" if isinstance(value, list):
                return _without_values(value)
            case "required" if isinstance(value, list):
                absent: list[Schema] = [
                    {"type": "object", "properties": {name: False}} for name in value
                ]
                return any_of(absent)
            case "properties" if isinstance(value, dict):
                return self._some_property(value)
            case "not":
                return value if isinstance(value, (dict, bool)) else None
            case "anyOf" if isinstance(value, list):
                return self._each(value, all_of)
            case "allOf" if isinstance(value, list):
                return self._each(value, any_of)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return _beyond(key, value)
            case "minLength" | "maxLength" | "minItems" | "maxItems":
                return _longer_or_shorter(key, value)
            case "$ref" if isinstance(value, str):
                return self._referenced(value)
        return None

    def _referenced(self, reference: str) -> Schema | None:
        target = resolve(self._root, reference)
        if target is True or reference in self._negating:
            return None
        self._negating.add(reference)
        negation = self.negation(target)
        self._negating.remove(reference)
        return negation

    def _each(self, schemas: list[Any], join: Callable[[list[Any]], Schema]) -> Schema | None:
        negations = [self.negation(schema) for schema in schemas]
        if any(negation is None for negation in negations):
            return None
        return join(negations)

    def _some_property(self, properties: dict[str, Any]) -> Schema | None:
        """One of them is there, and is what it must not be."""
        found: list[Schema] = []
        for name, schema in properties.items():
            negation = self.negation(schema)
            if negation is None:
                return None
            found.append({"type": "object", "properties": {name: negation}, "required": [name]})
        return any_of(found)


def _name_dialect(out: dict[str, Any]) -> None:
    given = out.get("$schema")
    if not isinstance(given, str):
        return
    del out["$schema"]
    if found := _DIALECT.fullmatch(given):
        older, newer = found.groups()
        scheme, draft = ("http", older) if older else ("https", newer)
        out["$schema"] = f"{scheme}://json-schema.org/{draft}/schema"


def _declare(out: dict[str, Any]) -> None:
    """Move patterns that match declared properties alone to these."""
    patterns, properties = out.get("patternProperties"), out.get("properties")
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return
    left = dict(patterns)
    for pattern, schema in patterns.items():
        names = _few_texts(pattern)
        if names is not None and set(names) <= set(properties):
            del left[pattern]
            properties |= {name: {"allOf": [properties[name], schema]} for name in names}
    if left:
        out["patternProperties"] = left
    else:
        del out["patternProperties"]


def _few_texts(pattern: str) -> list[str] | None:
    """All texts that a pattern matches; None where it cannot be seen."""
    found = _FEW_TEXTS.fullmatch(pattern)
    if found is None:
        return None
    one, several = found.groups()
    texts = [one] if several is None else several.split("|")
    return [re.sub(r"\\(.)", r"\1", text) for text in texts]


def _formatted(out: dict[str, Any]) -> list[Schema]:
    name = out.get("format")
    if not isinstance(name, str):
        return []
    if name in OLDER:
        out["format"] = OLDER[name]
    elif name in ANY_TEXT:
        del out["format"]
    elif name in PATTERNS:
        del out["format"]
        return [{"pattern": PATTERNS[name]}]
    return []


def _branches(schema: Schema) -> list[Any]:
    """Schemas of which one holds wherever this one does."""
    if not isinstance(schema, dict) or "anyOf" not in schema:
        return [schema]
    rest = {key: value for key, value in schema.items() if key != "anyOf"}
    if not rest:
        return list(schema["anyOf"])
    joined = [merged(rest, branch) for branch in schema["anyOf"]]
    return [schema] if any(branch is None for branch in joined) else joined


def any_of(schemas: list[Any]) -> Schema:
    """What holds where one of them does."""
    if any(schema is True for schema in schemas):
        return True
    some = [schema for schema in schemas if schema is not False]
    if len(some) < 2:
        return some[0] if some else False
    return {"anyOf": some}


def all_of(schemas: list[Any]) -> Schema:
    """What holds where each of them does."""
    if any(schema is False for schema in schemas):
        return False
    some: list[Any] = []
    for schema in schemas:
        if schema is True:
            continue
        both = merged(some[-1], schema) if some else None
        if both is False:
            return False
        if both is None:
            some.append(schema)
        else:
            some[-1] = both
    if len(some) < 2:
        return some[0] if some else True
    return {"allOf": some}


def merged(one: dict[str, Any], other: Any) -> Schema | None:
    """One schema that holds where both do, its properties in the order of the first; None where
    their keywords cannot stand side by side."""
    if isinstance(other, bool):
        return one if other else False
    out = dict(one)
    for key, value in other.items():
        if key not in out or out[key] == value:
            out[key] = value
        elif key == "type":
            types = _common_types(out[key], value)
            if not types:
                return False
            out[key] = types
        elif key == "required":
            out[key] = list(dict.fromkeys([*out[key], *value]))
        elif key == "properties":
            both = [name for name in value if name in out[key]]
            joined = {name: all_of([out[key][name], value[name]]) for name in both}
            out[key] = {**out[key], **value, **joined}
        else:
            return None
    return out if _side_by_side(one, other) else None


def _side_by_side(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether no keyword of one counts what keywords of the other name."""
    if "$ref" in one or "$ref" in other:
        return one == other
    for first, second in ((one, other), (other, one)):
        named = set(second.get("properties", {})) - set(first.get("properties", {}))
        if named and not {"additionalProperties", "patternProperties"}.isdisjoint(first):
            return False
        if "additionalProperties" in first and _differs(first, second, "patternProperties"):
            return False
        if "items" in first and "prefixItems" in second and first != second:
            return False
        if "additionalItems" in first and _differs(first, second, "items"):
            return False
    return True


def _differs(one: dict[str, Any], other: dict[str, Any], key: str) -> bool:
    return key in other and one.get(key) != other[key]


def _common_types(one: Any, other: Any) -> list[str]:
    first, second = ({names} if isinstance(names, str) else set(names) for names in (one, other))
    for names, others in ((first, second), (second, first)):
        if "number" in names and "integer" in others:
            names.add("integer")
    common = first & second
    if "number" in common:
        common.discard("integer")
    return [name for name in (*TYPES, "integer") if name in common]


def _of_types(types: set[str]) -> Schema:
    named = [name for name in TYPES if name in types]
    if len(named) == len(TYPES):
        return True
    return {"type": named} if named else False


def _without_types(given: Any) -> Schema | None:
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not set(names) <= set(TYPES):
        return None  # numbers that are no integers have no name
    return _of_types(set(TYPES) - set(names))


def _without_values(values: list[Any]) -> Schema | None:
    """All but these; None where one is an array or an object."""
    types = {type_of(value) for value in values}
    if not types <= {"null", "boolean", "number", "string"}:
        return None
    others: list[Schema] = [_of_types(set(TYPES) - types)]
    if "boolean" in types:
        named = [value for value in values if isinstance(value, bool)]
        others += [{"const": truth} for truth in (True, False) if truth not in named]
    if "number" in types:
        others += _between(sorted({v for v in values if type_of(v) == "number"}))
    if "string" in types:
        pattern = _pattern_without({value for value in values if isinstance(value, str)})
        others.append({"type": "string", "pattern": f"^(?:{pattern})$"})
    return any_of(others)


def _between(numbers: list[float]) -> list[Schema]:
    """The intervals that these numbers leave."""
    ends = [None, *numbers, None]
    intervals: list[Schema] = []
    for low, high in pairwise(ends):
        interval: dict[str, Any] = {"type": "number"}
        if low is not None:
            interval["exclusiveMinimum"] = low
        if high is not None:
            interval["exclusiveMaximum"] = high
        intervals.append(interval)
    return intervals


def _pattern_without(texts: set[str]) -> str:
    """A regular expression of all texts but these: each leaves them at its first other character,
    or ends elsewhere."""
    branches = [] if "" in texts else [""]
    heads = sorted({text[0] for text in texts if text})
    anything = r"[\s\S]*"
    if heads:
        branches.append(f"[^{''.join(_in_class(head) for head in heads)}]{anything}")
    else:
        branches.append(rf"[\s\S]{anything}")
    for head in heads:
        tails = {text[1:] for text in texts if text[:1] == head}
        branches.append(f"{re.escape(head)}(?:{_pattern_without(tails)})")
    return "|".join(branches)


def _in_class(character: str) -> str:
    return f"\\{character}" if character in r"\]^-[&~" else character


def _beyond(key: str, bound: Any) -> Schema | None:
    if isinstance(bound, bool) or not isinstance(bound, (int, float)):
        return None
    other = {
        "minimum": "exclusiveMaximum",
        "maximum": "exclusiveMinimum",
        "exclusiveMinimum": "maximum",
        "exclusiveMaximum": "minimum",
    }
    return {"type": "number", other[key]: bound}


def _longer_or_shorter(key: str, bound: Any) -> Schema | None:
    if isinstance(bound, bool) or not isinstance(bound, int):
        return None
    kind = "string" if key.endswith("Length") else "array"
    if key.startswith("max"):
        return {"type": kind, f"min{key[3:]}": bound + 1}
    return {"type": kind, f"max{key[3:]}": bound - 1} if bound > 0 else False


def _values(items: Any) -> list[Any] | None:
    """All values that items may have, if they are few and plain."""
    if not isinstance(items, dict):
        return None
    rest = set(items) - ANNOTATIONS
    if rest == {"type"} and items["type"] in ("boolean", "null"):
        return [True, False] if items["type"] == "boolean" else [None]
    values = (
        items.get("enum") if "enum" in items else [items["const"]] if "const" in items else None
    )
    if not isinstance(values, list) or not rest <= {"enum", "const", "type"}:
        return None
    if "type" in rest and {type_of(value) for value in values} != {items["type"]}:
        return None
    plain = all(type_of(value) in ("null", "boolean", "number", "string") for value in values)
    distinct = {(type_of(value), value) for value in values} if plain else set()
    return values if plain and len(distinct) == len(values) else None

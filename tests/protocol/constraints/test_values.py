"""What kinds of values parts of a schema have, and parts as schemas of their own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from radixgrove.protocol.constraints.values import Values

INTO = {"type": "string", "enum": ["x", "y"]}


@pytest.mark.parametrize("key", ["const", "enum"])
def test_what_reads_like_a_reference_in_data_is_none(key: str) -> None:
    value = {"$ref": "#/properties/b"}
    data = {key: value if key == "const" else [value], "default": value, "examples": [value]}
    whole = {"properties": {"a": {"items": data}, "b": INTO, "c": {"$ref": "#/properties/b"}}}
    items = {"allOf": [data, {"$ref": "#/properties/a/items"}]}
    part = Values(whole | {"properties": whole["properties"] | {"d": items}}).alone(items)
    assert Draft202012Validator(part).is_valid(value)
    assert part["allOf"][0] == data
    assert Values({"properties": {"a": data}}).alone(data) is data


def test_properties_named_like_keywords_of_data_refer() -> None:
    part = {"properties": {"default": {"$ref": "#/$defs/B"}, "const": {"$ref": "#/properties/b"}}}
    alone = Values({"properties": {"a": part, "b": INTO}, "$defs": {"B": INTO}}).alone(part)
    assert Draft202012Validator(alone).is_valid({"default": "x", "const": "y"})
    for value in ({"default": "z"}, {"const": "z"}):
        assert not Draft202012Validator(alone).is_valid(value)


@pytest.mark.parametrize("key", ["$defs", "definitions"])
@pytest.mark.parametrize("into", ["#/{key}/B", "#/properties/a/{key}/B"])
def test_definitions_within_a_part_do_not_stand_for_those_of_the_whole(key: str, into: str) -> None:
    part = {key: {"B": {"type": "integer"}, "whole": {}}, "$ref": into.format(key=key)}
    whole = {key: {"B": INTO}, "properties": {"a": part}}
    alone, value = Values(whole).alone(part), 5 if "properties" in into else "x"
    assert Draft202012Validator(alone).is_valid(value)
    assert not Draft202012Validator(alone).is_valid([value])


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ({"enum": ["x", 1]}, ["x", 1]),
        ({"type": "string", "enum": ["x", 1]}, ["x"]),
        ({"type": "integer", "enum": [1.0, 1.5, True]}, [1.0]),
        ({"type": "string", "oneOf": [{"const": "x"}, {"const": "y"}, {"const": 1}]}, ["x", "y"]),
        ({"oneOf": [{"enum": ["x", "y"]}, {"enum": ["y", 1, True]}]}, ["x", 1, True]),
        ({"type": "string", "allOf": [{"enum": ["x", 1]}]}, ["x"]),
        ({"allOf": [{"$ref": "#/$defs/E"}, {"type": "string"}]}, ["x", "y"]),
        ({"$ref": "#/$defs/E", "enum": ["y", "z"]}, ["y"]),
        ({"allOf": [{"$ref": "#/$defs/E"}, {"enum": ["z"]}]}, []),
        ({"enum": ["x", None, 1], "anyOf": [{"type": "string"}, {"type": "null"}]}, ["x", None]),
        ({"anyOf": [{"anyOf": [{"const": "x"}, {"type": "null"}]}, False]}, ["x", None]),
        ({"anyOf": [{"const": "x"}, {"type": "string"}]}, None),
        ({"allOf": [{"const": "x"}, {"pattern": "y"}]}, None),
        ({"enum": ["x"], "minLength": 2}, None),
        ({"enum": ["x", ["x"]]}, None),
        ({"type": "string"}, None),
        ({"$ref": "#/$defs/Round"}, None),
    ],
)
def test_values_that_are_named_one_by_one(part: Any, values: list[Any] | None) -> None:
    around = {"type": "string", "anyOf": [{"$ref": "#/$defs/Round"}]}
    listed = Values({"$defs": {"E": INTO, "Round": around}}).listed(part)
    assert listed == values
    assert [*map(type, listed or ())] == [*map(type, values or ())]
    for value in values or ():
        assert Draft202012Validator(part | {"$defs": {"E": INTO}}).is_valid(value)


def test_lists_that_refer_to_others_again_and_again_are_read_once() -> None:
    names = [f"L{number}" for number in range(60)]
    defs: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 2} for name, after in pairwise(names)
    }
    values = Values({"$defs": defs | {names[-1]: INTO}})
    assert values.listed({"$ref": "#/$defs/L0"}) == ["x", "y"]

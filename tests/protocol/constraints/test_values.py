"""What kinds of values parts of a schema have, and parts as schemas of their own."""

from __future__ import annotations

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

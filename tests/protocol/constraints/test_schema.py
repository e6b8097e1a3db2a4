"""Schemas that no finite value satisfies."""

from __future__ import annotations

from typing import Any

import pytest

from radixgrove.protocol.constraints.schema import has_value

SELF = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}
A_OR_B = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "required": ["b"], "properties": {"b": {"$ref": "#/$defs/b"}}},
        "b": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}},
    },
}


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"$ref": "#"},
        SELF,
        A_OR_B,
        {"anyOf": [SELF, {"$ref": "#"}]},
        {
            "allOf": [{"type": "string"}, {"$ref": "#/$defs/x"}],
            "$defs": {"x": {"$ref": "#/$defs/x"}},
        },
        {"$defs": {"a/b~": {"$ref": "#/$defs/a~1b~0"}}, "$ref": "#/$defs/a~1b~0"},
    ],
)
def test_references_that_go_round_for_ever_have_no_value(schema: Any) -> None:
    assert not has_value(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {**SELF, "type": ["object", "null"]},
        {**SELF, "type": [{}]},
        {"anyOf": [SELF, {"type": "null"}]},
        {"type": "array", "items": {"$ref": "#"}},
        {"$ref": "#nowhere"},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "https://example.org/schema"},
        {"$ref": "#/anyOf/1", "anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"enum": [1], "$ref": "#"},
    ],
)
def test_others_may_have_one(schema: Any) -> None:
    """Also where it is for others to say: what a reference cannot find, and values in a list."""
    assert has_value(schema)


def test_looking_has_a_bound() -> None:
    """A thousand definitions that all need each other are given up, not followed for minutes."""
    names = [f"#/$defs/d{i}" for i in range(1000)]
    each = {"allOf": [{"$ref": name} for name in names]}
    assert has_value({"$ref": names[0], "$defs": {f"d{i}": each for i in range(1000)}})

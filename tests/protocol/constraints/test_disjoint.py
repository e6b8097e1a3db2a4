"""Schemas that no value satisfies together. That no proof is wrong is drawn in `test_rewrite`."""

from __future__ import annotations

import time
from typing import Any

import pytest

from radixgrove.protocol.constraints.disjoint import Prover

A_IS_X = {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}
A_IS_Y = {"type": "object", "properties": {"a": {"enum": ["y", "z"]}}, "required": ["a"]}
A_MAY_BE_Y = {"properties": {"a": {"enum": ["y", "z"]}}}
DEFINITIONS = {"$defs": {"x": A_IS_X, "y": {"allOf": [A_IS_Y]}, "self": {"$ref": "#/$defs/self"}}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (False, {}),
        ({"type": "string"}, {"type": ["integer", "null"]}),
        ({"const": 1}, {"const": True}),
        ({"enum": [1, 2]}, {"enum": [3, "1"]}),
        ({"enum": [1, 2]}, {"type": "number", "minimum": 2.5}),
        ({"type": "number", "maximum": 1}, {"minimum": 2}),
        ({"type": "string", "maxLength": 1}, {"minLength": 2}),
        ({"type": "array", "maxItems": 1}, {"minItems": 2}),
        ({"type": "string", "pattern": "^ab-"}, {"pattern": r"^a\.b"}),
        ({"type": "string", "pattern": "^ab?"}, {"const": "xa"}),
        ({"type": "object", "required": ["a"]}, {"const": {"b": 1}}),
        (A_IS_X, A_IS_Y),
        (A_IS_X, A_MAY_BE_Y),
        (A_IS_X, {"properties": {"b": {}}, "additionalProperties": False}),
        ({"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}),
        ({"anyOf": [A_IS_X, {"type": "null"}]}, {"oneOf": [A_IS_Y, {"type": "string"}]}),
    ],
)
def test_proven(one: Any, other: Any) -> None:
    for first, second in ((one, other), (other, one)):
        assert Prover(DEFINITIONS).disjoint([first], [second])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {}),
        ({"type": "number"}, {"type": "integer"}),
        ({"const": 1}, {"const": 1.0}),
        ({"maximum": 1}, {"minimum": 2}),  # both hold for a text
        ({"pattern": "^a"}, {"pattern": "^b"}),  # both hold for a number
        ({"type": "string", "pattern": "^ab?"}, {"const": "a"}),
        ({"type": "string", "pattern": "^a|b"}, {"const": "b"}),
        ({"type": "string", "pattern": "^a{0}b"}, {"const": "b"}),
        ({"type": "string", "pattern": r"^\d"}, {"const": "1"}),
        ({"required": ["a"]}, {"required": ["b"]}),
        (A_MAY_BE_Y, {"properties": {"a": {"const": "x"}}}),  # both hold without it
        (A_IS_X, {"patternProperties": {"a": {}}, "additionalProperties": False}),
        ({"const": {"a": 1}}, {"const": {"a": True}}),
        ({"$ref": "#/$defs/x", "type": "null"}, A_IS_X),  # older drafts ignore the type
        ({"$ref": "#/$defs/self"}, {"$ref": "#/$defs/self"}),
        ({"anyOf": [A_IS_X, {"type": "null"}]}, {"oneOf": [A_IS_Y, {"type": "null"}]}),
    ],
)
def test_not_proven(one: Any, other: Any) -> None:
    for first, second in ((one, other), (other, one)):
        assert not Prover(DEFINITIONS).disjoint([first], [second])


def test_it_gives_up_in_time() -> None:
    """Alternatives of alternatives would be compared for ever."""
    wide: Any = {"type": "string"}
    for level in range(40):
        wide = {"anyOf": [{"allOf": [wide]}, {"oneOf": [wide, {"minLength": level}]}]}
    begun = time.thread_time()
    assert not Prover({}).disjoint([wide], [wide])
    assert time.thread_time() - begun < 1

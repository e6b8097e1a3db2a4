"""What router and worker alike check of a constraint before anything is compiled."""

from __future__ import annotations

import json

import pytest

from radixgrove.protocol.constraints import constraint
from radixgrove.protocol.constraints.constraint import TOO_LARGE, ConstraintError, Form


def nested(levels: int) -> bytes:
    return b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)


def test_a_schema_may_have_so_many_bytes_and_no_more() -> None:
    padding = constraint.MAX_SCHEMA_BYTES - len(b'{"title":""}')
    assert constraint.json_schema(b'{"title":"%s"}' % (b"x" * padding), "p").strict is False
    with pytest.raises(ConstraintError, match="262145 bytes, more than 262144") as caught:
        constraint.json_schema(b'{"title":"%s"}' % (b"x" * (padding + 1)), "p")
    assert caught.value.code == TOO_LARGE


def test_a_schema_may_have_so_many_levels_and_no_more() -> None:
    assert constraint.json_schema(nested(64), "p").form is Form.JSON_SCHEMA
    for levels in (65, 900):
        with pytest.raises(ConstraintError, match=f"{levels} levels, more than 64") as caught:
            constraint.json_schema(nested(levels), "p")
        assert caught.value.code == TOO_LARGE


def test_brackets_in_strings_are_no_levels() -> None:
    text = json.dumps({"pattern": "[" * 100 + '\\"{' * 100}).encode()
    assert constraint.json_schema(text, "p").text == text.decode()


@pytest.mark.parametrize("schema", [b"[]", b'"x"', b"5", b"", b"null"])
def test_a_schema_is_an_object(schema: bytes) -> None:
    with pytest.raises(ConstraintError, match="must be an object"):
        constraint.json_schema(schema, "p")


def test_a_grammar_is_bounded_in_bytes() -> None:
    assert constraint.text_form(Form.REGEX, "ä" * (32 << 10), "p").form is Form.REGEX
    with pytest.raises(ConstraintError, match="65538 bytes, more than 65536") as caught:
        constraint.text_form(Form.REGEX, "ä" * ((32 << 10) + 1), "p")
    assert caught.value.code == TOO_LARGE
    with pytest.raises(ConstraintError, match="empty"):
        constraint.text_form(Form.GRAMMAR, "", "p")


@pytest.mark.parametrize("texts", [[], [""], ["a", ""]])
def test_there_is_a_choice(texts: list[str]) -> None:
    with pytest.raises(ConstraintError, match="there must be a choice"):
        constraint.choice(texts, "p")

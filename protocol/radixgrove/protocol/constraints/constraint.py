"""A constraint on an answer, whichever field of which dialect asked for it, and its bounds."""

from __future__ import annotations

import re
from enum import StrEnum
from itertools import accumulate

import msgspec

from radixgrove.protocol.errors import InvalidInput

MAX_SCHEMA_BYTES = 256 << 10
MAX_SCHEMA_LEVELS = 64  # of nested objects and arrays
MAX_TAGS = 128
MAX_TEXT_BYTES = 64 << 10  # of a regular expression, a grammar, or all choices together

UNSATISFIABLE = "schema_unsatisfiable"
TOO_LARGE = "schema_too_large"
TOO_COMPLEX = "grammar_too_complex"

_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*"', re.DOTALL)
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class ConstraintError(InvalidInput):
    """An answer cannot be held to this; the text, made for clients, says why."""

    def __init__(self, reason: str, code: str | None = None) -> None:
        """`code`: of the error that the client gets; None: it has none."""
        super().__init__(reason)
        self.reason = reason
        self.code = code


class Form(StrEnum):
    """How a constraint's text reads."""

    JSON_SCHEMA = "json-schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON array of strings, one of which the answer is
    GRAMMAR = "grammar"  # Lark or GBNF
    TAGS = "tags"  # the JSON of `Tags`


class Tag(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A piece of text with a JSON value in it; `begin` begins with a trigger."""

    begin: str
    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    end: str


class Tags(msgspec.Struct, kw_only=True):
    """Free text in which a trigger must go on as one of the tags does."""

    structures: list[Tag]
    triggers: list[str]


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must be; within the bounds, but yet to be compiled."""

    form: Form
    text: str
    param: str  # the field of the request that asked for it
    # A JSON schema with a keyword that cannot be enforced is refused instead of the keyword being
    # ignored.
    strict: bool = False


def json_schema(schema: bytes, param: str, *, strict: bool = False) -> Constraint:
    """A value of the schema, given as its JSON.

    Raises:
        ConstraintError: it is no schema, or over a bound.
    """
    if not schema.lstrip().startswith((b"{", b"true", b"false")):
        raise ConstraintError("a JSON schema must be an object")
    if len(schema) > MAX_SCHEMA_BYTES:
        raise ConstraintError(
            f"the schema has {len(schema)} bytes, more than {MAX_SCHEMA_BYTES}", TOO_LARGE
        )
    check_levels(schema)
    return Constraint(form=Form.JSON_SCHEMA, text=schema.decode(), param=param, strict=strict)


def text_form(form: Form, text: str, param: str) -> Constraint:
    """A regular expression or a grammar.

    Raises:
        ConstraintError: it is empty, or over a bound.
    """
    size = len(text.encode())
    if not text:
        raise ConstraintError("it is empty")
    if size > MAX_TEXT_BYTES:
        raise ConstraintError(f"it has {size} bytes, more than {MAX_TEXT_BYTES}", TOO_LARGE)
    return Constraint(form=form, text=text, param=param)


def choice(texts: list[str], param: str) -> Constraint:
    """One of the texts.

    Raises:
        ConstraintError: there is none, one is empty, or they are over a bound.
    """
    if not texts or not all(texts):
        raise ConstraintError("there must be a choice, and none may be empty")
    return text_form(Form.CHOICE, msgspec.json.encode(texts).decode(), param)


def tags(given: Tags, param: str) -> Constraint:
    """Free text with tags.

    Raises:
        ConstraintError: a tag begins with no trigger, has no schema, or they are over a bound.
    """
    if not given.structures or not all(given.triggers):
        raise ConstraintError("there must be a tag, and no trigger may be empty")
    if len(given.structures) > MAX_TAGS:
        raise ConstraintError(f"there are more than {MAX_TAGS} tags", TOO_LARGE)
    for tag in given.structures:
        if not tag.begin.startswith(tuple(given.triggers)):
            raise ConstraintError("a tag begins with none of the triggers")
        if not bytes(tag.schema):
            raise ConstraintError("a tag has no schema")
        json_schema(bytes(tag.schema), param)
    text = msgspec.json.encode(given)
    if len(text) > MAX_SCHEMA_BYTES:
        raise ConstraintError(
            f"the tags have {len(text)} bytes, more than {MAX_SCHEMA_BYTES}", TOO_LARGE
        )
    return Constraint(form=Form.TAGS, text=text.decode(), param=param)


def check_levels(schema: bytes) -> None:
    """
    Raises:
        ConstraintError: the schema, given as well-formed JSON, is nested too deep.
    """
    found = levels(schema)
    if found > MAX_SCHEMA_LEVELS:
        raise ConstraintError(
            f"the schema has {found} levels, more than {MAX_SCHEMA_LEVELS}", TOO_LARGE
        )


def levels(text: bytes) -> int:
    """How deep objects and arrays of well-formed JSON are nested."""
    brackets = _STRING.sub(b"", text).translate(None, _OTHERS)
    return max(accumulate(_STEPS[bracket] for bracket in brackets), default=0)

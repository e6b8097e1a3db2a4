"""The fields that ask for an answer of some form, by the names that clients of several servers use.

OpenAI's `response_format`; `structured_outputs` and the older `guided_*` of vLLM; `regex`, `ebnf`
and `json_schema` of SGLang; `grammar` of llama.cpp. A request has one of them at most.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import msgspec

from radixgrove.protocol.constraints import constraint as constraints
from radixgrove.protocol.constraints.constraint import Constraint, ConstraintError, Form
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.bodies import (
    RESPONSE_TYPES,
    STRUCTURED_FORMS,
    STRUCTURED_NEUTRAL,
    GenerationBody,
    ResponseFormat,
    StructuralTag,
    StructuredOutputs,
)
from radixgrove.protocol.openai.decoding import misread, refuse_unsupported

# All that `_asked` reads.
_FIELDS = attrgetter(
    *("response_format", "structured_outputs", "guided_json", "json_schema", "guided_regex"),
    *("regex", "guided_grammar", "ebnf", "grammar", "guided_choice", "structural_tag"),
)
_ABSENT = _FIELDS(GenerationBody())
ANY_OBJECT = b'{"type":"object"}'
_NULL = (b"", b"null")


def parse_constraint(wire: GenerationBody) -> Constraint | None:
    """What the body asks of the answer's form; None: any text.

    Raises:
        ApiError: 400, for more than one such field, or one that is malformed or over a bound.
    """
    if _FIELDS(wire) == _ABSENT:  # as of most bodies
        return None
    found = [made for made in _asked(wire) if made is not None]
    if len(found) > 1:
        names = " and ".join(f"'{each.param}'" for each in found[:2])
        raise errors.invalid(f"{names} exclude each other.", found[1].param)
    return found[0] if found else None


def refused(error: ConstraintError, param: str) -> errors.ApiError:
    """A constraint's refusal as an answer."""
    return errors.invalid(f"Invalid value for '{param}': {error.reason}.", param, error.code)


def _asked(wire: GenerationBody) -> list[Constraint | None]:
    return [
        _response_format(wire.response_format),
        *_structured_outputs(wire.structured_outputs),
        _schema(wire.guided_json, "guided_json"),
        _schema(wire.json_schema, "json_schema"),
        _text(Form.REGEX, wire.guided_regex, "guided_regex"),
        _text(Form.REGEX, wire.regex, "regex"),
        _text(Form.GRAMMAR, wire.guided_grammar, "guided_grammar"),
        _text(Form.GRAMMAR, wire.ebnf, "ebnf"),
        # Clients of llama.cpp send an empty one where they ask for none.
        _text(Form.GRAMMAR, wire.grammar or None, "grammar"),
        _choice(wire.guided_choice, "guided_choice"),
        _tag_text(wire.structural_tag, "structural_tag"),
    ]


def _response_format(given: ResponseFormat | None) -> Constraint | None:
    if given is None:
        return None
    _check_type(given)
    if given.type == "text":
        return None
    if given.type == "json_object":
        schema = bytes(given.schema)
        return _schema(ANY_OBJECT if schema in _NULL else schema, "response_format")
    if given.type == "structural_tag":
        return _tags(given, "response_format")
    named = given.json_schema
    if named is None or bytes(named.schema) in _NULL:
        missing = "response_format.json_schema" + ("" if named is None else ".schema")
        raise errors.invalid(f"Missing required parameter: '{missing}'.", "response_format")
    return _schema(named.schema, "response_format", strict=bool(named.strict))


def _check_type(given: ResponseFormat) -> None:
    """Raises ApiError for a type that there is not, or a field of another type: left unread it
    would leave the answer freer than it was meant."""
    param = "response_format"
    if given.type not in RESPONSE_TYPES:
        raise errors.invalid(
            f"Invalid value for '{param}.type': must be one of {', '.join(RESPONSE_TYPES)}.", param
        )
    for type, names in RESPONSE_TYPES.items():
        for name in names if type != given.type else ():
            value = getattr(given, name)
            if value is not None and not (name == "schema" and bytes(value) in _NULL):
                raise errors.invalid(
                    f"'{param}.{name}' is of the type '{type}', not of '{given.type}'.",
                    f"{param}.{name}",
                )


def _structured_outputs(given: StructuredOutputs | None) -> list[Constraint | None]:
    if given is None:
        return []
    param = "structured_outputs"
    refuse_unsupported(given, STRUCTURED_NEUTRAL, param)
    found = [
        _schema(given.json, f"{param}.json"),
        _schema(ANY_OBJECT, f"{param}.json_object") if given.json_object else None,
        _text(Form.REGEX, given.regex, f"{param}.regex"),
        _text(Form.GRAMMAR, given.grammar, f"{param}.grammar"),
        _choice(given.choice, f"{param}.choice"),
        _tag_text(given.structural_tag, f"{param}.structural_tag"),
    ]
    if given.json_object is None and not any(found):
        forms = ", ".join(STRUCTURED_FORMS)
        raise errors.invalid(f"'{param}' must have one of {forms}.", param)
    return found


def _schema(raw: msgspec.Raw | bytes, param: str, *, strict: bool = False) -> Constraint | None:
    """A schema given as JSON, or as a string that holds it."""
    schema = bytes(raw)
    if schema in _NULL:
        return None
    if schema.startswith(b'"'):
        schema = msgspec.json.decode(schema, type=str).encode()
        try:
            msgspec.json.decode(schema, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError):
            raise errors.invalid(f"Invalid value for '{param}': not valid JSON.", param) from None
    return _checked(lambda: constraints.json_schema(schema, param, strict=strict), param)


def _text(form: Form, text: str | None, param: str) -> Constraint | None:
    if text is None:
        return None
    return _checked(lambda: constraints.text_form(form, text, param), param)


def _choice(texts: list[str] | None, param: str) -> Constraint | None:
    if texts is None:
        return None
    return _checked(lambda: constraints.choice(texts, param), param)


def _tag_text(raw: msgspec.Raw, param: str) -> Constraint | None:
    """What `response_format` has of this type, as JSON or as a string that holds it."""
    text = bytes(raw)
    if text in _NULL:
        return None
    try:
        if text.startswith(b'"'):
            text = msgspec.json.decode(text, type=str).encode()
        given = msgspec.json.decode(text, type=StructuralTag)
    except msgspec.ValidationError as error:
        raise misread(error, param) from None
    except (msgspec.DecodeError, RecursionError):
        raise errors.invalid(f"Invalid value for '{param}': not valid JSON.", param) from None
    if given.type != "structural_tag":
        raise errors.invalid(
            f"Invalid value for '{param}.type': must be structural_tag.", f"{param}.type"
        )
    return _tags(given, param)


def _tags(given: ResponseFormat | StructuralTag, param: str) -> Constraint:
    if given.structures is None or given.triggers is None:
        missing = f"{param}.{'structures' if given.structures is None else 'triggers'}"
        raise errors.invalid(f"Missing required parameter: '{missing}'.", missing)
    tags = constraints.Tags(structures=given.structures, triggers=given.triggers)
    return _checked(lambda: constraints.tags(tags, param), param)


def _checked(make: Callable[[], Constraint], param: str) -> Constraint:
    try:
        return make()
    except ConstraintError as error:
        raise refused(error, param) from None

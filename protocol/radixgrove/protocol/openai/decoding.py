"""Bodies off the wire: the same errors for the same faults, which name the field."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.bodies import KNOWN, MAX_BIAS, Neutral

Body = TypeVar("Body", bound=msgspec.Struct)

_LOCATION = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_FLOAT_FOR_INT = ("Expected `int`, got `float`", "Expected `int | null`, got `float`")
_WHOLE = re.compile(rb"(-?[0-9]{1,19})\.0+")
_MISSING = re.compile(r"^Object missing required field `([^`]+)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)
_NOT_A_NUMBER = re.compile(rb'"([A-Za-z_]{1,64})"\s*:\s*-?$')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


class _ModelOnly(msgspec.Struct):
    model: str | None = None


class _BiasesOnly(msgspec.Struct):
    logit_bias: dict[str, msgspec.Raw]


_model_decoder = msgspec.json.Decoder(_ModelOnly)


def peek_model(body: bytes) -> str:
    """The `model` of a body, before it is known against which model to check the rest.

    Raises:
        ApiError: 400, when the body is not a JSON object or names no model.
    """
    return require_model(decode(_model_decoder, body).model)


def with_model(body: bytes, model: str) -> bytes:
    """A body that was read before, asking for another model; the rest stays as it is."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": model})


def decode(decoder: msgspec.json.Decoder[Body], body: bytes) -> Body:
    """Read a body off the wire; `16.0` is an integer too, which some languages write so.

    Raises:
        ApiError: 400, naming the field where it can.
    """
    try:
        if not body.isascii():
            body.decode("utf-8")  # msgspec skips unknown fields without looking at their bytes
        return decoder.decode(body)
    except UnicodeDecodeError:
        raise errors.invalid("The request body is not valid UTF-8.") from None
    except RecursionError:
        raise errors.invalid("The request body is nested too deeply.") from None
    except msgspec.ValidationError as error:
        text = str(error)
        whole = _with_whole_numbers(body) if text.startswith(_FLOAT_FOR_INT) else body
        if whole == body:
            raise _named(text, body) from None
        return decode(decoder, whole)
    except msgspec.DecodeError as error:
        raise _malformed(body, str(error)) from None


def _with_whole_numbers(body: bytes) -> bytes:
    """The body with its own fields' whole numbers written as such; the same where it has none, or
    is malformed behind the first of them."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return body
    whole = {name: _WHOLE.fullmatch(value) for name, value in fields.items()}
    if not any(whole.values()):
        return body
    numbers = {name: int(found[1]) for name, found in whole.items() if found}
    return msgspec.json.encode({**fields, **numbers})


def refuse_unsupported(wire: msgspec.Struct, table: Neutral, within: str = "") -> None:
    """
    Args:
        within: the field that holds this object; "": it is the body.

    Raises:
        ApiError: 400, naming the first field of the table that asks for something.
    """
    for name, neutral in table.items():
        value = getattr(wire, name)
        if value is not None and value not in neutral:
            raise errors.unsupported(f"{within}.{name}" if within else name)


def misread(error: msgspec.ValidationError, within: str) -> errors.ApiError:
    """The error of a value within the field `within` that is not as its type has it."""
    reason, path = _located(str(error))
    return _at(".".join(filter(None, (within, path))), reason)


def _named(text: str, body: bytes) -> errors.ApiError:
    """msgspec's text names the field by its path: that becomes `param`."""
    reason, path = _located(text)
    if path == "logit_bias[...]":
        key = _bias_of_wrong_type(body)
        if key is not None:
            return bias_out_of_bounds(key)
    return _at(path, reason)


def _located(text: str) -> tuple[str, str]:
    """msgspec's reason, and the path of the field; "": the whole."""
    match = _LOCATION.search(text)
    return (text[: match.start()], match[1]) if match else (text, "")


def _at(path: str, reason: str) -> errors.ApiError:
    param = path.replace("[...]", "")
    missing = _MISSING.match(reason)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return errors.invalid(f"Missing required parameter: '{param}'.", param)
    holder = param.rpartition(".")[2].partition("[")[0]
    unknown, fields = _UNKNOWN.match(reason), KNOWN.get(holder)
    if unknown and fields:  # else the path is a text of the client's own
        known = ", ".join(fields)
        name = f"{param}.{errors.shorten(unknown[1], 64)}"
        return errors.invalid(
            f"Unknown parameter: '{name}'. What '{param}' may have: {known}.", name
        )
    if not param:
        return errors.invalid(f"The request body must be a JSON object: {reason}.")
    return errors.invalid(f"Invalid value for '{param}': {reason.replace('`', '')}.", param)


def _bias_of_wrong_type(body: bytes) -> str | None:
    """The first key of a value that is no number, which msgspec's path leaves out; None where the
    body has a key twice, so that the last one hides it."""
    try:
        biases = msgspec.json.decode(body, type=_BiasesOnly).logit_bias
    except msgspec.ValidationError:
        return None
    for key, value in biases.items():
        try:
            msgspec.json.decode(value, type=float)
        except msgspec.ValidationError:
            return key
    return None


def _malformed(body: bytes, text: str) -> errors.ApiError:
    """JSON has no NaN and no Infinity, but Python's encoder writes them: name the field. Half of a
    pair, as encoders of UTF-16 write a text that was cut within an emoji, is shown.
    """
    position = re.search(r"\(byte (\d+)\)", text)
    before = body[: int(position[1])][-200:] if position else b""
    half = None
    if "surrogate" in text or "end of hex escape" in text:
        half = _SURROGATE.match(before[-6:])
    elif not position:  # the other half is looked for beyond the end
        half = _FIRST_HALF.search(body[-16:])
    if half is not None:
        return errors.invalid(
            f"The request body has '{half[0].decode()}', half of a surrogate pair, which is no "
            "character: a text may have been cut within an emoji."
        )
    match = _NOT_A_NUMBER.search(before)
    if match:
        name = match[1].decode()
        return errors.invalid(f"Invalid value for '{name}': not a JSON value.", name)
    return errors.invalid("The request body is not valid JSON.")


def require_model(model: str | None) -> str:
    if not model:
        raise errors.invalid("You must provide a 'model' parameter.", "model")
    return model


def bias_out_of_bounds(key: str) -> errors.ApiError:
    return errors.invalid(
        f"The value of the key '{errors.shorten(key, 32)}' of 'logit_bias' must be a number from "
        f"-{MAX_BIAS} to {MAX_BIAS}.",
        "logit_bias",
    )

"""JSON that another process wrote: whatever is wrong with it is one kind of error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def decode_json(data: bytes, kind: type[T]) -> T:
    """The value of type `kind` that `data` says.

    Raises:
        ValueError: it is no JSON, no UTF-8, nested too deeply, or says something else.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"malformed JSON: {error}") from error

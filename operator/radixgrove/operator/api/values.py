"""Values of the resource as people write them: what the API server takes, and what it means."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints

WORDS = "words"  # of a field's schema: what its pattern means, for people


def _in_words(words: str, pattern: str | None = None) -> Any:
    """What the API server says of a value that the pattern refuses, behind the value.

    `pattern`: the API server's, where it is stricter than the operator, which goes on with what was
    stored before.
    """
    stricter = {} if pattern is None else {"pattern": pattern}
    return Field(json_schema_extra={WORDS: words, **stricter})


_QUANTITY = StringConstraints(
    pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$", max_length=20
)
Quantity = Annotated[str, _QUANTITY, _in_words("is no quantity, such as 500m, 8, 3Gi or 1.5T")]
# Bytes are taken as such only where there are millions: `16` stands for a forgotten unit.
_SIZE = r"[0-9]{7,}|[0-9]+(\.[0-9]+)?(k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)"
_NO_SIZE = "is no size, such as 500Mi, 3Gi or 1.5T"
Size = Annotated[str, _QUANTITY, _in_words(_NO_SIZE, f"^({_SIZE})$")]
SizeOrZero = Annotated[str, _QUANTITY, _in_words(_NO_SIZE, f"^(0|{_SIZE})$")]
Duration = Annotated[
    str,
    StringConstraints(pattern=r"^([0-9]{1,6}h)?([0-9]{1,6}m)?([0-9]{1,6}s)?$", max_length=20),
    _in_words("is no duration, such as 90s, 30m or 1h30m"),
]
ObjectName = Annotated[
    str,
    StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", min_length=1, max_length=253),
    _in_words("is no name of an object: lower-case letters, digits, dashes and dots"),
]
ModelName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9._/:]*[A-Za-z0-9])?$", max_length=128),
    _in_words("is no name of a model: letters and digits, with - . _ / : between them"),
]


def seconds(duration: str) -> float:
    """`1h30m` in seconds; an empty string is 0."""
    total, digits = 0, ""
    for character in duration:
        if character.isdigit():
            digits += character
        else:
            total += int(digits) * {"h": 3600, "m": 60, "s": 1}[character]
            digits = ""
    return float(total)


def duration(length: float) -> str:
    """Seconds as a person writes them: `1h30m`."""
    minutes, rest = divmod(round(length), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [(hours, "h"), (minutes, "m"), (rest, "s")]
    return "".join(f"{count}{unit}" for count, unit in parts if count) or "0s"


_SUFFIXES = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number. Raises ValueError when it is none."""
    number = text.rstrip("mkKMGTPi")
    suffix = text[len(number) :]
    if suffix not in _SUFFIXES:
        raise ValueError(f"{text!r} is no quantity")
    return float(number) * _SUFFIXES[suffix]

"""What custom tools get: models write it as the one argument of a function."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator

from radixgrove.protocol.openai.tools import INPUT
from radixgrove.worker.frontend.events import CallArguments, CallBegins, CallEnds
from radixgrove.worker.frontend.output import Part

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_MOST_HEAD = 64  # characters
# Text as it stands, an escape, or the two halves of a character.
_UNIT = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u]"
)
_HALF = re.compile(r"\\u[0-9a-fA-F]{4}(?!$|\\$|\\u[0-9a-fA-F]{0,4}$)")  # without the other half


class CustomInputs:
    """Turns the arguments of one choice's custom calls into the texts that they hold."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._input: _Input | None = None  # of the open call

    def read(self, part: Part) -> Iterator[Part]:
        match part:
            case CallBegins() if part.name in self._names:
                part.custom = True
                self._input = _Input()
                yield part
            case CallArguments() if self._input is not None:
                if text := self._input.push(part.text):
                    yield CallArguments(part.number, text, custom=True)
            case CallEnds() if self._input is not None:
                if text := self._input.finish():
                    yield CallArguments(part.number, text, custom=True)
                self._input = None
                yield part
            case _:
                yield part


class _Input:
    """Reads `{"input": "…"}` in pieces. What is no such object stands as it came."""

    def __init__(self) -> None:
        self._waiting = ""
        self._begun = False
        self._raw = False
        self._over = False

    def push(self, piece: str) -> str:
        if self._over:
            return ""
        self._waiting += piece
        if not self._begun and not self._begin():
            return ""
        if self._raw:
            return self._take(len(self._waiting))
        parts, place = [], 0
        while place < len(self._waiting):
            if self._waiting[place] == '"':
                self._over = True
                break
            unit = _UNIT.match(self._waiting, place)
            if unit is not None:
                parts.append(_plain(unit[0]))
            else:
                unit = _HALF.match(self._waiting, place)
                if unit is None:  # more of it may come
                    break
                parts.append("\ufffd")
            place = unit.end()
        self._take(place)
        return "".join(parts)

    def finish(self) -> str:
        """What is left of an input that is no object; an escape that was cut is left out."""
        return self._waiting if not self._begun else ""

    def _begin(self) -> bool:
        head = _HEAD.match(self._waiting)
        if head is not None:
            self._take(head.end())
        elif len(self._waiting) < _MOST_HEAD:
            return False
        else:
            self._raw = True
        self._begun = True
        return True

    def _take(self, length: int) -> str:
        taken, self._waiting = self._waiting[:length], self._waiting[length:]
        return taken


def _plain(unit: str) -> str:
    if not unit.startswith("\\"):
        return unit
    try:
        text = str(json.loads(f'"{unit}"'))
    except ValueError:
        return unit
    return "\ufffd" if "\ud800" <= text <= "\udfff" else text

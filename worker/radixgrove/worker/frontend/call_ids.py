"""Ids of calls, as clients and a model's template take them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from radixgrove.protocol.formats.shapes import CallIds, Calls, Format
from radixgrove.protocol.openai.bodies import ChatMessage

_LETTERS = string.ascii_letters + string.digits


class NewIds:
    """Gives ids that no call of the conversation has."""

    def __init__(self, form: Format, messages: Sequence[ChatMessage]) -> None:
        self._kind = form.calls.ids if isinstance(form.calls, Calls) else CallIds.LONG
        self._before = sum(len(message.tool_calls or ()) for message in messages)

    def __call__(self, name: str, number: int) -> str:
        """Of the answer's `number`th call, of the tool `name`."""
        match self._kind:
            case CallIds.NUMBERED:
                return f"functions.{name}:{self._before + number}"
            case CallIds.NINE:
                return _random(9)
            case CallIds.LONG:
                return "call_" + _random(24)


def _random(length: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(length))

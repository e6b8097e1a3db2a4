"""Server-sent events of a replica on their way to a client: in whole lines, with one end."""

from __future__ import annotations

import re
from typing import Any

from radixgrove.protocol.foreign import decode_json

MAX_LINE_BYTES = 1 << 20  # held back until its end comes

COMMENTS = re.compile(rb"(?:[\r\n]|:[^\n]*\n)*")  # whole lines, from the beginning
_DONE, _ERROR = b"[DONE]", b'"error"'
_MAYBE_LAST = re.compile(rb'^data:[ \t]*(?:\[DONE\][ \t\r]*|(\{.*"error".*))$', re.MULTILINE)


class EventStream:
    """What of a stream may be passed on.

    It ends with `[DONE]`, or with an error event of the replica's own: nothing behind either is
    passed on. Lines are whole, so that a stream that breaks leaves no half event behind; only one
    that is too long to be held is cut.
    """

    __slots__ = ("_ended_event", "_line", "_mid_line", "done", "failed")

    def __init__(self) -> None:
        self.done = False  # `[DONE]` has come
        self.failed = False  # an error event has come
        self._line = b""  # that has not ended
        self._mid_line = False  # what was passed on last ends within a line
        self._ended_event = True

    @property
    def over(self) -> bool:
        return self.done or self.failed

    def pass_on(self, chunk: bytes) -> bytes:
        """What of `chunk`, and of what was held back, the client may have now."""
        if self.over:
            return b""
        cut = chunk.rfind(b"\n") + 1
        if not cut:
            if len(self._line) + len(chunk) <= MAX_LINE_BYTES:
                self._line += chunk
                return b""
            cut = len(chunk)
        part = self._line + chunk[:cut]
        self._line = chunk[cut:]
        if _DONE in part or _ERROR in part:
            part = self._up_to_the_end(part)
        self._mid_line = not part.endswith(b"\n")
        self._ended_event = part.endswith((b"\n\n", b"\n\r\n"))
        return part

    def ended(self) -> bytes:
        """What is left when the replica ended the stream: its last line, if that is an end."""
        if self.over:
            return b""
        part = self._up_to_the_end(self._line)
        return part if self.over else b""

    def broken(self, event: bytes) -> bytes:
        """What is left to be said when no more comes: `event`, unless an end was passed on."""
        if self.over:
            return b""
        self.failed = True
        if self._mid_line:
            return b"\n\n" + event
        return event if self._ended_event else b"\n" + event

    def _up_to_the_end(self, part: bytes) -> bytes:
        for found in _MAYBE_LAST.finditer(part):
            if found[1] is None:
                self.done = True
            elif _is_error(found[1]):
                self.failed = True
            else:
                continue
            return part[: found.end()] + b"\n\n"
        return part


def says_unavailable(chunk: bytes) -> bool:
    """Whether a stream begins with our own 503: its status had left, for comments, before that."""
    if _ERROR not in chunk:
        return False
    found = _MAYBE_LAST.match(COMMENTS.sub(b"", chunk, count=1))
    event = _decoded(found[1]) if found is not None and found[1] is not None else {}
    error = event.get("error")
    return isinstance(error, dict) and error.get("code") == "service_unavailable"


def _is_error(data: bytes) -> bool:
    """Whether an event's data reports a failure, as any engine writes it."""
    event = _decoded(data)
    return bool(event.get("error")) or "error" in (event.get("object"), event.get("type"))


def _decoded(data: bytes) -> dict[str, Any]:
    """Of an object; empty where it is none."""
    try:
        return decode_json(data, dict[str, Any])
    except ValueError:
        return {}

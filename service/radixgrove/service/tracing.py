"""Names that follow a request through router and worker: request id and W3C trace context."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

REQUEST_ID_HEADER = "x-request-id"
TRACEPARENT_HEADER = "traceparent"

_REQUEST_ID = re.compile(r"^[A-Za-z0-9._:/+=@-]{1,128}$")
_TRACEPARENT = re.compile(r"^([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?$")


def request_id(given: str | None) -> str:
    """The client's id when it is short and harmless in a log line, else a new one."""
    if given is not None and _REQUEST_ID.match(given):
        return given
    return f"req-{_hex(16)}"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Our span within a trace (W3C Trace Context, level 1)."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits: ours
    flags: str  # 2 hex digits

    def header(self) -> str:
        """The `traceparent` to send upstream."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


def trace_context(traceparent: str | None) -> TraceContext:
    """Continue the caller's trace with a span of our own, or begin one.

    As the specification asks, a malformed header, version `ff` or all-zero ids count as absent, and
    a later version is read as far as version 00 goes.
    """
    span_id = _hex(8)
    match = _TRACEPARENT.match(traceparent or "")
    if match:
        version, trace_id, parent, flags, rest = match.groups()
        usable = version != "ff" and (version != "00" or rest is None)
        if usable and trace_id.strip("0") and parent.strip("0"):
            return TraceContext(trace_id, span_id, flags)
    return TraceContext(_hex(16), span_id, "00")


def _hex(size: int) -> str:
    """Random, but no secret: the kernel need not be asked."""
    return f"{random.getrandbits(8 * size):0{2 * size}x}"

"""Logging of every part: one line a record, as text or as JSON."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec

ACCESS_LOGGER = "radixgrove.access"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what `extra={"fields": …}` adds."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class TextFormatter(logging.Formatter):
    """For people: `time LEVEL logger: message key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        tail = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
        line = (
            f"{_timestamp(record.created)} {record.levelname:<7} {record.name}: "
            f"{_printable(record.getMessage())}{_printable(tail)}"
        )
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n  {_printable(part)}" for part in trace)
        return line


def _printable(text: str) -> str:
    """What a client sent may stand in a line, but neither begins a line nor steers a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _timestamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def configure(level: str, *, json: bool) -> None:
    """Send all records of this process to standard error, replacing earlier handlers."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)

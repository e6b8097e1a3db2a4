"""Logging of every part: one line a record, as text or as JSON, and none that blocks its process.

Lines go to a bounded queue, from which a thread writes them to standard error. When nothing reads
that (a stuck log collector behind a full pipe), lines are dropped and counted, and serving goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from radixgrove.protocol.foreign import decode_json
from radixgrove.protocol.settings import LogLevel

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

ACCESS_LOGGER = "radixgrove.access"
# Before every line of a trace: text of an exception cannot pass for a record of its own.
TRACE_PREFIX = "| "

_QUEUE_BYTES = 1 << 20
_FLUSH_SECONDS = 1.0  # at exit, for what is still queued
_LEVEL_FILE = "log-level"
_LEVEL_SECONDS = 1.0

_RECORD = re.compile(r"^\S+Z (?P<level>[A-Z]+) +\S+: (?P<message>.*)$")

# C0, DEL, C1, line and paragraph separators, and what reorders text on a terminal.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


# ---- lines -------------------------------------------------------------------------------------


def escape(text: str) -> str:
    """The text with control characters written as `\\n`, `\\x1b`, `\\u2028`: one line, always."""
    return _CONTROL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    return _SHORT.get(char) or (f"\\x{ord(char):02x}" if char < "\u0100" else _unicode(match))


def _unicode(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


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
        # JSON itself leaves DEL and everything above it as it is.
        return _CONTROL.sub(_unicode, msgspec.json.encode(line, enc_hook=str).decode())


class TextFormatter(logging.Formatter):
    """For people: `time LEVEL logger: message key=value …`, and a trace in lines of their own."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = getattr(record, "fields", {})
        tail = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
        line = (
            f"{_timestamp(record.created)} {record.levelname:<7} {record.name}: "
            f"{escape(record.getMessage() + tail)}"
        )
        if record.exc_info:
            trace = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n{TRACE_PREFIX}{escape(text)}" for text in trace)
        return line


def read_record(line: str) -> tuple[str, str]:
    """Level and message of a line as a formatter here wrote it, with the end of its trace where the
    line has that; both empty where it is no record."""
    match = _RECORD.match(line)
    if match is not None:
        return match["level"], match["message"]
    if line.startswith("{"):
        with contextlib.suppress(ValueError, KeyError):
            record = decode_json(line.encode(), dict[str, object])
            level, message = str(record["level"]).upper(), str(record["message"])
            end = str(record.get("exception", "")).rpartition("\n")[2]
            return level, f"{message}: {end}" if end else message
    return "", ""


def _timestamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


# ---- standard error ----------------------------------------------------------------------------


class LineWriter:
    """Writes lines to a descriptor from a thread of its own: `write` never waits.

    At most `limit` bytes wait; lines beyond are dropped, counted, and reported in one line as soon
    as the descriptor takes some again.
    """

    def __init__(self, descriptor: int, limit: int = _QUEUE_BYTES) -> None:
        self.dropped = 0  # lines, since the start
        self.on_drop: Callable[[int], None] = lambda lines: None
        self.report: Callable[[int], str] = "{} log lines were dropped".format
        self._descriptor = descriptor
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # queued, or being written
        self._unreported = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Queue a line (without its end), or drop it."""
        encoded = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._changed:
            if self._bytes + len(encoded) <= self._limit:
                self._lines.append(encoded)
                self._bytes += len(encoded)
            else:
                self._unreported += 1
                self._count(1)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="log writer", daemon=True)
                with contextlib.suppress(RuntimeError):  # none is to be had now
                    thread.start()
                    self._thread = thread
            self._changed.notify_all()

    def flush(self, seconds: float = _FLUSH_SECONDS) -> bool:
        """Whether everything was written within that time."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, seconds)

    def _is_idle(self) -> bool:
        return not self._bytes and not self._unreported

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or self._unreported)
                piece = self._take()
            try:
                self._write(piece)
            except OSError:  # closed, or a full disk
                with self._changed:
                    self._count(piece.count(b"\n"))
            with self._changed:
                self._bytes -= len(piece)
                self._changed.notify_all()

    def _take(self) -> bytes:
        """Whole lines, as many as a pipe that several processes share takes in one piece."""
        if not self._lines:
            report = (self.report(self._unreported) + "\n").encode()
            self._unreported = 0
            self._bytes += len(report)
            return report
        lines = [self._lines.popleft()]
        size = len(lines[0])
        while self._lines and size + len(self._lines[0]) <= select.PIPE_BUF:
            size += len(self._lines[0])
            lines.append(self._lines.popleft())
        return b"".join(lines)

    def _write(self, piece: bytes) -> None:
        while piece:
            piece = piece[os.write(self._descriptor, piece) :]

    def _count(self, lines: int) -> None:
        self.dropped += lines
        self.on_drop(lines)


STDERR = LineWriter(2)
atexit.register(STDERR.flush)


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:  # the call that logged is wrong, which must not hurt its caller
            line = f"{record.name}: a message could not be formatted: {escape(repr(error))}"
        STDERR.write(line)


def configure(level: str, *, json: bool) -> None:
    """Send all records of this process to standard error, replacing earlier handlers.

    Warnings and the exception that ends a thread or the process become records, too.
    """
    formatter = JsonFormatter() if json else TextFormatter()
    handler = _Handler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)

    def report(lines: int) -> str:
        text = "%d log lines were dropped: standard error was not read"
        return formatter.format(
            logger.makeRecord(logger.name, logging.WARNING, "", 0, text, (lines,), None)
        )

    STDERR.report = report
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda args: _log_uncaught(
        args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback
    )


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, (KeyboardInterrupt, SystemExit)):
        logger.critical("uncaught exception", exc_info=(kind, error, trace))


def count_drops(registry: CollectorRegistry | None = None) -> None:
    """Make the lines that this process drops a metric; call once, after multiprocess mode is set.

    prometheus_client decides at its import whether it is in that mode, hence not above.
    """
    from prometheus_client import REGISTRY, Counter

    counter = Counter(
        "radixgrove_log_lines_dropped",
        "Log lines dropped because nothing read standard error.",
        registry=registry or REGISTRY,
    )
    counter.inc(STDERR.dropped)
    STDERR.on_drop = counter.inc


# ---- level -------------------------------------------------------------------------------------


class LevelFile:
    """A file in a private directory by which the processes of one part share their log level."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _LEVEL_FILE

    def write(self, level: LogLevel) -> None:
        """Set the level of this process at once, and of all that follow within a second."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(level)
        fresh.rename(self._path)
        logging.getLogger().setLevel(level.upper())

    def follow(self) -> None:
        """Adopt, from now on, every level that is written.

        A daemon thread looks: an engine that computes, or an event loop that serves, need not.
        """
        threading.Thread(target=self._follow, name="log level", daemon=True).start()

    def _follow(self) -> None:
        current = ""
        while True:
            with contextlib.suppress(OSError, ValueError):
                level = LogLevel(self._path.read_text())
                if level != current:
                    logging.getLogger().setLevel(level.upper())
                    current = level
            time.sleep(_LEVEL_SECONDS)

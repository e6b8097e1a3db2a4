"""Where the lines of a local cluster's parts go: to files, and what people need to the terminal."""

from __future__ import annotations

import logging
import os
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

from radixgrove.service import logs
from radixgrove.service.children import Sink
from radixgrove.service.complaints import REPEAT_SECONDS

_NAME_WIDTH = 10
_FILE_BYTES = 32 << 20
_FAILURES = {"WARNING", "ERROR", "CRITICAL"}
_PROGRESS = "start: "


def default_directory(port: int) -> Path:
    """Directory of the local cluster with its router on `port`: one cluster at a time."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "radixgrove" / f"up-{port}"


def show(name: str, text: str) -> None:
    """A line on the terminal, after the name of the part that it is about."""
    logs.STDERR.write(f"{name:<{_NAME_WIDTH}}| {logs.escape(text)}")


def worth_showing(line: str) -> str | None:
    """What of a log line people need while it runs: how far a start is, and what went wrong."""
    level, message = logs.read_record(line)
    if level in _FAILURES or (level == "INFO" and message.startswith(_PROGRESS)):
        return message
    return None


class _File(RotatingFileHandler):
    """Lines that it cannot take, on a full disk, are lost: said once a minute."""

    _silent_until = 0.0  # monotonic

    def handleError(self, record: logging.LogRecord) -> None:
        if time.monotonic() >= self._silent_until:
            self._silent_until = time.monotonic() + REPEAT_SECONDS
            show(record.name, f"its log file cannot be written: {sys.exc_info()[1]}")


class PartLogs:
    """One file a part, begun anew at each start, of bounded size."""

    def __init__(self, directory: Path, *, follow: bool) -> None:
        """
        Args:
            follow: every line goes to the terminal too.

        Raises:
            OSError: the directory cannot be written.
        """
        self.directory = directory
        self._follow = follow
        self._files: list[logging.Handler] = []
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def sink(self, name: str) -> Sink:
        """Takes the lines of the part of that name."""
        path = self.directory / f"{name}.log"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)  # with `log_prompts` it has what people said
        file = _File(path, maxBytes=_FILE_BYTES, backupCount=1, encoding="utf-8")
        self._files.append(file)

        def take(line: str) -> None:
            file.emit(logging.LogRecord(name, logging.INFO, "", 0, "%s", (line,), None))
            shown = line if self._follow else worth_showing(line)
            if shown is not None:
                show(name, shown)

        return take

    def close(self) -> None:
        for file in self._files:
            file.close()

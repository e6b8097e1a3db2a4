"""A process whose output a test reads while it runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.conftest import wait_until
from tests.forks import Fork


class Spoken:
    """A process that writes to a file, and what stands there."""

    patience = 60.0  # seconds for a line to come

    def __init__(self, process: subprocess.Popen[bytes] | Fork, log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def output(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines(keepends=True)

    def wait_for(self, text: str, deadline: float | None = None) -> None:
        def said() -> bool:
            ended = self.process.poll() is not None  # asked first: its last words come before it
            found = text in self.output
            assert found or not ended, self.output
            return found

        wait_until(said, deadline=deadline or self.patience, what=f"{text!r} in the output")

    def end(self, deadline: float = 60.0) -> int:
        """Wait for the exit; its status."""
        return self.process.wait(deadline)

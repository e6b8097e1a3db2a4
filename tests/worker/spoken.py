"""A process whose stderr a test reads while it runs."""

from __future__ import annotations

import subprocess
import threading

from tests.conftest import wait_until


class Spoken:
    """Collects the lines that a process writes to its stderr, a pipe of text."""

    patience = 60.0  # seconds for a line to come

    def __init__(self, process: subprocess.Popen[str], *, read: bool = True) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        if read:
            self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, deadline: float | None = None) -> None:
        def said() -> bool:
            assert text in self.output or self.process.poll() is None, self.output
            return text in self.output

        wait_until(said, deadline=deadline or self.patience, what=f"{text!r} in the output")

    def end(self, deadline: float = 60.0) -> int:
        """Wait for the exit and for what it said last; the exit status."""
        code = self.process.wait(deadline)
        if self._reader.ident is not None:
            self._reader.join(5)
        return code

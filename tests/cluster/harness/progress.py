"""One line about what is under way: renewed in place on a terminal, now and then elsewhere."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

_EVERY_ON_A_TERMINAL, _EVERY = 0.5, 30.0  # seconds


@dataclass
class Progress:
    """Lines to `stream`, standard error by default."""

    stream: TextIO = field(default_factory=lambda: sys.stderr)
    _last: float = field(default_factory=time.monotonic)
    _shown: bool = False

    def show(self, line: str) -> None:
        """Unless the last one is still young."""
        terminal = self.stream.isatty()
        if time.monotonic() - self._last < (_EVERY_ON_A_TERMINAL if terminal else _EVERY):
            return
        self._last = time.monotonic()
        self._shown = terminal
        print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal else "\n",
              file=self.stream, flush=True)  # fmt: skip

    def clear(self) -> None:
        """Nothing is under way any more."""
        if self._shown:
            print("\r\x1b[K", end="", file=self.stream, flush=True)
            self._shown = False


def minutes(seconds: float) -> str:
    """`40 s`, `12 min`."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"

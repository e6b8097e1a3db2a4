"""Processes of an agent under test read a wall clock that the test can set; monotonic time goes on.

Python imports this by itself at start, from PYTHONPATH.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

if "WALL_CLOCK_SHIFT" in os.environ:
    _file = Path(os.environ["WALL_CLOCK_SHIFT"])
    _real = time.time

    def _shifted() -> float:
        return _real() + float(_file.read_text())

    time.time = _shifted

"""What a process gets from whatever starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_OPENS_A_FILE = """
import os, sys
from radixgrove.service.processes import take_descriptors
take_descriptors()
descriptor = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(2, b"a log line")
os.write(descriptor, str(descriptor).encode())
"""


def test_nothing_gets_the_number_of_a_standard_stream_that_was_closed(tmp_path: Path) -> None:
    file = tmp_path / "opened"
    program = [sys.executable, "-c", _OPENS_A_FILE, str(file)]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *program]
    subprocess.run(closed, check=True, timeout=60)
    assert int(file.read_text()) > 2

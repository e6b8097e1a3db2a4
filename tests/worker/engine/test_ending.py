"""How a rank's process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading
from radixgrove.service import logs
from radixgrove.worker.engine.ending import run_to_end

def main():
    atexit.register(threading.Event().wait)
    logs.STDERR.write("the reason")
    print("the output")
    {end}

run_to_end(main)
"""


@pytest.mark.parametrize(
    ("end", "status"), [("return 4", 4), ("return 0", 0), ("sys.exit(0)", 0), ("sys.exit()", 0)]
)
def test_a_rank_ends_with_its_status_and_waits_for_nothing(end: str, status: int) -> None:
    """As for NCCL, whose destructor waits for ranks behind a link that is cut."""
    command = [sys.executable, "-c", SCRIPT.format(end=end)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = ended.returncode, ended.stderr.strip(), ended.stdout.strip()
    assert said == (status, "the reason", "the output")

"""How a rank's process ends."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit, threading
from radixgrove.service import logs
from radixgrove.worker.engine.ending import end_process
atexit.register(threading.Event().wait)
logs.STDERR.write("the reason")
end_process({status})
"""


def test_a_rank_that_failed_says_why_and_waits_for_nothing() -> None:
    """As for NCCL, whose destructor waits for ranks behind a link that is cut."""
    command = [sys.executable, "-c", SCRIPT.format(status=4)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.strip()) == (4, "the reason")

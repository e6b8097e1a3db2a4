"""How a rank's process ends when the interpreter cannot end it in time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from radixgrove.service import exit_codes, logs


def run_to_end(main: Callable[[], int]) -> NoReturn:
    """Run a rank, and end this process with its status, without the interpreter's own ending: NCCL
    waits there without a limit for ranks that are cut off, and a thread that is inside torch then
    aborts the process."""
    try:
        status = main()
    except SystemExit as end:  # of a signal
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    try:
        sys.stdout.flush()
        logs.STDERR.flush(1.0)
    finally:  # also where the output cannot be written
        os._exit(status)


def give_up(rank: int) -> Callable[[str], None]:
    """For the links of a group: end this process at once, saying why."""

    def end(why: str) -> None:
        logs.STDERR.write(logs.escape(f"error: engine rank {rank} gave up: {why}"))
        logs.STDERR.flush(1.0)
        os._exit(exit_codes.STUCK)

    return end

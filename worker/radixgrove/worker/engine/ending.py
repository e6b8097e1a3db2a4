"""How a rank's process ends when the interpreter cannot end it in time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from radixgrove.service import exit_codes, logs


def end_process(status: int) -> NoReturn:
    """End this process with `status`; one that failed skips the interpreter's own ending, in which
    NCCL waits without a limit for ranks that are cut off."""
    if status:
        logs.STDERR.flush(1.0)
        os._exit(status)
    sys.exit(status)


def give_up(rank: int) -> Callable[[str], None]:
    """For the links of a group: end this process at once, saying why."""

    def end(why: str) -> None:
        logs.STDERR.write(logs.escape(f"error: engine rank {rank} gave up: {why}"))
        logs.STDERR.flush(1.0)
        os._exit(exit_codes.STUCK)

    return end

"""How a rank's process ends when its main thread cannot end it any more."""

from __future__ import annotations

import os
from collections.abc import Callable

from radixgrove.service import exit_codes, logs


def give_up(rank: int) -> Callable[[str], None]:
    """For the links of a group: end this process at once, saying why."""

    def end(why: str) -> None:
        logs.STDERR.write(logs.escape(f"error: engine rank {rank} gave up: {why}"))
        logs.STDERR.flush(1.0)
        os._exit(exit_codes.STUCK)

    return end

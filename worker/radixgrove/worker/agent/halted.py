"""Ranks that the kernel holds (SIGSTOP, a debugger), which can notice nothing themselves."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from radixgrove.service import exit_codes
from radixgrove.service.children import Child
from radixgrove.service.liveness import Clock, WatchClock
from radixgrove.worker.agent.preparation import AgentError
from radixgrove.worker.liveness import SILENCE


class Halted:
    """Finds a rank that is held for longer than `SILENCE`, in the start as well as later."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = WatchClock(clock)
        self._since: dict[int, float] = {}  # by process

    def find(self, ranks: Iterable[Child]) -> AgentError | None:
        """What to end with, if one is held. To be asked at least once a second."""
        now = self._clock.now()
        held = [rank for rank in ranks if rank.running and is_stopped(rank.pid)]
        self._since = {rank.pid: self._since.get(rank.pid, now) for rank in held}
        for rank in held:
            if now - self._since[rank.pid] > SILENCE:
                text = f"{rank.name} (process {rank.pid}) is stuck: it has been stopped"
                return AgentError(text, exit_codes.STUCK)
        return None


def is_stopped(pid: int) -> bool:
    """Whether the kernel holds the process (state T); False for one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name in parentheses may itself contain spaces and parentheses.
    return stat.rpartition(")")[2].split()[0] in ("T", "t")

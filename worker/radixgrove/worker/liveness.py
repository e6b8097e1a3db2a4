"""Whether an engine is alive, judged by its scheduler's own step counter."""

from __future__ import annotations

from pathlib import Path

from radixgrove.worker.messages import EngineState, Stats

# Seconds. An idle engine ticks five times a second; a busy one says by when its step will end.
SILENCE = 5.0
DEADLINE_GRACE = 1.0
# Loading, warm-up and compiling report progress; this long without any is a hang.
START_SILENCE = 900.0
FRESH = 2.0  # readiness ends long before the kill


class Liveness:
    """Follows `Stats` of one engine.

    All times are Unix seconds of this host, as the engine's deadlines are.
    """

    def __init__(self, now: float) -> None:
        self.stats: Stats | None = None
        self._heard = now  # any sign of life
        self._ticked = now  # the counter moved

    def hear(self, now: float) -> None:
        """The engine said something other than `Stats`: progress of its start, cache events."""
        self._heard = now

    def take(self, stats: Stats, now: float) -> None:
        if self.stats is None or stats.ticks != self.stats.ticks:
            self._ticked = now
        self._heard = now
        self.stats = stats

    def ready(self, now: float) -> bool:
        """The engine takes requests and its counter moved just now, or its step is in time."""
        stats = self.stats
        if stats is None or stats.state is not EngineState.READY:
            return False
        if stats.step_deadline is not None:
            return now <= stats.step_deadline
        return now - self._ticked <= FRESH

    def problem(self, now: float, *, stopped: bool = False) -> str | None:
        """Why the engine must be given up, or None.

        `stopped`: the kernel says that a rank's process does not run (SIGSTOP, a debugger), so a
        deadline that is still far away need not be waited for.
        """
        stats = self.stats
        if stats is None or stats.state is not EngineState.READY:
            if now - self._heard > START_SILENCE:
                return f"it has shown no progress of its start for {now - self._heard:.0f} s"
            return None
        silence = now - self._ticked
        if stats.step_deadline is not None and not stopped:
            late = now - stats.step_deadline
            if late > DEADLINE_GRACE:
                return f"step {stats.steps + 1} is {late:.1f} s past its deadline"
            return None
        if silence > SILENCE:
            return f"its scheduler has not ticked for {silence:.1f} s"
        return None


def is_stopped(pid: int) -> bool:
    """Whether the kernel holds the process (state T); False for one that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The name in parentheses may itself contain spaces and parentheses.
    return stat.rpartition(")")[2].split()[0] in ("T", "t")

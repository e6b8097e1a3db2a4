"""Whether an engine is alive, judged by its scheduler's own step counter."""

from __future__ import annotations

import time

from radixgrove.service.liveness import Clock, WatchClock
from radixgrove.worker.messages import EngineState, Stats

# Seconds. An idle engine ticks five times a second; a busy one says how long its step may take.
SILENCE = 5.0
FAR_SILENCE = 6.0  # of another machine's: where that is cut off, it is named first, after 5 s
DEADLINE_GRACE = 1.0
GROUP_GRACE = 4.0  # of several ranks: rank 0 names the one to blame, if it can
# Loading, warm-up and compiling report progress; this long without any is a hang.
START_SILENCE = 900.0
FRESH = 2.0  # readiness ends long before the kill


class Liveness:
    """Follows `Stats` of one engine: the one rule by which it is ready, and by which it is stuck.

    `ready` or `problem` must be asked at least once a second: time without a look does not count
    (see `WatchClock`).
    """

    def __init__(
        self,
        clock: Clock = time.monotonic,
        grace: float = DEADLINE_GRACE,
        silence: float = SILENCE,
    ) -> None:
        """
        Args:
            grace: seconds beyond a step's deadline.
            silence: seconds without a tick.
        """
        self.stats: Stats | None = None
        self._clock = WatchClock(clock)
        self._grace = grace
        self._silence = silence
        self._heard = self._ticked = self._clock.now()  # any sign of life; the counter moved
        self._deadline: float | None = None  # of the running step

    def hear(self) -> None:
        """The engine said something other than `Stats`: progress of its start, cache events."""
        self._heard = self._clock.now()

    def take(self, stats: Stats) -> None:
        now = self._clock.now()
        if self.stats is None or stats.ticks != self.stats.ticks:
            self._ticked = now
        self._heard = now
        self._deadline = self._deadline_by(stats, now)
        self.stats = stats

    def _deadline_by(self, stats: Stats, now: float) -> float | None:
        if stats.step_remaining is None:
            return None
        deadline = now + stats.step_remaining
        # The same step again: its first word holds, however long a later one was on its way.
        if (
            self._deadline is not None
            and self.stats is not None
            and stats.steps == self.stats.steps
        ):
            return min(deadline, self._deadline)
        return deadline

    def ready(self) -> bool:
        """The engine takes requests and its counter moved just now, or its step is in time."""
        now = self._clock.now()
        if self.stats is None or self.stats.state is not EngineState.READY:
            return False
        if self._deadline is not None:
            return now <= self._deadline
        return now - self._ticked <= FRESH

    def problem(self) -> str | None:
        """Why the engine must be given up, or None."""
        now, stats = self._clock.now(), self.stats
        if stats is None or stats.state is not EngineState.READY:
            if now - self._heard > START_SILENCE:
                return f"it has shown no progress of its start for {now - self._heard:.0f} s"
            return None
        if self._deadline is not None:
            late = now - self._deadline
            if late > self._grace:
                return f"step {stats.steps + 1} is {late:.1f} s past its deadline"
            return None
        silence = now - self._ticked
        if silence > self._silence:
            return f"its scheduler has not ticked for {silence:.1f} s"
        return None

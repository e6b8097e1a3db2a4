"""How long threads of a CPU engine spin for each other between two operations, before they sleep.

A decode step has hundreds of operations of some ten microseconds: with threads that sleep after
each it takes longer. Where others use the cores too, threads spin for one that does not run.

GNU's OpenMP, which torch brings, reads the length of a spin once, when it is loaded; but while it
has more threads than there are cores, it spins for 100 turns (see `GOMP_SPINCOUNT` in its manual).
So while this process waits for cores, it has further teams of threads, which sleep. Another OpenMP
does not heed them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from radixgrove.protocol.settings import Device, WorkerSettings
from radixgrove.service import machine
from radixgrove.worker.parallel.layout import Layout

_log = logging.getLogger(__name__)

SAID_BY = frozenset({"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"})
_PROC = Path("/proc/self")
_SECONDS = 1.0  # from one look to the next
_PARALLEL = 1 << 16  # elements: enough for torch to use all threads
# Of the time in which threads run or could run, what they wait for a core.
_SHARED = 0.3
_CALM = 0.1
_CALM_LOOKS = 10
_LEAST_BUSY = 0.2  # cores: an engine that uses less says nothing about them


class _Times(NamedTuple):
    """Of a thread, in nanoseconds since it began."""

    ran: int
    waited: int  # for a core


def are_said(environ: Mapping[str, str]) -> bool:
    """Whether the user has said how threads wait."""
    return not SAID_BY.isdisjoint(environ)


def can_follow_load(threads: int, proc: Path = _PROC) -> bool:
    """Whether a process with teams of so many threads can wait as its cores are shared or not.

    Not where the kernel does not say how long threads wait, nor under a quota, which spinning uses
    up, nor with fewer threads than half the cores, which would take teams for all the others.
    """
    cores = len(os.sched_getaffinity(0))
    if threads < 2 or 2 * threads < cores or machine.cores(proc) < cores:
        return False
    return any(times.ran for times in _times(proc).values())


def follows_load(settings: WorkerSettings, environ: Mapping[str, str]) -> bool:
    """Whether an engine waits as its cores are shared or not, unless the user has said how.

    The agent asks before it starts an engine, which asks again: with long spins, which the agent
    leaves to an engine that follows, one that does not would keep others from running.
    """
    if are_said(environ) or settings.device is Device.CUDA:
        return False
    threads = settings.cpu_threads
    if threads is None and "OMP_NUM_THREADS" in environ:
        return False  # only OpenMP knows how many they are
    # torch may take fewer, one a physical core: then a team is smaller, and there are more.
    return can_follow_load(threads or machine.cores() // Layout.of(settings).ranks_per_node)


def follow_load(settings: WorkerSettings, threads: int) -> None:
    """Watch this process from now on to its end, if its engine is one that `follows_load`.

    Args:
        threads: of a team of OpenMP. A later call changes it.
    """
    if threads > 1 and follows_load(settings, os.environ):
        _watched().threads = threads


@functools.cache
def _watched() -> OpenMpWaits:
    """This process's, which a thread of its own looks at."""
    waits = OpenMpWaits(threads=2)

    def watch() -> None:
        while True:
            time.sleep(_SECONDS)
            waits.look()

    threading.Thread(target=watch, name="openmp waits", daemon=True).start()
    return waits


class OpenMpWaits:
    """Long, or `short` while this process's threads wait for cores."""

    def __init__(self, threads: int, proc: Path = _PROC) -> None:
        """
        Args:
            threads: of a team of OpenMP; at least 2.
            proc: what the kernel says of this process.
        """
        self.threads = threads
        self._cores = len(os.sched_getaffinity(0))  # those that OpenMP has found
        self._teams: list[threading.Thread] = []
        self._over = threading.Event()
        self._refused = False  # whether the system had no threads for teams
        self._proc = proc
        self._times, self._since = _times(proc), time.monotonic()
        self._calm = 0  # looks, one after the other

    @property
    def short(self) -> bool:
        return bool(self._teams)

    def look(self) -> None:
        """Judge by what threads ran and waited since the last look."""
        times, now = _times(self._proc), time.monotonic()
        both = [(times[task], old) for task, old in self._times.items() if task in times]
        ran = sum(new.ran - old.ran for new, old in both)
        waited = sum(new.waited - old.waited for new, old in both)
        seconds, self._times, self._since = now - self._since, times, now
        if ran + waited < _LEAST_BUSY * seconds * 1e9:
            return
        share = waited / (ran + waited)
        self._calm = self._calm + 1 if share < _CALM else 0
        if not (self.short or self._refused) and share > _SHARED:
            _log.debug("threads wait for cores %.0f %% of the time: short spins", 100 * share)
            self.shorten()
        elif self.short and self._calm >= _CALM_LOOKS:
            _log.debug("threads have the cores to themselves: long spins")
            self.lengthen()

    def shorten(self) -> None:
        """Start the teams, or none if the system has no threads for all of them."""
        # OpenMP counts 1 for the process and threads - 1 for each team. The engine's own team adds
        # at least 1 while it waits: with that they are more than the cores.
        count = -(-(self._cores - 1) // (self.threads - 1))
        together = threading.Barrier(count + 1)
        self._over.clear()
        try:
            for _ in range(count):
                team = threading.Thread(target=self._lead, args=(together,), daemon=True)
                team.start()
                self._teams.append(team)
        except RuntimeError as error:
            self._refused = True
            together.abort()
            self.lengthen()
            _log.warning(
                "threads wait for cores and spin for long, since teams for short spins cannot "
                "start (%s): raise the limit of processes, or set GOMP_SPINCOUNT=1000",
                error,
            )
            return
        together.wait()
        together.wait()

    def lengthen(self) -> None:
        """End the teams: threads that OpenMP started for another end with it."""
        self._over.set()
        for team in self._teams:
            team.join()
        self._teams.clear()

    def _lead(self, together: threading.Barrier) -> None:
        import torch  # here: the agent, which asks `can_follow_load`, has none

        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait()  # until all run: OpenMP ends a process that it cannot start threads in
            torch.empty(_PARALLEL).fill_(0)
            together.wait()
            self._over.wait()


def _times(proc: Path) -> dict[str, _Times]:
    """By thread; of those that end meanwhile, and where the kernel does not say it, none."""
    times = {}
    for path in proc.glob("task/*/schedstat"):
        try:
            ran, waited, _ = path.read_text().split()
        except (OSError, ValueError):
            continue
        times[path.parent.name] = _Times(int(ran), int(waited))
    return times

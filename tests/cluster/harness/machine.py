"""The machine, which test processes side by side share; what is timed has it for itself."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from tests.cluster.harness.build import cache_directory
from tests.cluster.harness.waiting import wait_until

_LONGEST = 1500.0  # seconds that somebody else's test may take

_share: IO[str] | None = None  # this process's, locked


@contextmanager
def shared() -> Iterator[None]:
    """Work beside everybody else's, but not beside what wants to be `alone`."""
    global _share
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "machine").open("w") as _share:
        _come_in(_share, fcntl.LOCK_SH)
        try:
            yield
        finally:
            _share = None


@contextmanager
def alone() -> Iterator[None]:
    """A part of `shared` work that waits until no other process works, and lets none begin."""
    if _share is None:
        raise RuntimeError("only what works `shared` can be alone for a while")
    _lock(_share, fcntl.LOCK_UN)  # two that want to be alone must not wait for each other
    _come_in(_share, fcntl.LOCK_EX)
    try:
        yield
    finally:
        # Not by the gate: the process that holds it waits for this.
        _lock(_share, fcntl.LOCK_SH)


def _come_in(share: IO[str], how: int) -> None:
    """Through a gate, one by one: none overtakes a process that waits to be alone."""
    with (cache_directory() / "machine.gate").open("w") as gate:
        _lock(gate, fcntl.LOCK_EX)
        _lock(share, how)


def _lock(file: IO[str], how: int) -> None:
    def locked() -> bool:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    wait_until(locked, "the tests of other processes make room", timeout=_LONGEST)

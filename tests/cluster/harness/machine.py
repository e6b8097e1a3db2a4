"""The machine, which test processes side by side share; what is timed has it for itself."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from tests.cluster.harness.build import cache_directory

_share: IO[str] | None = None  # this process's, locked


@contextmanager
def shared() -> Iterator[None]:
    """Work beside everybody else's, but not beside what wants to be `alone`."""
    global _share
    directory = cache_directory()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "machine").open("w") as _share:
        _lock(_share, fcntl.LOCK_SH)
        try:
            yield
        finally:
            _share = None


@contextmanager
def alone() -> Iterator[None]:
    """A part of `shared` work that waits until nobody else works, and lets nobody begin."""
    if _share is None:
        raise RuntimeError("only what works `shared` can be alone for a while")
    fcntl.flock(_share, fcntl.LOCK_UN)  # two that want to be alone must not wait for each other
    _lock(_share, fcntl.LOCK_EX)
    try:
        yield
    finally:
        _lock(_share, fcntl.LOCK_SH)


def _lock(share: IO[str], how: int) -> None:
    """Through a gate one by one: nobody passes whoever waits to be alone."""
    with (cache_directory() / "machine.gate").open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(share, how)

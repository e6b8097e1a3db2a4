"""Waiting for a condition, always with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Seconds for what takes a few on idle cores. A deadline of its own has only
# what takes longer, or what the specification itself puts a time on.
PATIENCE = 180.0


class Timeout(AssertionError):
    """A condition did not become true in time; the message names it and what was last seen."""


def wait_until(
    condition: Callable[[], T | None],
    what: str,
    *,
    timeout: float = PATIENCE,
    interval: float = 0.2,
) -> T:
    """Polls `condition` until it returns something true, and returns that.

    Raises `Timeout` after `timeout` seconds. Exceptions of the condition are its own business.
    """
    deadline = time.monotonic() + timeout
    while True:
        seen = condition()
        if seen:
            return seen
        if time.monotonic() >= deadline:
            raise Timeout(f"not within {timeout:g} s: {what}; last seen: {seen!r}")
        time.sleep(interval)

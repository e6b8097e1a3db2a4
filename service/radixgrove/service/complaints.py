"""Problems that last: said when they begin, and once a minute while they go on."""

from __future__ import annotations

import logging
import time

REPEAT_SECONDS = 60.0
MAX_KEYS = 4096


class Complaints:
    """What one logger has complained about, by key."""

    def __init__(self, logger: logging.Logger, level: int = logging.ERROR) -> None:
        self._logger = logger
        self._level = level
        self._next: dict[str, float] = {}  # monotonic time from which it is said again

    def say(self, key: str, text: str) -> bool:
        """Logs `text`, unless `key` was logged within the last minute; returns whether it did."""
        now = time.monotonic()
        if now < self._next.get(key, 0.0):
            return False
        if len(self._next) >= MAX_KEYS:
            self._next.clear()
        self._next[key] = now + REPEAT_SECONDS
        self._logger.log(self._level, "%s", text)
        return True

    def settle(self, key: str) -> None:
        """The problem is over: when it comes back, it is said at once."""
        self._next.pop(key, None)

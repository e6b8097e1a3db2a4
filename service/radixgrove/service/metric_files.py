"""prometheus_client's files, where it writes them, on a disk that may be full.

The library maps files with holes. Where the disk has no room for a page that is written to for the
first time, the kernel ends the process by SIGBUS. Here a file has all of its room before it is
mapped. Once there is no more, values that are new are left out, and written as soon as there is.

prometheus_client decides at its import whether it writes files at all: import this after that is
set.
"""

from __future__ import annotations

import os

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

_FIRST_BYTES = 1 << 16  # as large as the library makes a file
_AROUND_KEY = 4 + 8 + 16  # bytes: its length, padding at most, value and time


class _WithRoom(MmapedDict):
    """Values by key in a file that grows only where the disk has the room."""

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        """Raises OSError: there is no room for a file at all."""
        if not read_mode:
            with open(filename, "ab") as file:
                os.posix_fallocate(file.fileno(), 0, _FIRST_BYTES)
        super().__init__(filename, read_mode)  # type: ignore[no-untyped-call]

    def read_value(self, key: str) -> tuple[float, float]:
        if not self._has_room(key):
            return 0.0, 0.0
        value: tuple[float, float] = super().read_value(key)  # type: ignore[no-untyped-call]
        return value

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if self._has_room(key):
            super().write_value(key, value, timestamp)  # type: ignore[no-untyped-call]

    def _has_room(self, key: str) -> bool:
        if key in self._positions:
            return True
        capacity, end = self._capacity, self._used + len(key.encode()) + _AROUND_KEY
        while capacity < end:
            capacity *= 2
        if capacity > self._capacity:
            try:
                os.posix_fallocate(self._f.fileno(), 0, capacity)
            except OSError:
                return False
        return True


def reserve_room() -> None:
    """For all metrics that this process makes from now on."""
    values.MmapedDict = _WithRoom  # type: ignore[attr-defined]

"""The user that a process runs as."""

from __future__ import annotations

import os
import pwd


def know_user() -> None:
    """Gives this process, and those that it starts, a user's name and home where the system knows
    none, as of the arbitrary user ids of containers.

    Libraries ask for them to name and place their caches, and fail without.
    """
    number = os.getuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        os.environ["USER"] = os.environ.get("USER") or f"uid-{number}"
        os.environ["HOME"] = os.environ.get("HOME") or os.environ.get("TMPDIR") or "/tmp"

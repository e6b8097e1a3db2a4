"""The user that a process runs as."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from pathlib import Path


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
        os.environ["HOME"] = os.environ.get("HOME") or str(_temporary_home(number))


def _temporary_home(number: int) -> Path:
    """A directory of this user alone: libraries run code that they find in their caches."""
    base = Path(os.environ.get("TMPDIR") or "/tmp")
    home = base / f"radixgrove-{number}"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        found = home.lstat()
    except FileExistsError:  # no directory
        return Path(tempfile.mkdtemp(prefix=f"{home.name}-", dir=base))
    except OSError:  # no place to write: there will be no caches
        return home
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if ours and not stat.S_IMODE(found.st_mode) & 0o077:
        return home
    return Path(tempfile.mkdtemp(prefix=f"{home.name}-", dir=base))

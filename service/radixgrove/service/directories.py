"""Private directories of running processes; the next start sweeps those of killed owners.

The owner holds a lock on a file in its directory; the kernel drops it with the process, however
that ended. A process id would not do: another process, or another container, may have the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from radixgrove.protocol.errors import StartFailed

_LOCK = "lock"
# Unix socket paths are at most 107 bytes; the longest of ours ends in `/frontend-63.sock`.
_MAX_BASE_PATH = 50


class NoPrivateDirectory(StartFailed):
    """No temporary directory can be written; the text says what to change."""


@contextlib.contextmanager
def private_directory(prefix: str) -> Iterator[Path]:
    """A new directory of mode 0700, removed at the end; remains of killed owners go as well.

    Raises:
        NoPrivateDirectory: there is none to be had.
    """
    try:
        base = Path(tempfile.gettempdir())
        if len(str(base)) > _MAX_BASE_PATH:
            base = Path("/tmp")
        remove_abandoned(base, prefix)
        directory, lock = _make(base, prefix)
    except OSError as error:
        raise NoPrivateDirectory(
            f"no private directory can be made ({error}): set TMPDIR to a directory with a path of "
            f"at most {_MAX_BASE_PATH} characters that can be written"
        ) from error
    try:
        yield directory
    finally:
        # Removed before the lock is released: another start would take it for abandoned.
        shutil.rmtree(directory, ignore_errors=True)
        lock.close()


def _make(base: Path, prefix: str) -> tuple[Path, IO[bytes]]:
    """A directory and its lock, held. Another start may sweep it before it is locked: once more."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        lock = (directory / _LOCK).open("xb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), (directory / _LOCK).stat()):
                return directory, lock
        lock.close()


def remove_abandoned(base: Path, prefix: str) -> None:
    """Removes this user's directories that no process has locked; safe beside other starts."""
    for directory in base.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            with (directory / _LOCK).open("r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)

"""Directories of processes that end well, are killed, or start at the same moment."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixgrove.service import directories
from radixgrove.service.directories import (
    NoPrivateDirectory,
    private_directory,
    remove_abandoned,
)

PREFIX = "radixgrove-test-"
OWNER = f"""
import sys
from radixgrove.service.directories import private_directory
with private_directory({PREFIX!r}) as directory:
    (directory / "content").touch()
    print(directory, flush=True)
    sys.stdin.read()
"""


class Owner:
    """A process with a directory, until `end` or `kill`."""

    def __init__(self, base: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"TMPDIR": str(base)},
            text=True,
        )

    @property
    def directory(self) -> Path:
        assert self.process.stdout is not None
        return Path(self.process.stdout.readline().strip())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(30) == 0


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for temporary files with a short name, as Unix sockets need it."""
    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_next_start_sweeps_what_killed_owners_left_and_nothing_else(base: Path) -> None:
    killed, living = Owner(base), Owner(base)
    left, kept = killed.directory, living.directory
    (base / f"{PREFIX}strange").mkdir()  # no lock: of an unknown owner
    killed.kill()
    assert left.exists()
    remove_abandoned(base, PREFIX)
    assert not left.exists()
    assert (kept / "content").exists()
    assert kept.stat().st_mode & 0o777 == 0o700
    living.end()
    assert [path.name for path in base.iterdir()] == [f"{PREFIX}strange"]


def test_many_starts_at_once(base: Path) -> None:
    dead = [Owner(base) for _ in range(3)]
    left = [owner.directory for owner in dead]
    for owner in dead:
        owner.kill()
    owners = [Owner(base) for _ in range(6)]
    kept = [owner.directory for owner in owners]
    assert len(set(kept)) == len(owners)
    assert all((directory / "content").exists() for directory in kept)
    assert not any(directory.exists() for directory in left)
    for owner in owners:
        owner.end()
    assert not list(base.iterdir())


def test_directory_that_is_swept_before_it_is_locked_is_made_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []
    lock = fcntl.flock

    def sweep_first(descriptor: Any, operation: int) -> None:
        if not swept:
            swept.extend(base.glob(f"{PREFIX}*"))
            remove_abandoned(base, PREFIX)
        lock(descriptor, operation)

    monkeypatch.setattr(directories.fcntl, "flock", sweep_first)
    with private_directory(PREFIX) as directory:
        assert len(swept) == 1
        assert not swept[0].exists()
        assert directory.exists()
        remove_abandoned(base, PREFIX)
        assert directory.exists()
    assert not directory.exists()


def test_where_no_directory_can_be_made_the_reason_says_what_to_change(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(directories.tempfile, "mkdtemp", full)
    with (
        pytest.raises(NoPrivateDirectory, match=r"No space left on device.*TMPDIR"),
        private_directory(PREFIX),
    ):
        pass

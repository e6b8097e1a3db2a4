"""State directories: who owns a cluster, and the removal of everything it left on the machine.

All that a cluster makes can be found again from its name alone: processes carry its state
directory in their environment (`processes.MARK`), node processes sit in cgroups and behind links
called `<name>-…`, everything else lies in the directory. Removal therefore needs no journal, is the
same after an orderly end and after a SIGKILL, and may itself be interrupted and repeated.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.cluster.harness import cgroups
from tests.cluster.harness.build import cache_directory
from tests.cluster.harness.processes import kill_marked
from tests.cluster.harness.waiting import wait_until

_DETACHED = "detached"


class StateError(RuntimeError):
    """A state directory is in use, or something in it cannot be removed safely."""


def state_root() -> Path:
    """Where the state directories of all clusters lie."""
    return cache_directory() / "state"


class StateDirectory:
    """The directory of one cluster, held by a file lock for as long as its owner lives.

    A detached cluster outlives its owner: only an explicit removal ends it.
    """

    def __init__(self, path: Path, lock: IO[str]) -> None:
        self.path = path
        self._lock = lock

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def claim(cls, name: str) -> StateDirectory | None:
        """Takes a name, clearing what a dead owner left; None when a living one holds it."""
        lock = _try_lock(name)
        if lock is None:
            return None
        state = cls(state_root() / name, lock)
        if state.detached:
            state.release()
            return None
        state._remove_contents()
        state.path.mkdir()
        return state

    @classmethod
    def reopen(cls, name: str) -> StateDirectory | None:
        """Takes over an existing cluster, e.g. a detached one; None when its owner lives."""
        lock = _try_lock(name)
        return None if lock is None else cls(state_root() / name, lock)

    @property
    def detached(self) -> bool:
        """Whether the cluster may live without an owner."""
        return (self.path / _DETACHED).exists()

    def detach(self) -> None:
        """Lets the cluster go on when this process ends."""
        (self.path / _DETACHED).touch()
        self.release()

    def release(self) -> None:
        """Gives up the lock and touches nothing else."""
        self._lock.close()

    def remove(self) -> None:
        """Ends every process of the cluster and removes all that it made on this machine."""
        self._remove_contents()
        (state_root() / f"{self.name}.lock").unlink(missing_ok=True)
        self.release()

    def _remove_contents(self) -> None:
        cgroups.kill_all(f"{self.name}-")
        kill_marked(self.path)
        _delete_links(self.name)
        cgroups.remove(f"{self.name}-")
        wait_until(lambda: not loop_devices(self.path), "the nodes' disks are free")
        _remove_tree(self.path)
        _restore_sysctls()


def loop_devices(path: Path) -> list[str]:
    """Loop devices on files below `path`; they go with a node's last process."""
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # detached meanwhile
            if file.read_text().startswith(f"{path}/"):
                found.append(file.parts[3])
    return found


def names() -> list[str]:
    """Names of all clusters that have a state directory or a lock."""
    if not state_root().exists():
        return []
    return sorted({path.name.removesuffix(".lock") for path in state_root().glob("*.lock")})


def sweep() -> None:
    """Removes what owners that no longer live have left behind; detached clusters stay."""
    with sweeping():
        for found in _ownerless():
            if found.detached:
                found.release()
            else:
                found.remove()


def remove_ownerless() -> None:
    """Ends detached clusters too; only what a living process owns stays."""
    with sweeping():
        for found in _ownerless():
            found.remove()


@contextmanager
def sweeping() -> Iterator[None]:
    """One process sweeps at a time: the next one finds the work done."""
    state_root().mkdir(parents=True, exist_ok=True)
    with (state_root() / "sweeping").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _ownerless() -> Iterator[StateDirectory]:
    for name in names():
        found = StateDirectory.reopen(name)
        if found is not None:
            yield found


def remember_sysctl(path: str) -> None:
    """Notes a setting of the host before it changes; it comes back when the last cluster ends."""
    setting = Path("/proc/sys") / path
    with _sysctl_journal() as journal:
        if setting.exists():
            journal.setdefault(path, setting.read_text().strip())


def set_sysctl(path: str, value: str) -> None:
    """Changes a setting of the host until the last cluster ends."""
    remember_sysctl(path)
    (Path("/proc/sys") / path).write_text(value)


@contextmanager
def _sysctl_journal() -> Iterator[dict[str, str]]:
    """The host's settings from before the first cluster, by their path below /proc/sys."""
    state_root().mkdir(parents=True, exist_ok=True)
    with (state_root() / "sysctls.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        journal: dict[str, str] = json.loads(text) if text else {}
        before = dict(journal)
        yield journal
        if journal != before:
            file.truncate(0)
            file.write(json.dumps(journal))


def _restore_sysctls() -> None:
    with _sysctl_journal() as journal:
        # Asked in here: a cluster that begins now changes settings only after they are restored.
        if any(path.is_dir() for path in state_root().iterdir()):
            return
        for path, value in journal.items():
            (Path("/proc/sys") / path).write_text(value)
        journal.clear()


def _try_lock(name: str) -> IO[str] | None:
    """Locks a name's file; notices another owner's unlinking it between open and lock."""
    state_root().mkdir(parents=True, exist_ok=True)
    path = state_root() / f"{name}.lock"
    while True:
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        file.close()


def _delete_links(name: str) -> None:
    def left() -> list[str]:
        names = (entry.name for entry in Path("/sys/class/net").iterdir())
        found = [link for link in names if link == name or link.startswith(f"{name}-")]
        for link in found:
            # A veth may vanish with its namespace at this very moment: only what stays counts.
            subprocess.run(["ip", "link", "delete", link], capture_output=True)
        return found

    wait_until(lambda: not left(), f"the network links of {name} are deleted")


def _remove_tree(path: Path) -> None:
    """Removes a state directory, refusing when anything is mounted below it."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    below = [line.split()[4] for line in mounts if line.split()[4].startswith(f"{path}/")]
    if below:
        raise StateError(f"still mounted: {', '.join(below)}")
    if path.exists():
        shutil.rmtree(path)

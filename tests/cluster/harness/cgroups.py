"""Control groups of the nodes, in every hierarchy of a version 1, hybrid or version 2 system.

A node's programs and pods all live below one top-level group named after the node, which makes
"every process of the node" a thing the kernel knows.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.harness.waiting import wait_until

MOUNT = Path("/sys/fs/cgroup")
SYSTEM = "system"  # the group below a node's that holds containerd, kubelet and the like


def hierarchies() -> list[Path]:
    """The roots of all hierarchies: one in version 2, one per set of controllers in version 1."""
    if (MOUNT / "cgroup.controllers").exists():
        return [MOUNT]
    found = [path for path in sorted(MOUNT.iterdir()) if (path / "cgroup.procs").exists()]
    return [path for path in found if not path.is_symlink()]


def create(name: str) -> list[Path]:
    """Makes a node's group and its system group; returns the latter's `cgroup.procs` files."""
    files = []
    for root in hierarchies():
        group = root / name
        for path in (group, group / SYSTEM):
            path.mkdir(exist_ok=True)
            _inherit_cpuset(path)
        if root == MOUNT:
            controllers = (root / "cgroup.controllers").read_text().split()
            (group / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in controllers))
        files.append(group / SYSTEM / "cgroup.procs")
    return files


def processes(name: str) -> list[int]:
    """Ids of all processes in a top-level group and below, without duplicates."""
    pids: set[int] = set()
    for root in hierarchies():
        pids.update(_below(root / name))
    return sorted(pids)


def container_processes(name: str, container_id: str) -> list[int]:
    """Ids of a container's processes on node `name`; empty when it does not run."""
    for root in hierarchies():
        for directory, children, _ in os.walk(root / name):
            if container_id in children:
                return sorted(_below(Path(directory) / container_id))
    return []


def freeze(name: str) -> None:
    """Stops every process of a node at once, such that none can notice; see `thaw`."""
    _set_frozen(name, True)


def thaw(name: str) -> None:
    """Lets the processes of a frozen node go on."""
    _set_frozen(name, False)


def kill_all(prefix: str) -> None:
    """Kills every process in the top-level groups with names that begin with `prefix`."""

    def none_left() -> bool:
        pids = set()
        for name in _names(prefix):
            thaw(name)
            pids.update(processes(name))
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not pids

    wait_until(none_left, f"no process is left in cgroups {prefix}*")


def remove(prefix: str) -> None:
    """Removes the (empty) top-level groups with names that begin with `prefix`."""

    def gone() -> bool:
        for root in hierarchies():
            for group in root.glob(f"{prefix}*"):
                for directory, _, _ in os.walk(group, topdown=False):
                    _try_rmdir(directory)
        return not _names(prefix)

    wait_until(gone, f"cgroups {prefix}* are removed")


def _try_rmdir(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:  # a process that was just killed is still leaving it
        return


def _names(prefix: str) -> set[str]:
    return {path.name for root in hierarchies() for path in root.glob(f"{prefix}*")}


def _below(group: Path) -> Iterator[int]:
    for directory, _, _ in os.walk(group):
        try:
            yield from map(int, (Path(directory) / "cgroup.procs").read_text().split())
        except OSError:  # the group was removed meanwhile
            continue


def _inherit_cpuset(path: Path) -> None:
    """A version 1 cpuset is born empty and takes no process until it is filled."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = path / name
        if file.exists() and not file.read_text().strip():
            file.write_text((path.parent / name).read_text())


def _set_frozen(name: str, frozen: bool) -> None:
    version_1 = MOUNT / "freezer" / name / "freezer.state"
    version_2 = MOUNT / name / "cgroup.freeze"
    if version_1.exists():
        wanted = "FROZEN" if frozen else "THAWED"

        def reached() -> bool:
            version_1.write_text(wanted)
            return version_1.read_text().strip() == wanted

        wait_until(reached, f"{name} is {wanted}", interval=0.05)
    elif version_2.exists():
        version_2.write_text(f"{frozen:d}")
        events = MOUNT / name / "cgroup.events"
        wait_until(
            lambda: f"frozen {frozen:d}" in events.read_text(),
            f"{name} is frozen: {frozen}", interval=0.05,
        )  # fmt: skip

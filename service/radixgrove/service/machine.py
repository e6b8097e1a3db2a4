"""What the machine, or the container, lets this process have. No torch: `doctor` asks too.

A container's limits are those of its control group and of every group above it that can be seen.
Where the container has no cgroup namespace of its own, the path in `/proc/self/cgroup` begins above
what is mounted, and a mount's root says where (proc(5), cgroups(7)).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class _Mount:
    """A hierarchy of control groups: version 2's, or one of version 1 with its controllers."""

    root: PurePosixPath  # which group of the host is mounted
    point: Path
    controllers: frozenset[str]  # empty for version 2


def memory_limit(proc: Path = _PROC) -> int:
    """Bytes this process may use: the machine's memory, or its control groups' limit if less."""
    limit = psutil.virtual_memory().total
    for group in _groups("memory", proc):
        for name in ("memory.max", "memory.limit_in_bytes"):
            value = _numbers(group / name)
            if value:
                limit = min(limit, value[0])
    return limit


def free_memory() -> int:
    """Bytes that this process may use beyond what it does."""
    unused = memory_limit() - psutil.Process().memory_info().rss
    return max(0, min(unused, psutil.virtual_memory().available))


def cores(proc: Path = _PROC) -> int:
    """Cores that this process can keep busy: those it may run on, or its quota of time if less.

    A quota is rounded down: with a thread more, all of them would stand still for the rest of each
    period.
    """
    count = float(len(os.sched_getaffinity(0)))
    for group in _groups("cpu", proc):
        both = _numbers(group / "cpu.max")  # quota and period in microseconds
        if not both:
            both = [
                *_numbers(group / "cpu.cfs_quota_us"),
                *_numbers(group / "cpu.cfs_period_us"),
            ]
        if len(both) == 2 and min(both) > 0:
            count = min(count, both[0] / both[1])
    return max(1, int(count))


def _numbers(path: Path) -> list[int]:
    """The whole numbers in a file; none where it is absent or says `max`."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def _groups(controller: str, proc: Path) -> Iterator[Path]:
    """Folders of this process's group and of those above it, of version 1 and of version 2."""
    own = _own_groups(proc)
    for mount in _mounts(proc):
        key = controller if controller in mount.controllers else ""
        if (mount.controllers and not key) or key not in own:
            continue
        path = own[key]
        below = path.relative_to(mount.root) if path.is_relative_to(mount.root) else ""
        folder = mount.point / below
        while folder != mount.point:
            yield folder
            folder = folder.parent
        yield mount.point


def _own_groups(proc: Path) -> dict[str, PurePosixPath]:
    """This process's group by controller; by "" the one of version 2."""
    found: dict[str, PurePosixPath] = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        # A path that leaves the namespace (`/..`) says nothing about what is mounted here.
        group = PurePosixPath("/" if ".." in path else path)
        found |= dict.fromkeys(controllers.split(","), group)
    return found


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in _lines(proc / "mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind not in ("cgroup", "cgroup2"):
            continue
        root, point = before.split(" ")[3:5]
        controllers = frozenset(options.split(",")) if kind == "cgroup" else frozenset()
        yield _Mount(PurePosixPath(root), Path(point), controllers)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

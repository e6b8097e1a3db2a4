"""What a cluster has left behind on this machine."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.harness import cgroups, state
from tests.cluster.harness.processes import marked


def remains(name: str) -> list[str]:
    """Everything on this machine that belongs to the cluster `name`."""
    links = (f"link {path.name}" for path in Path("/sys/class/net").iterdir())
    groups = (f"cgroup {g}" for root in cgroups.hierarchies() for g in root.iterdir())
    names = (f"state {found}" for found in state.names())
    disks = (f"disk {name} on {disk}" for disk in state.loop_devices(state.state_root() / name))
    found = [
        what for what in (*links, *groups, *names, *disks) if re.search(rf"[ /]{name}( |-|$)", what)
    ]
    return found + [f"process {pid}" for pid in _processes(name)]


def _processes(name: str) -> Iterator[int]:
    """Processes that carry the cluster's mark or run in the group of one of its nodes.

    A zombie has no program left, and only waits for whatever adopted it.
    """
    yield from marked(state.state_root() / name)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                program = os.readlink(entry / "exe")
                if program and f"/{name}-node-" in (entry / "cgroup").read_text():
                    yield int(entry.name)

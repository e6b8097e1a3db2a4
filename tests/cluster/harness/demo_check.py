"""Whether this machine can run the demonstration: `python3 -m tests.cluster.harness.demo_check`.

Looked at before anything is downloaded or built, so by the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.harness import build, prepare

_GIB = 1 << 30
# Two workers, each with 3 GiB and 1 GiB of /dev/shm that it may use.
_MEMORY = 8 * _GIB
# What each part takes on disk once it is there, rounded up from `du` of a machine that has it all.
_ENVIRONMENT = 6 * _GIB  # .venv
_PROGRAMS = 7 * _GIB  # with Go's own caches of sources and of what it has compiled
_IMAGES = 4 * _GIB
_MODEL = 1 * _GIB


def problems(checkout: Path) -> Iterator[str]:
    """What is missing, with numbers, and what would mend it."""
    if sys.platform != "linux":
        yield f"a cluster needs Linux, and this is {sys.platform}: use a virtual machine"
        return
    if os.geteuid() != 0:
        yield (
            "a cluster with nodes needs root, for network namespaces, mounts and cgroups: "
            "sudo make demo-cluster"
        )
    packages = prepare.missing_packages()
    if packages and shutil.which("apt-get") is None:
        yield f"these programs are missing, and there is no apt-get: {' '.join(packages)}"
    free = _available_memory()
    if free < _MEMORY:
        yield (
            f"{free / _GIB:.1f} GiB of memory are available, and {_MEMORY / _GIB:.0f} GiB are "
            "needed: end other programs, or take a larger machine"
        )
    yield from _full_disks(checkout)


def _full_disks(checkout: Path) -> Iterator[str]:
    cache = build.cache_directory()
    wanted = [
        (checkout, 0 if (checkout / ".venv").exists() else _ENVIRONMENT),
        (cache, _PROGRAMS if build.missing(build.DEMONSTRATION) else 0),
        (cache, 0 if (cache / "images").exists() else _IMAGES),
        (cache, 0 if (cache.parent / "models").exists() else _MODEL),
    ]
    needed: dict[int, int] = {}
    places: dict[int, Path] = {}
    for path, size in wanted:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        device = there.stat().st_dev
        needed[device] = needed.get(device, 0) + size
        places[device] = there
    for device, size in needed.items():
        free = shutil.disk_usage(places[device]).free
        if free < size:
            yield (
                f"{free / _GIB:.1f} GiB are free at {places[device]}, and {size / _GIB:.0f} GiB "
                "are to come: free some, or set XDG_CACHE_HOME to another disk"
            )


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0


def main() -> int:
    found = list(problems(Path(__file__).resolve().parents[3]))
    for problem in found:
        print(f"demo: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

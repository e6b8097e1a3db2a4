"""What the machine, or the container, lets this process have. No torch: `doctor` asks too."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_limit() -> int:
    """Bytes this process may use: the machine's memory, or its control group's limit if less."""
    limit = psutil.virtual_memory().total
    for path in _CGROUP_LIMITS:
        try:
            limit = min(limit, int(path.read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return limit

"""What of the host's memory a host tier may take. No torch: `doctor` asks too."""

from __future__ import annotations

from radixgrove.service.machine import free_memory

GIB = 1 << 30
# Of the memory that is free: the process itself grows yet.
_SHARE = 0.95


def describe_room() -> str:
    """How much a host tier may take now, for messages."""
    free = free_memory()
    return f"{free * _SHARE / GIB:.2f} GiB ({_SHARE:.0%} of what is free)"


def shortage(needed: int) -> str:
    """Why a host tier of so many bytes cannot be had here; "": it can."""
    free = free_memory()
    if needed <= free * _SHARE:
        return ""
    return (
        f"needs {needed / GIB:.2f} GiB of host memory, but {free / GIB:.2f} GiB are free, of "
        f"which a host tier may take {_SHARE:.0%}; lower host_cache_gib"
    )

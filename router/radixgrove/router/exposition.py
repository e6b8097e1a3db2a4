"""Metrics of all router processes that share a port, as Prometheus text."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead


def metrics_text() -> bytes:
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is None:
        return generate_latest(REGISTRY)
    _forget_dead(Path(directory))
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


def _forget_dead(directory: Path) -> None:
    """Gauges of processes that ended: what they counted is over."""
    pids = {int(file.stem.rpartition("_")[2]) for file in directory.glob("gauge_live*.db")}
    for pid in pids:
        if not Path("/proc", str(pid)).exists():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                mark_process_dead(pid, str(directory))  # type: ignore[no-untyped-call]

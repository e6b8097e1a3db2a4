"""prometheus_client's files: what is written to them has its room on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_COUNTS = """
import json, resource, sys
from radixgrove.service.metric_files import reserve_room
reserve_room()
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

counter = Counter("c", "text", ["label"])
Gauge("g", "text", multiprocess_mode="livesum").set(1)
Histogram("h", "text").observe(1)

def bound_files(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def count():
    for number in range(3000):  # of some 70 bytes each
        counter.labels(str(number)).inc()

def written():
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    values = [registry.get_sample_value("c_total", {"label": str(n)}) for n in (0, 2999)]
    return values + [registry.get_sample_value("g")]
"""


def _run(program: str, directory: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", _COUNTS + program],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(directory)},
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout)


def test_files_have_no_holes_which_a_full_disk_could_not_fill(tmp_path: Path) -> None:
    assert _run("count(); print(json.dumps(written()))", tmp_path) == [1.0, 1.0, 1.0]
    sizes = {file.name: file.stat() for file in tmp_path.glob("*.db")}
    assert len(sizes) == 3
    for name, found in sizes.items():
        assert found.st_blocks * 512 >= found.st_size > 0, name


def test_new_values_wait_for_room_and_the_others_count_on(tmp_path: Path) -> None:
    program = """
bound_files(1 << 16)  # as a disk that has no more
count()
count()
full = written()
bound_files(resource.RLIM_INFINITY)
count()
print(json.dumps([full, written()]))
"""
    full, later = _run(program, tmp_path)
    assert full == [2.0, None, 1.0]
    assert later == [3.0, 3.0, 1.0]

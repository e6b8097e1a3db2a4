"""What a container may use is the least that its control group and those above it allow."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from radixgrove.service import machine
from radixgrove.service.machine import cores, free_memory, memory_limit

MACHINE = psutil.virtual_memory().total
GIB = 1 << 30
MANY = 64  # cores of the machine


class Host:
    """A `/proc/self` and the hierarchies it speaks of, in a folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.proc.mkdir()
        self.folder = folder
        self.mounts: list[str] = []

    def mount(self, name: str, root: str, kind: str, options: str = "rw") -> Path:
        point = self.folder / name
        point.mkdir()
        self.mounts.append(f"31 23 0:28 {root} {point} rw,relatime - {kind} {kind} {options}")
        (self.proc / "mountinfo").write_text("\n".join(self.mounts) + "\n")
        return point

    def is_in(self, *lines: str) -> None:
        (self.proc / "cgroup").write_text("\n".join(lines) + "\n")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MANY)))
    return Host(tmp_path)


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_without_control_groups_it_is_the_machine(host: Host) -> None:
    assert (memory_limit(host.proc), cores(host.proc)) == (MACHINE, MANY)


def test_a_container_of_version_2_sees_its_limits_at_the_root(host: Host) -> None:
    put(host.mount("v2", "/", "cgroup2"), memory__max=str(GIB), cpu__max="250000 100000")
    host.is_in("0::/")
    assert (memory_limit(host.proc), cores(host.proc)) == (GIB, 2)


def test_the_tightest_group_on_the_way_up_counts(host: Host) -> None:
    point = host.mount("v2", "/", "cgroup2")
    put(point / "pod", memory__max=str(2 * GIB), cpu__max="300000 100000")
    put(point / "pod/container", memory__max="max", cpu__max="400000 100000")
    put(point / "pod/other", memory__max="1", cpu__max="1000 100000")
    host.is_in("0::/pod/container")
    assert (memory_limit(host.proc), cores(host.proc)) == (2 * GIB, 3)


def test_version_1_has_a_hierarchy_for_each_controller(host: Host) -> None:
    memory = host.mount("memory", "/", "cgroup", "rw,memory")
    cpu = host.mount("cpu,cpuacct", "/", "cgroup", "rw,cpu,cpuacct")
    put(memory / "pod", memory__limit_in_bytes=str(GIB))
    put(cpu / "pod", cpu__cfs_quota_us="400000", cpu__cfs_period_us="100000")
    put(cpu / "pod/container", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    host.is_in("4:memory:/pod", "2:cpu,cpuacct:/pod/container", "0::/")
    assert (memory_limit(host.proc), cores(host.proc)) == (GIB, 4)


def test_a_container_without_a_namespace_of_its_own_is_found_below_the_mounts_root(
    host: Host,
) -> None:
    point = host.mount("v2", "/kubepods/pod7/c1", "cgroup2")
    put(point, memory__max=str(GIB))
    put(point / "inner", cpu__max="100000 100000")
    host.is_in("0::/kubepods/pod7/c1/inner")
    assert (memory_limit(host.proc), cores(host.proc)) == (GIB, 1)


def test_a_group_outside_of_what_is_mounted_is_read_at_the_mount(host: Host) -> None:
    put(host.mount("v2", "/", "cgroup2"), memory__max=str(GIB), cpu__max="50000 100000")
    host.is_in("0::/../other")
    assert (memory_limit(host.proc), cores(host.proc)) == (GIB, 1)


def test_a_limit_above_the_machines_memory_is_no_limit(host: Host) -> None:
    put(host.mount("v2", "/", "cgroup2"), memory__max=str(MACHINE * 2), cpu__max="max 100000")
    host.is_in("0::/")
    assert (memory_limit(host.proc), cores(host.proc)) == (MACHINE, MANY)


def test_affinity_counts_where_it_is_less_than_the_quota(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    put(host.mount("v2", "/", "cgroup2"), cpu__max="800000 100000")
    host.is_in("0::/")
    assert cores(host.proc) == 1


def test_what_is_free_is_of_the_limit_and_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_memory() < MACHINE
    monkeypatch.setattr(machine, "memory_limit", lambda: psutil.Process().memory_info().rss + GIB)
    assert free_memory() <= GIB + (GIB >> 4)
    monkeypatch.setattr(machine, "memory_limit", lambda: 1)
    assert free_memory() == 0

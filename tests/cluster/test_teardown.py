"""A cluster leaves nothing behind, however its owner ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.harness import state
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.remains import remains
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

_SHARED_PATHS = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/run/containerd", "/etc/cni")

_OWNER = """
import sys, time
from tests.cluster.harness.{module} import {kind}
with {kind}({arguments}) as running:
    print("running", flush=True)
    time.sleep(600)
"""


@dataclass(frozen=True)
class Machine:
    """What all clusters share, and none may change; without what is another cluster's own."""

    mounts: frozenset[str]
    paths: frozenset[str]

    @classmethod
    def look(cls) -> Machine:
        mountinfo = Path("/proc/self/mountinfo").read_text().splitlines()
        mounts = {line.split()[4] for line in mountinfo}
        own = tuple(f"{state.state_root() / name}/" for name in state.names())
        return cls(
            mounts=frozenset(mount for mount in mounts if not f"{mount}/".startswith(own)),
            paths=frozenset(path for path in _SHARED_PATHS if Path(path).exists()),
        )


@pytest.fixture
def machine() -> Machine:
    """The machine as it was before the test."""
    state.sweep()
    return Machine.look()


class Owner:
    """Another process that owns a cluster or a control plane; a context manager."""

    def __init__(self, directory: Path, module: str, kind: str, arguments: str = "") -> None:
        self._before = set(state.names())
        script = directory / "owner.py"
        script.write_text(_OWNER.format(module=module, kind=kind, arguments=arguments))
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )

    def __enter__(self) -> Owner:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait_until_running(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "running\n"

    def wait_for_name(self, prefix: str) -> str:
        """The name that its cluster has claimed."""

        def name() -> str:
            for found in sorted(set(state.names()) - self._before):
                if found.startswith(prefix) and self._process.pid in _lock_holders(found):
                    return found
            return ""

        return wait_until(name, "a name is claimed")

    def kill(self) -> None:
        with self._process:
            self._process.kill()


def _lock_holders(name: str) -> set[int]:
    """Processes that hold the lock of a state directory (proc(5), /proc/locks)."""
    try:
        inode = (state.state_root() / f"{name}.lock").stat().st_ino
    except FileNotFoundError:  # of a cluster that has just ended
        return set()
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return {int(line[4]) for line in lines if line[5].endswith(f":{inode}")}


def _node_exists(name: str) -> object:
    return list(Path("/sys/fs/cgroup/pids").glob(f"{name}-node-1/system"))


def _pods_run(name: str) -> object:
    return list(Path("/sys/fs/cgroup/pids").glob(f"{name}-node-1/kubepods/*/pod*/*"))


def test_a_cluster_ends_without_a_trace(machine: Machine) -> None:
    with Cluster(nodes=1) as cluster:
        name = cluster.name
        found = {what.split()[0] for what in remains(name)}
        assert found == {"link", "cgroup", "state", "disk", "process"}
    assert remains(name) == []
    assert Machine.look() == machine


@pytest.mark.parametrize("moment", [_node_exists, _pods_run], ids=["starting", "running"])
def test_a_killed_owner_leaves_nothing_after_the_next_start(
    tmp_path: Path, machine: Machine, moment: Callable[[str], object]
) -> None:
    with Owner(tmp_path, "cluster", "Cluster", "nodes=1") as owner:
        name = owner.wait_for_name("rg")
        wait_until(lambda: moment(name), moment.__name__, interval=0.01)
        with state.sweeping():  # no other sweep meanwhile
            owner.kill()
            assert any("process" in what for what in remains(name)), "it outlives its owner"
    state.sweep()
    assert remains(name) == []
    assert Machine.look() == machine


def test_a_killed_owner_of_a_control_plane_leaves_nothing(tmp_path: Path) -> None:
    with Owner(tmp_path, "control_plane", "ControlPlane") as owner:
        owner.wait_until_running()
        name = owner.wait_for_name("control-plane")
        with state.sweeping():  # no other sweep meanwhile
            owner.kill()
            assert any("process" in what for what in remains(name))
    state.sweep()
    assert remains(name) == []


def test_a_sweep_spares_what_living_owners_hold() -> None:
    with ControlPlane() as control_plane:
        state.sweep()
        assert control_plane.kubectl.items("namespaces")


def test_a_detached_cluster_outlives_its_owner_until_it_is_taken_down(machine: Machine) -> None:
    command = [sys.executable, "-m", "tests.cluster.harness"]
    up = subprocess.run([*command, "up", "--nodes=1"], capture_output=True, text=True, check=True)
    kubeconfig = up.stdout.strip().removeprefix("export KUBECONFIG=")
    name = Path(kubeconfig).parent.parent.name
    state.sweep()
    assert Path(kubeconfig).exists()
    assert any("process" in what for what in remains(name))
    subprocess.run([*command, "down"], check=True)
    assert remains(name) == []
    assert Machine.look() == machine


def test_settings_of_the_host_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    setting = Path("/proc/sys/kernel/printk_ratelimit_burst")  # which no kubelet changes
    found = setting.read_text()
    first, second = (state.StateDirectory.claim(name) for name in ("first", "second"))
    assert first is not None
    assert second is not None
    state.set_sysctl("kernel/printk_ratelimit_burst", "17")
    state.set_sysctl("kernel/printk_ratelimit_burst", "18")
    first.remove()
    assert setting.read_text() == "18\n", "another cluster still needs it"
    second.remove()
    assert setting.read_text() == found

"""The control plane alone: enough for everything that needs no pods."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.harness.build import KUBERNETES_VERSION
from tests.cluster.harness.control_plane import ADMIN, ControlPlane
from tests.cluster.harness.kubectl import Kubectl, KubectlError
from tests.cluster.harness.processes import marked
from tests.cluster.harness.state import names, state_root, sweep

pytestmark = pytest.mark.cluster


def test_the_server_knows_its_version(control_plane: ControlPlane) -> None:
    # A chart's `kubeVersion` is compared with this.
    assert control_plane.kubectl.json("version")["serverVersion"]["gitVersion"] == (
        KUBERNETES_VERSION
    )


def test_controllers_run(control_plane: ControlPlane) -> None:
    kubectl = control_plane.kubectl
    kubectl.run("create", "deployment", "web", "--image=none")
    kubectl.wait_for(
        "deployment", "web", that=lambda d: d["status"].get("replicas") == 1, what="has a pod"
    )
    kubectl.delete("deployment", "web")


def test_a_service_account_may_do_only_what_its_role_says(control_plane: ControlPlane) -> None:
    kubectl = control_plane.kubectl
    kubectl.run("create", "serviceaccount", "reader")
    kubectl.run("create", "role", "read", "--verb=get,list", "--resource=configmaps")
    kubectl.run("create", "rolebinding", "read", "--role=read", "--serviceaccount=default:reader")
    reader = Kubectl(kubectl.program, control_plane.service_account_kubeconfig("default", "reader"))
    assert reader.items("configmaps")
    with pytest.raises(KubectlError, match="forbidden"):
        reader.run("create", "configmap", "refused")


def test_the_audit_log_counts_requests(control_plane: ControlPlane) -> None:
    control_plane.audit.read()
    control_plane.kubectl.run("create", "configmap", "counted")
    control_plane.kubectl.delete("configmap", "counted")
    writes = [request for request in control_plane.audit.read(ADMIN) if request.writes]
    assert [(w.verb, w.resource, w.name) for w in writes] == [
        ("create", "configmaps", "counted"),
        ("delete", "configmaps", "counted"),
    ]


def test_a_paused_server_goes_on(control_plane: ControlPlane) -> None:
    control_plane.api_server.send(signal.SIGSTOP)
    with pytest.raises(KubectlError):
        control_plane.kubectl.run("get", "nodes", "--request-timeout=1s")
    control_plane.api_server.send(signal.SIGCONT)
    control_plane.wait_until_serving()
    assert control_plane.kubectl.items("nodes") == []


def test_a_killed_owner_leaves_nothing_after_the_next_start(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(
        "import time\n"
        "from tests.cluster.harness.control_plane import ControlPlane\n"
        "with ControlPlane() as running:\n"
        "    print(running.path, flush=True)\n"
        "    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    owner = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        path = Path(owner.stdout.readline().strip())
        owner.kill()
    assert list(marked(path)), "etcd and the servers outlive their owner"
    sweep()
    assert list(marked(path)) == []
    assert path.parent == state_root()
    assert path.name not in names()
    assert not path.exists()

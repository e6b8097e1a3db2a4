"""The control plane alone: enough for everything that needs no pods."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.harness.build import KUBERNETES_VERSION
from tests.cluster.harness.control_plane import ADMIN, ControlPlane
from tests.cluster.harness.kubectl import Kubectl, KubectlError

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

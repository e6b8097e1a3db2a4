"""The control plane alone: enough for everything that needs no pods."""

from __future__ import annotations

import dataclasses
import signal

import pytest

from tests.cluster.harness.build import KUBERNETES_VERSION
from tests.cluster.harness.control_plane import ADMIN, ControlPlane
from tests.cluster.harness.kubectl import Kubectl, KubectlError
from tests.cluster.harness.waiting import wait_until

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
    wait_until(lambda: _lists(reader, "configmaps"), "the API server knows the role")
    with pytest.raises(KubectlError, match="forbidden"):
        reader.run("create", "configmap", "refused")


def test_the_audit_log_counts_requests(control_plane: ControlPlane) -> None:
    control_plane.audit.read()
    control_plane.kubectl.run("create", "configmap", "counted")
    control_plane.kubectl.delete("configmap", "counted")
    writes: list[tuple[str, str, str]] = []

    def two_are_logged() -> bool:
        """A request may be answered just before it is logged."""
        found = (request for request in control_plane.audit.read(ADMIN) if request.writes)
        writes.extend((request.verb, request.resource, request.name) for request in found)
        return len(writes) >= 2

    wait_until(two_are_logged, "two writes are logged")
    assert writes == [("create", "configmaps", "counted"), ("delete", "configmaps", "counted")]


@pytest.mark.parametrize(
    "arguments",
    [
        ("namespace", "kube-system"),
        ("svc", "kubernetes"),
        ("clusterroles.rbac.authorization.k8s.io",),
        ("roles,cm", "-n", "kube-system"),
        ("roles", "--all-namespaces"),
        ("clusterroles", "--selector=rbac.authorization.k8s.io/aggregate-to-view=true"),
        ("namespace/kube-system",),
    ],
    ids=" ".join,
)
def test_what_is_read_without_kubectl_is_what_kubectl_says(
    control_plane: ControlPlane, arguments: tuple[str, ...]
) -> None:
    program = dataclasses.replace(control_plane.kubectl, api=None)
    read, said = (kubectl.json("get", *arguments) for kubectl in (control_plane.kubectl, program))
    assert read.get("items") == said.get("items") != []
    assert read["metadata"] == said["metadata"] if "items" not in said else read["kind"] == "List"


def test_what_is_missing_is_missing_without_kubectl_too(control_plane: ControlPlane) -> None:
    kubectl = control_plane.kubectl
    assert kubectl.get("configmap", "missing") is None
    assert kubectl.items("configmaps", "--selector=none=has") == []
    with pytest.raises(KubectlError, match='configmaps "missing" not found'):
        kubectl.json("get", "configmap", "missing")
    with pytest.raises(KubectlError, match='have a resource type "nothings"'):
        kubectl.get("nothings")


def test_a_paused_server_goes_on(control_plane: ControlPlane) -> None:
    control_plane.api_server.send(signal.SIGSTOP)
    with pytest.raises(KubectlError):
        control_plane.kubectl.run("get", "nodes", "--request-timeout=1s")
    control_plane.api_server.send(signal.SIGCONT)
    control_plane.wait_until_serving()
    assert control_plane.kubectl.items("nodes") == []


def _lists(kubectl: Kubectl, kind: str) -> bool:
    try:
        return bool(kubectl.items(kind))
    except KubectlError:
        return False

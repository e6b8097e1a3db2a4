"""Pretended nodes behave like nodes as far as the control plane can see."""

from __future__ import annotations

import pytest

from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kwok import LABEL, PretendedNodes

pytestmark = pytest.mark.cluster


def test_pods_with_gpus_become_ready_on_pretended_nodes_and_are_deleted(
    control_plane: ControlPlane,
) -> None:
    kubectl = control_plane.kubectl
    with PretendedNodes(control_plane, 20, gpus=8):
        kubectl.run("create", "deployment", "many", "--image=none", "--replicas=21")
        kubectl.run("set", "resources", "deployment", "many", "--limits=nvidia.com/gpu=8")
        kubectl.wait_for(
            "deployment", "many",
            that=lambda d: d["status"].get("readyReplicas") == 20, what="fills every node",
            timeout=60,
        )  # fmt: skip
        pods = kubectl.items("pods", "--selector=app=many")
        placed = {pod["spec"]["nodeName"] for pod in pods if "nodeName" in pod["spec"]}
        assert len(placed) == 20, "one pod takes all GPUs of its node"
        kubectl.delete("deployment", "many")
        kubectl.run("wait", "--for=delete", "pods", "--selector=app=many", "--timeout=60s")
    kubectl.run("wait", "--for=delete", "nodes", f"--selector={LABEL}", "--timeout=60s")
    assert kubectl.items("nodes") == []

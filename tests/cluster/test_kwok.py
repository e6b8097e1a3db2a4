"""Pretended nodes behave like nodes as far as the control plane can see."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kwok import PretendedNodes
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster


def test_pods_with_gpus_become_ready_on_pretended_nodes_and_are_deleted(
    control_plane: ControlPlane,
) -> None:
    kubectl = control_plane.kubectl
    with PretendedNodes(control_plane, 20, gpus=8):
        kubectl.apply(_deployment("many", replicas=21, gpus=8), namespace="default")
        kubectl.wait_for(
            "deployment", "many",
            that=lambda d: d["status"].get("readyReplicas") == 20, what="fills every node",
        )  # fmt: skip
        pods = kubectl.items("pods", "--selector=app=many")
        placed = {pod["spec"]["nodeName"] for pod in pods if "nodeName" in pod["spec"]}
        assert len(placed) == 20, "one pod takes all GPUs of its node"
        kubectl.delete("deployment", "many")
        wait_until(lambda: not kubectl.items("pods", "--selector=app=many"), "its pods are gone")
    wait_until(lambda: not kubectl.items("nodes"), "no node is left")


def _deployment(name: str, *, replicas: int, gpus: int) -> dict[str, Any]:
    container = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": gpus}}}
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }

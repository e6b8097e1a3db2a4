"""What a drain of nodes may take: pods without requests are never in its way."""

from __future__ import annotations

import json

import pytest

from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kubectl import KubectlError
from tests.cluster.harness.kwok import LATE
from tests.cluster.harness.waiting import wait_until
from tests.operator.operator_process import OperatorProcess
from tests.operator.resources import RGSVC, ready, service, wait_ready

pytestmark = pytest.mark.cluster


def test_pods_that_are_not_ready_may_be_evicted_although_too_few_are(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    late = {"metadata": {"annotations": {LATE: "true"}}}
    plane.kubectl.apply(service("llama", namespace, replicas=2, podOverrides=late))
    wait_ready(plane, "llama", namespace)
    first, second = "llama-0-a1-0", "llama-1-a2-0"
    uid = plane.kubectl.json("get", "pod", first, "-n", namespace)["metadata"]["uid"]

    def fall_ill(pod: str) -> None:
        condition = {"type": "Ready", "status": "False"}
        plane.kubectl.patch(
            "pod", pod, "-n", namespace, "--subresource=status",
            body={"status": {"conditions": [condition]}}, kind="strategic",
        )  # fmt: skip

    def evicted() -> bool:
        """They recover some seconds later: the budget must have noticed before."""
        fall_ill(first)
        fall_ill(second)
        budget = plane.kubectl.json("get", "pdb", "llama", "-n", namespace)["status"]
        if (budget["currentHealthy"], budget["desiredHealthy"]) != (0, 1):
            return False
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": first, "namespace": namespace},
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{first}/eviction"
        try:
            plane.kubectl.run("create", "--raw", path, "--filename=-", text=json.dumps(body))
        except KubectlError:  # it has recovered, unlike the budget
            return False
        return True

    wait_until(evicted, "no pod is healthy, and one goes")

    def is_another() -> bool:
        found = plane.kubectl.get("pod", first, "-n", namespace)
        return found is not None and found["metadata"]["uid"] != uid

    wait_until(is_another, "it is replaced")
    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready again")

"""Services of groups that span several pods: specs of the group probe, and their pods by node."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.checkout import ROOT
from tests.cluster.harness import demo
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.node import Node
from tests.cluster.harness.served import Served
from tests.cluster.harness.volumes import Mounts

# Short, so that a test sees in seconds what takes minutes with the defaults.
RECOVERY = {"backoff": "2s", "stableAfter": "5s", "nodeGrace": "3s"}


@dataclass(frozen=True)
class Member:
    """One pod of a group."""

    name: str
    uid: str
    rank: int
    node: str


def spec(mounts: Mounts, *, nodes: int = 2, gpus_per_node: int = 0, **more: Any) -> dict[str, Any]:
    """An InferenceService of one group of the group probe; `more` are further fields of its spec.

    Without GPUs it is of `device: cpu`; with them it asks for them, and uses none.
    """
    wanted: dict[str, Any] = demo.spec(mounts, 1)
    (container,) = wanted["podOverrides"]["spec"]["containers"]
    container["command"] = [f"{sys.prefix}/bin/python", "-m", "tests.cluster.images.group_probe"]
    container["args"] = ["--config", "/etc/radixgrove/worker.yaml"]
    container["env"] = [
        {"name": "PYTHONPATH", "value": str(ROOT)},
        {"name": "OMP_NUM_THREADS", "value": "1"},
    ]
    # A probe holds a model's tokenizer, not its weights; it ends as soon as all is answered.
    wanted["podOverrides"]["spec"]["terminationGracePeriodSeconds"] = 15
    wanted["hardware"] = {"device": "cpu", "cpu": "50m", "nodes": nodes}
    if gpus_per_node:
        wanted["hardware"] |= {"device": "cuda", "gpusPerNode": gpus_per_node}
    wanted["engine"] = {"settings": {"drain_timeout": 10}}
    return {**wanted, "recovery": RECOVERY, **more}


def members(served: Served) -> list[Member]:
    """The service's worker pods that are not leaving, by name."""
    pods = [
        Member(
            name=pod["metadata"]["name"],
            uid=pod["metadata"]["uid"],
            rank=int(pod["metadata"]["labels"]["apps.kubernetes.io/pod-index"]),
            node=pod["spec"].get("nodeName", ""),
        )
        for pod in served.staying_pods()
    ]
    return sorted(pods, key=lambda pod: pod.name)


def server(text: str) -> str:
    """The pod that gave a probe's answer."""
    return text.partition(":")[0]


def lets_one_pod_go(budget: dict[str, Any]) -> bool:
    """Whether a PodDisruptionBudget allows one eviction, as it is and not as it was."""
    status = budget.get("status", {})
    if status.get("observedGeneration") != budget["metadata"]["generation"]:
        return False
    return bool(status["disruptionsAllowed"] == 1)


def wait_until_recreated(
    served: Served, old: Sequence[Member], *, timeout: float = 300
) -> dict[str, Any]:
    """Waits until the one group is ready and every pod in `old` gone or leaving; the status.

    Pods of a lost node go on leaving until it is back.
    """
    uids = {member.uid for member in old}

    def ready(status: dict[str, Any]) -> bool:
        if status.get("readyReplicas") != 1 or len(status.get("groups", [])) != 1:
            return False
        present = {member.uid for member in members(served)}
        return uids.isdisjoint(present) and served.is_present(status)

    return served.wait(ready, "the group is ready with new pods only", timeout=timeout)


@contextmanager
def cordoned(cluster: Cluster, *nodes: Node) -> Iterator[None]:
    """Nothing is scheduled on these nodes meanwhile."""
    for node in nodes:
        cluster.kubectl.run("cordon", node.name)
    try:
        yield
    finally:
        for node in nodes:
            cluster.kubectl.run("uncordon", node.name)

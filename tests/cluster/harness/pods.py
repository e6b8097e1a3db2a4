"""Pods and namespaces as tests need them; every pod passes the `restricted` standard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.cluster.harness.kubectl import Kubectl, condition
from tests.cluster.harness.waiting import PATIENCE


def namespace(name: str, *, pod_security: str = "restricted") -> dict[str, Any]:
    """A namespace in which the API server itself enforces a pod security standard."""
    labels = {"pod-security.kubernetes.io/enforce": pod_security}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def make_namespace(kubectl: Kubectl, name: str) -> None:
    """A `restricted` namespace, unless it is there, in which pods can be made.

    Before the controllers have made its service account, the API server refuses every pod.
    """
    kubectl.apply(namespace(name))
    kubectl.wait_for("serviceaccount", "default", "-n", name, that=bool, what="exists")


def pod(
    name: str,
    image: str,
    command: Sequence[str],
    *,
    node: str | None = None,
    labels: Mapping[str, str] | None = None,
    gpus: int = 0,
    volumes: Sequence[Mapping[str, Any]] = (),
    volume_mounts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """A pod of one container; `node` pins it by the scheduler, not around it."""
    container: dict[str, Any] = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "command": list(command),
        "volumeMounts": list(volume_mounts),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    spec: dict[str, Any] = {
        "containers": [container],
        "volumes": list(volumes),
        "terminationGracePeriodSeconds": 0,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    metadata = {"name": name, "labels": dict(labels or {"app": name})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def wait_until_ready(
    kubectl: Kubectl, namespace: str, *names: str, timeout: float = PATIENCE
) -> None:
    """Waits until pods are Ready."""
    for name in names:
        kubectl.wait_for(
            "pod", name, "-n", namespace,
            that=lambda found: condition(found, "Ready") == "True", what="is Ready",
            timeout=timeout,
        )  # fmt: skip

"""What people get wrong first, and the conditions that say so on a real cluster: what is wrong, and
which field or value would mend it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.harness import demo, pods, release
from tests.cluster.harness.cluster import GPUS, Cluster
from tests.cluster.harness.kubectl import Kubectl, KubectlError
from tests.cluster.harness.served import KIND, Served, message, reason
from tests.cluster.harness.volumes import Mounts

pytestmark = pytest.mark.cluster

QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "small"},
    "spec": {"hard": {"pods": "0", "persistentvolumeclaims": "0"}},
}
PENDING = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "pending"},
    "spec": {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "no-such-class",
        "resources": {"requests": {"storage": "1Gi"}},
    },
}
COMMIT = "c" * 40
GPU = {"device": "cuda", "gpusPerNode": 1}
SCRATCH = {"name": "scratch", "persistentVolumeClaim": {"claimName": "scratch"}}
AS_ROOT = {"securityContext": {"runAsNonRoot": False, "runAsUser": 0}}

# By name of the service: what it changes of one that would run, the reason of Ready, and the words.
WRONG: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "wrong-path": (
        {"model": {"source": "pvc://models/typo"}},
        "ModelUnusable",
        ["'/model/typo' is not a directory", "model.source: pvc://models/typo"],
    ),
    "claim-absent": (
        {"model": {"source": "pvc://typo/x"}},
        "ClaimNotFound",
        ["the claim typo", "make it there, or name another one"],
    ),
    "claim-pending": (
        {"model": {"source": "pvc://pending/x"}},
        "ClaimPending",
        ["no volume yet", "the storage class no-such-class", "name a claim that has one"],
    ),
    "image": (
        {"image": "localhost/radixgrove/worker:typo"},
        "ImagePull",
        ['"localhost/radixgrove/worker:typo" is not present', "named by image"],
    ),
    "shape": (
        {
            "hardware": {**GPU, "nodes": 4},
            "parallelism": {"tp": 1, "pp": 2, "dp": 2},
            "podOverrides": {},
        },
        "UnsupportedShape",
        ["4 ranks on 4 nodes in dp 2 members", "a member beside others is on one machine"],
    ),
    "too-many-gpus": (
        {"hardware": {**GPU, "gpusPerNode": 2 * GPUS}, "podOverrides": {}},
        "InsufficientGPUs",
        [f"{2 * GPUS} nvidia.com/gpu (no node has more than {GPUS})", "change hardware"],
    ),
    "gpu-type": (
        {"hardware": {**GPU, "gpuType": "NVIDIA-B200"}, "podOverrides": {}},
        "Unschedulable",
        ["the label nvidia.com/gpu.product=NVIDIA-B200 (no node has it)"],
    ),
    "policy": (
        {"podOverrides": {"spec": AS_ROOT}},
        "PodRefused",
        ['violates PodSecurity "restricted', "podOverrides asks for it"],
    ),
    "priority": (
        {"pods": {"workers": {"priorityClassName": "typo"}}},
        "PodRefused",
        ["no PriorityClass with name typo", "named by pods.workers.priorityClassName"],
    ),
    "volume": (
        {"pods": {"workers": {"volumes": [SCRATCH]}}},
        "Unschedulable",
        ['persistentvolumeclaim "scratch" not found', "named by pods.workers.volumes[0].persist"],
    ),
    "template": (
        {"model": {"source": "pvc://models/x", "chatTemplate": {"configMap": "typo"}}},
        "VolumeNotMounted",
        ['configmap "typo" not found', "named by model.chatTemplate.configMap"],
    ),
    "override": (
        {"podOverrides": {"spec": {"containers": [{"name": "workers"}]}}},
        "RequestRefused",
        ["containers[1].image: Required value", "see podOverrides; the worker's container"],
    ),
    "no-program": (
        {"image": "localhost/radixgrove/redis:test"},
        "ContainerConfig",
        ["executable file not found", "the image is named by image"],
    ),
    "host-network": (
        {"podOverrides": {"spec": {"hostNetwork": True}}},
        "RequestRefused",
        ["share no namespace of their node", "leave hostNetwork, hostPID and hostIPC out"],
    ),
    "account": (
        {"pods": {"workers": {"serviceAccountName": "typo"}}},
        "RequestRefused",
        ["operator.serviceAccounts of the chart", "serviceAccountName"],
    ),
    "setting": (
        {"engine": {"settings": {"max_runing": 3}}},
        "InvalidEngine",
        ["max_runing: there is no such field; is max_running meant"],
    ),
    "length": (
        {"engine": {"contextLength": 1_000_000}},
        "EngineFailed",
        ["max_model_len 1000000 exceeds", "max_model_len is engine.contextLength of the service"],
    ),
    "memory": (
        {"hardware": {"device": "cpu", "cpu": "100m", "memory": "100Mi"}},
        "OutOfMemory",
        ["raise hardware.memory: 100Mi"],
    ),
    "router-keys": (
        {"router": {"dedicated": True, "auth": {"keysSecret": "typo"}}},
        "RouterNotReady",
        ['secret "typo" not found'],
    ),
    "secret": (
        {"model": {"source": "hf://org/model", "tokenSecret": "typo"}},
        "ContainerConfig",
        ['secret "typo" not found', "named by model.tokenSecret"],
    ),
}
IN_QUOTA: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "pods": (
        {"model": {"source": "file:///models/x"}, "podOverrides": {}},
        "QuotaBlocked",
        ["exceeded quota: small", "raise that ResourceQuota, or ask for less"],
    ),
    "lookup": (
        {"model": {"source": "hf://org/model"}, "podOverrides": {}},
        "QuotaBlocked",
        ["Error creating: pods", "exceeded quota: small", "raise that ResourceQuota"],
    ),
    "claims": (
        {"model": {"source": "hf://org/model", "revision": COMMIT}, "podOverrides": {}},
        "RequestRefused",
        ["exceeded quota: small, requested: persistentvolumeclaims=1", "raise that ResourceQuota"],
    ),
}


@pytest.fixture(scope="module")
def applied(
    cluster: Cluster, release_images: None, worker_mounts: Mounts
) -> Iterator[dict[str, Served]]:
    """All of them at once, since each waits for Kubernetes most of the time."""
    if not release.is_installed(cluster):
        release.install(cluster)
    kubectl = cluster.kubectl
    kubectl.apply(pods.namespace("quota", pod_security="privileged"))
    kubectl.apply(QUOTA, namespace="quota")
    kubectl.apply(PENDING, namespace=demo.NAMESPACE)
    served = {name: Served(kubectl, demo.NAMESPACE, name) for name in WRONG}
    served |= {name: Served(kubectl, "quota", name) for name in IN_QUOTA}
    good = demo.spec(worker_mounts, 1)
    good["hardware"]["memory"] = "2Gi"
    for name, (changes, _, _) in (WRONG | IN_QUOTA).items():
        overrides = changes.get("podOverrides", {})
        if overrides:
            overrides = {"spec": good["podOverrides"]["spec"] | overrides["spec"]}
            changes = changes | {"podOverrides": overrides}
        served[name].apply(good | changes)
    yield served
    for namespace in (demo.NAMESPACE, "quota"):
        kubectl.delete(KIND, "--all", "-n", namespace)
    kubectl.delete("pvc", "pending", "-n", demo.NAMESPACE)
    kubectl.delete("namespace", "quota", wait=False)


@pytest.mark.parametrize("name", WRONG | IN_QUOTA)
def test_it_is_said_what_is_wrong_and_what_would_mend_it(
    applied: dict[str, Served], name: str
) -> None:
    _, why, words = (WRONG | IN_QUOTA)[name]

    def told(status: dict[str, Any]) -> bool:
        return all(
            reason(status, kind) == f"{value}/{why}"
            and all(word in message(status, kind) for word in words)
            for kind, value in (("Ready", "False"), ("Degraded", "True"))
        )

    applied[name].wait(told, f"Ready and Degraded say {why}: {words}")


@pytest.mark.parametrize(
    ("name", "spec", "said"),
    [
        ("default", {}, "a service must not be called default"),
        ("Llama", {}, "lower-case letters, digits and dashes"),
        ("a" * 41, {}, "at most 40 characters"),
        ("value", {"replicas": -1}, "spec.replicas"),
        ("typo", {"engine": {"pagesize": 16}}, "pagesize"),
    ],
)
def test_what_can_be_refused_at_once_is(
    installed: Cluster, kubectl: Kubectl, name: str, spec: dict[str, Any], said: str
) -> None:
    manifest = {
        "apiVersion": "serving.radixgrove.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"source": "pvc://models/x"}, **spec},
    }
    with pytest.raises(KubectlError, match=said):
        kubectl.run("apply", "-n", demo.NAMESPACE, "-f", "-", text=json.dumps(manifest))

"""The cluster with nodes is a real one: scheduling, networking, policies, restarts, volumes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import pods
from tests.cluster.harness.cluster import GPUS, Cluster
from tests.cluster.harness.faults import Bystander, Faults
from tests.cluster.harness.kubectl import Kubectl, KubectlError
from tests.cluster.harness.volumes import claim_directory, claim_environment
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

PORT = 8080
SERVE = ["python3", "-m", "http.server", str(PORT), "--directory=/etc/ssl"]
SLEEP = ["sleep", "infinity"]
FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=2).status)"
DENY_ALL_BUT_FRIENDS = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "friends-only"},
    "spec": {
        "podSelector": {"matchLabels": {"app": "server"}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "friend"}}}]}],
    },
}

Reaches = Callable[[str], bool]


@pytest.fixture
def reaches(cluster: Cluster, kubectl: Kubectl, namespace: str, environment_image: str) -> Reaches:
    """Whether a named pod gets an answer from the Service `server`.

    The server and a stranger run on the first node, a friend and another stranger on the second.
    """
    placement = {"friend": 1, "stranger-here": 0, "stranger-there": 1}
    first, second = (node.name for node in cluster.nodes)
    clients = [
        pods.pod(name, environment_image, SLEEP, node=(first, second)[where])
        for name, where in placement.items()
    ]
    server = pods.pod("server", environment_image, SERVE, node=first)
    kubectl.apply(server, *clients, namespace=namespace)
    kubectl.run("expose", "pod", "server", "-n", namespace, "--port=80", f"--target-port={PORT}")
    pods.wait_until_ready(kubectl, namespace, "server", *placement)

    def fetch(pod: str) -> bool:
        url = f"http://server.{namespace}.svc.cluster.local/"
        return _output(kubectl, namespace, pod, "python3", "-c", FETCH, url) == "200\n"

    wait_until(lambda: fetch("friend"), "the Service has an endpoint")
    return fetch


def test_nodes_are_ready_and_offer_gpus(cluster: Cluster) -> None:
    nodes = cluster.kubectl.items("nodes")
    assert [n["metadata"]["name"] for n in nodes] == [node.name for node in cluster.nodes]
    assert {n["status"]["allocatable"]["nvidia.com/gpu"] for n in nodes} == {str(GPUS)}


def test_a_service_name_reaches_a_pod_from_both_nodes(reaches: Reaches) -> None:
    # Each node's kube-proxy learns of the endpoint in its own time.
    for pod in ("stranger-here", "stranger-there"):
        wait_until(partial(reaches, pod), f"the Service answers {pod}")


def test_a_network_policy_holds_while_it_exists(
    reaches: Reaches, kubectl: Kubectl, namespace: str
) -> None:
    strangers = ("stranger-here", "stranger-there")
    kubectl.apply(DENY_ALL_BUT_FRIENDS, namespace=namespace)
    wait_until(
        lambda: not any(map(reaches, strangers)) and reaches("friend"),
        "strangers are kept out and the friend is let in",
    )
    kubectl.delete("networkpolicy", "friends-only", "-n", namespace)
    wait_until(lambda: all(map(reaches, strangers)), "strangers are let in again")


def test_logs_and_exec_work(kubectl: Kubectl, namespace: str, environment_image: str) -> None:
    command = ["sh", "-c", "echo hello; exec sleep infinity"]
    kubectl.apply(pods.pod("talker", environment_image, command), namespace=namespace)
    pods.wait_until_ready(kubectl, namespace, "talker")
    wait_until(lambda: kubectl.run("logs", "talker", "-n", namespace) == "hello\n", "it has spoken")
    assert kubectl.run("exec", "talker", "-n", namespace, "--", "id", "-u") == "65532\n"


def test_restricted_pod_security_is_enforced(
    kubectl: Kubectl, namespace: str, environment_image: str
) -> None:
    pod = pods.pod("root", environment_image, SLEEP)
    pod["spec"]["securityContext"] = {}
    with pytest.raises(KubectlError, match='violates PodSecurity "restricted'):
        kubectl.apply(pod, namespace=namespace)


def test_gpus_are_scheduled(kubectl: Kubectl, namespace: str, environment_image: str) -> None:
    names = ["first", "second", "third"]
    wanted = [pods.pod(name, environment_image, SLEEP, gpus=GPUS) for name in names]
    kubectl.apply(*wanted[:2], namespace=namespace)
    pods.wait_until_ready(kubectl, namespace, *names[:2])
    kubectl.apply(wanted[2], namespace=namespace)
    kubectl.wait_for(
        "pod", "third", "-n", namespace,
        that=lambda pod: "Insufficient nvidia.com/gpu" in _scheduling_message(pod),
        what="finds no GPU",
    )  # fmt: skip
    kubectl.delete("pod", "first", "-n", namespace)
    pods.wait_until_ready(kubectl, namespace, "third")


def test_a_killed_process_is_restarted(
    kubectl: Kubectl, namespace: str, environment_image: str, faults: Faults
) -> None:
    kubectl.apply(pods.pod("victim", environment_image, SLEEP), namespace=namespace)
    pods.wait_until_ready(kubectl, namespace, "victim")
    before = kubectl.json("get", "pod", "victim", "-n", namespace)
    faults.kill_container(namespace, "victim")
    after = kubectl.wait_for(
        "pod", "victim", "-n", namespace,
        that=lambda pod: pod["status"]["containerStatuses"][0]["restartCount"] == 1,
        what="was restarted",
    )  # fmt: skip
    last = after["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert last["exitCode"] == 137
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


def test_a_node_without_its_kubelet_goes_on_serving(
    reaches: Reaches, cluster: Cluster, faults: Faults
) -> None:
    node = cluster.nodes[0]
    faults.stop_kubelet(node)
    faults.wait_until(node, ready=False)
    # A pod of a lost node leaves its Service's endpoints, though it still runs.
    wait_until(lambda: not reaches("friend"), "the Service drops the pod")
    faults.start_kubelet(node)
    wait_until(lambda: reaches("friend"), "the Service has the pod again")
    found = cluster.kubectl.json("get", "node", node.name)
    assert found["status"]["allocatable"]["nvidia.com/gpu"] == str(GPUS)


def test_a_cut_off_node_is_lost_and_returns(
    cluster: Cluster, kubectl: Kubectl, namespace: str, environment_image: str, faults: Faults
) -> None:
    node = cluster.nodes[1]
    pod = pods.pod("far", environment_image, SLEEP, node=node.name)
    kubectl.apply(pod, namespace=namespace)
    pods.wait_until_ready(kubectl, namespace, "far")
    uid = kubectl.json("get", "pod", "far", "-n", namespace)["metadata"]["uid"]
    faults.cut_off(node)
    faults.wait_until(node, ready=False)
    faults.reconnect(node)
    faults.wait_until(node, ready=True)
    pods.wait_until_ready(kubectl, namespace, "far")
    found = kubectl.json("get", "pod", "far", "-n", namespace)
    assert found["metadata"]["uid"] == uid
    assert found["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_frozen_node_does_nothing_until_it_is_thawed(
    cluster: Cluster,
    kubectl: Kubectl,
    namespace: str,
    environment_image: str,
    faults: Faults,
    shared_directory: Path,
) -> None:
    node = cluster.nodes[1]
    claim_directory(kubectl, namespace, "shared", shared_directory, read_only=False)
    ticks = shared_directory / "ticks"
    write = "import time\nwhile True: open('/shared/ticks', 'a').write('.'); time.sleep(0.01)"
    pod = pods.pod(
        "ticker", environment_image, ["python3", "-c", write], node=node.name,
        volumes=[{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
        volume_mounts=[{"name": "shared", "mountPath": "/shared"}],
    )  # fmt: skip
    kubectl.apply(pod, namespace=namespace)
    wait_until(ticks.exists, "the pod ticks")
    faults.freeze(node)
    frozen_at = ticks.stat().st_size
    faults.wait_until(node, ready=False)
    assert ticks.stat().st_size == frozen_at
    faults.thaw(node)
    faults.wait_until(node, ready=True)
    wait_until(lambda: ticks.stat().st_size > frozen_at, "the pod ticks again")


@pytest.fixture
def shared_directory(tmp_path: Path) -> Path:
    """A directory that pods of any user may write to."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o777)
    return path


def test_pods_run_the_code_of_the_checkout(
    kubectl: Kubectl, namespace: str, environment_image: str
) -> None:
    mounts = claim_environment(kubectl, namespace)
    pod = pods.pod(
        "worker", environment_image,
        ["python", "-c", "import redis, torch, radixgrove.worker as w; print(torch.ones(2), w)"],
        volumes=mounts.volumes, volume_mounts=mounts.volume_mounts,
    )  # fmt: skip
    pod["spec"]["restartPolicy"] = "Never"
    kubectl.apply(pod, namespace=namespace)
    kubectl.wait_for(
        "pod", "worker", "-n", namespace,
        that=lambda found: found["status"]["phase"] in ("Succeeded", "Failed"), what="ends",
    )  # fmt: skip
    output = kubectl.run("logs", "worker", "-n", namespace)
    assert "tensor([1., 1.]) <module 'radixgrove.worker'" in output


def test_a_claim_without_a_class_is_bound(
    cluster: Cluster, kubectl: Kubectl, namespace: str, environment_image: str
) -> None:
    cluster.offer_volumes(1)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "cache"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "5Gi"}},
        },
    }
    pod = pods.pod(
        "writer", environment_image, ["sh", "-c", "echo kept > /cache/file && exec sleep infinity"],
        volumes=[{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}],
        volume_mounts=[{"name": "cache", "mountPath": "/cache"}],
    )  # fmt: skip
    kubectl.apply(claim, pod, namespace=namespace)
    pods.wait_until_ready(kubectl, namespace, "writer")
    wait_until(
        lambda: _output(kubectl, namespace, "writer", "cat", "/cache/file") == "kept\n",
        "what it has written is there",
    )


def test_a_bystander_counts_what_it_did(kubectl: Kubectl, namespace: str) -> None:
    for name in ("one", "two"):
        kubectl.run("create", "configmap", name, "-n", namespace)
        kubectl.run("label", "configmap", name, "-n", namespace, "owner=us")
    bystander = Bystander(kubectl, namespace, ["configmaps", "services"], "owner=us")
    assert bystander.label_all("mine", "now") == 2
    assert len(kubectl.items("configmaps", "-n", namespace, "--selector=mine=now")) == 2
    assert bystander.patch_all({"data": {"key": "changed"}}) == 2
    assert kubectl.json("get", "configmap", "one", "-n", namespace)["data"] == {"key": "changed"}
    assert bystander.delete_all() == 2
    assert bystander.delete_all() == 0


def _output(kubectl: Kubectl, namespace: str, pod: str, *command: str) -> str:
    """What a command prints in a pod; empty when it fails."""
    try:
        return kubectl.run("exec", pod, "-n", namespace, "--", *command)
    except KubectlError:
        return ""


def _scheduling_message(pod: Any) -> str:
    conditions = pod["status"].get("conditions", [])
    return next((c.get("message", "") for c in conditions if c["type"] == "PodScheduled"), "")

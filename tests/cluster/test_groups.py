"""Groups of two pods on two nodes: they live, serve and die whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.harness import demo, groups, release
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.faults import Faults
from tests.cluster.harness.served import KIND, SERVICE_LABEL, Served, reason
from tests.cluster.harness.traffic import Client, Outcome, Traffic
from tests.cluster.harness.volumes import Mounts
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

# What a client may see when its group dies: an error before the answer, or one within it.
ERROR = re.compile(r"^(50[0234]: |error within the stream: )")


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing(cluster: Cluster) -> Iterator[None]:
    """The shared service is deleted after the last of this module's tests."""
    yield
    Served(cluster.kubectl, demo.NAMESPACE, "pair").delete()


@pytest.fixture
def pair(installed: Cluster, worker_mounts: Mounts) -> Served:
    """One ready group of two pods and no other, shared by the tests of this module."""
    served = Served(installed.kubectl, demo.NAMESPACE, "pair")
    served.apply(groups.spec(worker_mounts))
    served.wait_until_ready(1)
    wait_until(lambda: len(served.pods()) == 2, "the pods of earlier groups are gone")
    return served


def test_two_pods_on_two_nodes_meet_and_answer_through_the_router(
    pair: Served, client: Client
) -> None:
    pods = groups.members(pair)
    assert [pod.rank for pod in pods] == [0, 1]
    assert pods[0].node != pods[1].node
    status = pair.status()
    answer = client.ask(status["url"], pair.name, "Who are you?")
    assert answer.startswith(f"{pods[0].name}: 1 2 3")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_recreates_the_whole_group_once_and_no_old_rank_serves(
    pair: Served, client: Client, faults: Faults, rank: int
) -> None:
    before, old = pair.status(), groups.members(pair)
    with Traffic(client, before["url"], pair.name, clients=3, tokens=30) as traffic:
        traffic.wait_for_more(3)
        faults.kill_container(pair.namespace, old[rank].name)
        after = groups.wait_until_recreated(pair, old)
        new = groups.members(pair)
        traffic.wait_for(
            lambda seen: sum(answered_by(outcome, new[0]) for outcome in seen) >= 3,
            "the new group answers",
        )
    assert [pod.rank for pod in new] == [0, 1]
    assert after["groups"][0]["restarts"] == before["groups"][0].get("restarts", 0) + 1
    assert after["lastAttempt"] == before["lastAttempt"] + 1

    whole = [outcome for outcome in traffic.outcomes if not outcome.failure]
    servers = [groups.server(outcome.text) for outcome in whole]
    assert set(servers) == {old[0].name, new[0].name}
    first_new = min(o.began + o.seconds for o in whole if answered_by(o, new[0]))
    assert all(o.began < first_new for o in whole if answered_by(o, old[0]))
    assert all(ERROR.match(failure) for failure in traffic.failures), traffic.failures


def test_an_evicted_rank_drains_its_group_and_no_request_fails(
    pair: Served, client: Client
) -> None:
    pair.scale(2)
    status = pair.wait_until_ready(2)
    evicted = groups.members(pair)[1]
    pair.kubectl.wait_for(
        "pdb", pair.name, "-n", pair.namespace, that=groups.lets_one_pod_go, what="lets one pod go"
    )
    with Traffic(client, status["url"], pair.name, clients=4, tokens=30) as traffic:
        traffic.wait_for_more(4)
        evict(pair, evicted)
        wait_until(lambda: evicted.uid not in pair.pods().values(), "the pod is gone")
        pair.wait_until_ready(2)
        traffic.wait_for_more(4)
    assert traffic.failures == []
    pair.scale(1)
    pair.wait_until_ready(1)


def test_a_group_out_of_its_budget_is_kept_for_diagnosis_and_not_served(
    pair: Served, client: Client, faults: Faults
) -> None:
    pair.patch({"recovery": {"maxRestarts": 0}})
    pods, before = groups.members(pair), pair.status()
    faults.kill_container(pair.namespace, pods[1].name)
    status = pair.wait(
        lambda s: reason(s, "Ready") == "False/RestartBudgetExhausted", "its budget is exhausted"
    )
    assert status["lastAttempt"] == before["lastAttempt"]
    assert [pod.uid for pod in groups.members(pair)] == [pod.uid for pod in pods]
    # The router holds a request without a replica for a minute; its clients give up before.
    with Traffic(client, status["url"], pair.name, clients=2, patience=10) as traffic:
        traffic.wait_for_more(2)
        assert [outcome.text for outcome in traffic.outcomes if not outcome.failure] == []
        pair.patch({"recovery": {"maxRestarts": 10}})
        pair.kubectl.run(
            "annotate", KIND, pair.name, "-n", pair.namespace,
            "serving.radixgrove.io/restart=1", "--overwrite",
        )  # fmt: skip
        groups.wait_until_recreated(pair, pods)
        new = groups.members(pair)
        traffic.wait_for(
            lambda seen: any(answered_by(outcome, new[0]) for outcome in seen),
            "the next group answers",
        )
    whole = [outcome for outcome in traffic.outcomes if not outcome.failure]
    assert {groups.server(outcome.text) for outcome in whole} == {new[0].name}


def test_two_services_that_each_need_every_gpu_run_one_after_the_other(
    installed: Cluster, worker_mounts: Mounts
) -> None:
    namespace, kubectl = demo.NAMESPACE, installed.kubectl
    services = [Served(kubectl, namespace, name) for name in ("all-gpus-1", "all-gpus-2")]
    spec = groups.spec(worker_mounts, gpus_per_node=8)
    two, others = installed.nodes[:2], installed.nodes[2:]
    with groups.cordoned(installed, *others):
        try:
            for service in services:
                service.apply(spec)
            ready = wait_until(
                lambda: [s for s in services if reason(s.status(), "Ready") == "True/Serving"],
                "one of the two is ready", timeout=480,
            )  # fmt: skip
            assert len(ready) == 1
            (second,) = set(services) - set(ready)
            status = second.wait(
                lambda s: reason(s, "Ready") == "False/InsufficientGPUs", "it says what it misses"
            )
            assert [pod.name for pod in groups.members(second) if pod.node] == []
            assert [group.get("restarts", 0) for group in status["groups"]] == [0]
            ready[0].delete()
            second.wait_until_ready(1)
            assert {pod.node for pod in groups.members(second)} == {node.name for node in two}
        finally:
            for service in services:
                service.delete()


def test_what_does_not_concern_the_engine_restarts_no_pod(
    pair: Served, installed: Cluster, faults: Faults
) -> None:
    pods = pair.pods()
    pair.scale(2)
    pair.wait_until_ready(2)
    changes: list[dict[str, Any]] = [
        {"recovery": {"maxRestarts": 7}},
        {"rollout": {"maxUnavailable": 0, "maxSurge": 1}},
        {"autoscaling": {"min": 1, "max": 2}},
        {"router": {"dedicated": True, "replicas": 1}},
        {"router": {"dedicated": False, "replicas": None}, "autoscaling": None},
    ]
    for change in changes:
        pair.patch(change)
        pair.wait(lambda s: reason(s, "Ready") == "True/Serving", f"it has taken {change}")
        assert pods.items() <= pair.pods().items()
    installed.kubectl.run(
        "label", KIND, pair.name, "-n", pair.namespace, "team=blue", "--overwrite"
    )
    restart_operator(installed, faults)
    pair.scale(1)
    pair.wait_until_ready(1)
    wait_until(lambda: pair.pods() == pods, "only the first group is left")


def test_an_operator_killed_in_the_middle_of_anything_converges(
    pair: Served, installed: Cluster, faults: Faults
) -> None:
    old, attempt = groups.members(pair), pair.status()["lastAttempt"]
    faults.kill_container(pair.namespace, old[1].name)
    wait_until(
        lambda: (
            pair.status()["groups"][0]["phase"] == "Waiting"
            or pair.status()["lastAttempt"] > attempt
        ),
        "recovery has begun",
    )
    kill_operator(installed, faults)
    groups.wait_until_recreated(pair, old)

    old = groups.members(pair)
    pair.patch({"engine": {"maxRunning": 7}})
    wait_until(lambda: set(groups.members(pair)) != set(old), "the rollout has begun")
    kill_operator(installed, faults)
    pair.wait_until_ready(1)
    groups.wait_until_recreated(pair, old)

    pair.kubectl.delete(KIND, pair.name, "-n", pair.namespace, wait=False)
    restart_operator(installed, faults)
    wait_until(lambda: not children(pair), "no child is left")


def test_deletes_and_patches_in_quick_succession_leave_no_child(
    installed: Cluster, worker_mounts: Mounts
) -> None:
    served = Served(installed.kubectl, demo.NAMESPACE, "stormy")
    spec = groups.spec(worker_mounts)
    served.apply(spec)
    wait_until(served.pods, "it has pods")
    for _ in range(2):
        served.kubectl.delete(KIND, served.name, "-n", served.namespace, wait=False)
    served.apply(spec)
    first = served.read()["metadata"]["uid"]
    for turn in range(10):
        served.patch({"engine": {"maxRunning": 1 + turn}})
    served.wait_until_ready(1)

    def owners() -> set[str]:
        return {
            owner["uid"]
            for child in children(served)
            for owner in child["metadata"].get("ownerReferences", [])
            if owner["kind"] == "InferenceService"
        }

    wait_until(lambda: len(groups.members(served)) == 2, "one group is left")
    wait_until(lambda: owners() == {first}, "only its own children are left")
    served.delete()
    wait_until(lambda: not children(served), "no child is left")


def answered_by(outcome: Outcome, pod: groups.Member) -> bool:
    """Whether a request has its whole answer, from that pod."""
    return not outcome.failure and groups.server(outcome.text) == pod.name


def children(served: Served) -> list[dict[str, Any]]:
    """Everything in the namespace that carries the service's label."""
    kinds = (
        "statefulsets,deployments,pods,services,configmaps,serviceaccounts,"
        "poddisruptionbudgets,networkpolicies,persistentvolumeclaims,jobs"
    )
    return served.kubectl.items(
        kinds, "-n", served.namespace, f"--selector={SERVICE_LABEL}={served.name}"
    )


def evict(served: Served, pod: groups.Member) -> None:
    """Through the Eviction API, as `kubectl drain` does it."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": served.namespace},
    }
    path = f"/api/v1/namespaces/{served.namespace}/pods/{pod.name}/eviction"
    served.kubectl.run("create", "--raw", path, "--filename=-", text=json.dumps(body))


def kill_operator(cluster: Cluster, faults: Faults) -> None:
    """SIGKILL; its kubelet starts it again, later each time."""
    selector = "--selector=app.kubernetes.io/component=operator"
    found = cluster.kubectl.items("pods", "-n", release.NAMESPACE, selector)
    (pod,) = (p["metadata"] for p in found if "deletionTimestamp" not in p["metadata"])
    faults.kill_container(release.NAMESPACE, pod["name"])


def restart_operator(cluster: Cluster, faults: Faults) -> None:
    """Kills it, and waits until the next one leads."""
    lease = ("lease", "radixgrove-operator", "-n", release.NAMESPACE)
    before = cluster.kubectl.json("get", *lease)["spec"]["leaseTransitions"]
    kill_operator(cluster, faults)
    cluster.kubectl.wait_for(
        *lease, that=lambda found: found["spec"]["leaseTransitions"] > before, what="has changed",
        timeout=300,
    )  # fmt: skip

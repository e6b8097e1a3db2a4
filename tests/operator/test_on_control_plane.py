"""The operator as a process on a real control plane with pretended nodes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_process import OperatorProcess, RedisServer

from radixgrove.operator import names
from radixgrove.protocol.modeltable import (
    Demand,
    ModelEntry,
    ModelTable,
    demand_field,
    demand_key,
    table_key,
)
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kubectl import KubectlError, condition
from tests.cluster.harness.kwok import LATE
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
RGSVC = f"{names.PLURAL}.{names.GROUP}"


def service(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"source": "pvc://models/demo"}} | spec,
    }


def ready(resource: dict[str, Any]) -> bool:
    status = resource.get("status", {})
    return (
        condition(resource, "Ready") == "True"
        and status.get("readyReplicas") == (resource["spec"]["replicas"])
    )


def reason(resource: dict[str, Any], kind: str = "Ready") -> str:
    conditions = resource.get("status", {}).get("conditions", [])
    return next((c["reason"] for c in conditions if c["type"] == kind), "")


def sets(plane: ControlPlane, namespace: str) -> list[str]:
    found = plane.kubectl.items("statefulsets", "-n", namespace)
    return sorted(item["metadata"]["name"] for item in found)


def table(server: RedisServer) -> dict[str, ModelEntry]:
    data = server.client.get(table_key("radixgrove", "shared"))
    if data is None:
        return {}
    return {entry.service: entry for entry in ModelTable.decode(data).entries}  # type: ignore[arg-type]


# ---- the resource --------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_admitted(plane: ControlPlane, namespace: str, path: Path) -> None:
    plane.kubectl.run("create", "-n", namespace, "--dry-run=server", "-f", str(path))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"hardware": {"nodes": 2, "gpusPerNode": 8}, "parallelism": {"tp": 8}},
            r"tp \* pp \* dp must equal nodes \* gpusPerNode",
        ),
        (
            {"hardware": {"nodes": 2, "gpusPerNode": 2}, "parallelism": {"tp": 4}},
            "tp must not exceed gpusPerNode",
        ),
        (
            {"hardware": {"gpusPerNode": 8}, "parallelism": {"tp": 8, "ep": 3}},
            r"ep must divide tp \* dp",
        ),
        ({"autoscaling": {"min": 3, "max": 2}}, "min must not exceed max"),
        ({"rollout": {"maxUnavailable": 0}}, "cannot both be 0"),
        ({"model": {"source": "ftp://x"}}, "spec.model.source"),
        ({"model": {"source": "s3://b/x", "revision": "main"}}, "revision is for hf://"),
        ({"router": {"policy": "random"}}, "belong to a dedicated router"),
        ({"engine": {"pageSize": 0}}, "spec.engine.pageSize"),
        ({"replicas": -1}, "spec.replicas"),
    ],
    ids=str,
)
def test_wrong_specs_are_refused_by_the_api_server(
    plane: ControlPlane, namespace: str, spec: dict[str, Any], said: str
) -> None:
    with pytest.raises(KubectlError, match=said):
        plane.kubectl.apply(service("wrong", namespace, **spec))


@pytest.mark.parametrize("name", ["a" * 41, "9lives", "with.dot"])
def test_a_name_must_fit_a_service(plane: ControlPlane, namespace: str, name: str) -> None:
    with pytest.raises(KubectlError, match="a name"):
        plane.kubectl.apply(service(name, namespace))


def test_defaults_are_filled_in(plane: ControlPlane, namespace: str) -> None:
    plane.kubectl.apply(service("plain", namespace))
    spec = plane.kubectl.json("get", RGSVC, "plain", "-n", namespace)["spec"]
    assert spec["replicas"] == 1
    assert spec["hardware"]["gpusPerNode"] == 1
    assert spec["recovery"]["nodeGrace"] == "30s"


# ---- from resource to served model ---------------------------------------------------------------


def test_a_service_becomes_ready_and_routers_learn_of_it(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace, replicas=2, hardware={"gpusPerNode": 8}))
    seen = plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready")
    assert seen["status"]["summary"] == "2/2"
    assert seen["status"]["parallelism"]["tp"] == 8
    assert sets(plane, namespace) == ["llama-0-a1", "llama-1-a2"]
    entry = table(redis_server)[f"{namespace}.llama"]
    assert sorted(entry.attempts) == ["llama-0-a1-0", "llama-1-a2-0"]
    assert entry.names == ["llama"]
    listing = plane.kubectl.run("get", "rgsvc", "llama", "-n", namespace)
    assert "2/2" in listing
    assert "http://router/v1" in listing


def test_deleting_a_service_leaves_nothing(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace, router={"dedicated": True}))
    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready")
    plane.kubectl.delete(RGSVC, "llama", "-n", namespace)
    kinds = "statefulsets,deployments,pods,services,configmaps,pdb,networkpolicies,secrets"

    def left() -> list[str]:
        found = plane.kubectl.items(
            kinds, "-n", namespace, f"-l={names.MANAGED_BY}={names.MANAGER}"
        )
        return [f"{item['kind']}/{item['metadata']['name']}" for item in found]

    wait_until(lambda: left() == [], "nothing is left", timeout=60)
    wait_until(
        lambda: f"{namespace}.llama" not in table(redis_server), "routers forget it", timeout=20
    )


def test_a_lost_pod_recreates_its_whole_group_once(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    plane.kubectl.apply(service("big", namespace, hardware={"nodes": 2, "gpusPerNode": 8}))
    plane.kubectl.wait_for(RGSVC, "big", "-n", namespace, that=ready, what="is ready")
    assert sets(plane, namespace) == ["big-0-a1"]
    plane.kubectl.delete("pod", "big-0-a1-1", "-n", namespace, "--grace-period=0", "--force")
    wait_until(lambda: sets(plane, namespace) == ["big-0-a2"], "the next attempt", timeout=30)
    seen = plane.kubectl.wait_for(RGSVC, "big", "-n", namespace, that=ready, what="is ready")
    assert [group["restarts"] for group in seen["status"]["groups"]] == [1]
    assert table(redis_server)[f"{namespace}.big"].attempts == ["big-0-a2-0"]


def test_changes_of_scale_recovery_and_router_restart_no_pod(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace))
    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready")
    before = {p["metadata"]["uid"] for p in plane.kubectl.items("pods", "-n", namespace)}
    plane.kubectl.patch(
        RGSVC, "llama", "-n", namespace,
        body={
            "spec": {
                "replicas": 2, "recovery": {"maxRestarts": 3}, "router": {"dedicated": True},
            },
            "metadata": {"labels": {"team": "a"}},
        },
    )  # fmt: skip
    plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, that=lambda r: ready(r) and r["spec"]["replicas"] == 2,
        what="has two replicas",
    )  # fmt: skip
    plane.kubectl.wait_for("deployment", "llama-router", "-n", namespace, that=bool, what="exists")
    after = {p["metadata"]["uid"] for p in plane.kubectl.items("pods", "-n", namespace)}
    assert before < after


def test_a_new_revision_rolls_by_whole_groups(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    rollout = {"maxUnavailable": 0, "maxSurge": 1}
    plane.kubectl.apply(service("llama", namespace, replicas=2, rollout=rollout))
    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready")
    plane.kubectl.patch(
        RGSVC, "llama", "-n", namespace, body={"spec": {"engine": {"pageSize": 32}}}
    )
    plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace,
        that=lambda r: ready(r) and len(r["status"]["groups"]) == r["status"]["updatedReplicas"],
        what="runs the new revision",
    )  # fmt: skip
    wait_until(lambda: len(sets(plane, namespace)) == 2, "old groups are gone", timeout=30)
    maps = plane.kubectl.items("configmaps", "-n", namespace, f"-l={names.SERVICE}=llama")
    assert len(maps) == 1
    assert yaml.safe_load(maps[0]["data"]["worker.yaml"])["page_size"] == 32


def test_scaling_through_the_scale_subresource(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace))
    plane.kubectl.run("scale", RGSVC, "llama", "-n", namespace, "--replicas=3")
    plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, what="has three groups",
        that=lambda r: ready(r) and r["status"]["replicas"] == 3,
    )  # fmt: skip
    plane.kubectl.run("scale", RGSVC, "llama", "-n", namespace, "--replicas=0")
    wait_until(lambda: sets(plane, namespace) == [], "no group is left", timeout=30)


def test_two_services_that_need_the_same_nodes_do_not_block_each_other(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    hardware = {"nodes": 4, "gpusPerNode": 8}
    for name in ("one", "two"):
        plane.kubectl.apply(service(name, namespace, hardware=hardware))

    def state() -> dict[str, Any]:
        return {
            name: plane.kubectl.json("get", RGSVC, name, "-n", namespace) for name in ("one", "two")
        }

    def settled() -> str:
        found = {name: (ready(r), reason(r)) for name, r in state().items()}
        winners = [name for name, (is_ready, _) in found.items() if is_ready]
        losers = [name for name, (_, why) in found.items() if why == "InsufficientGPUs"]
        return winners[0] if len(winners) == len(losers) == 1 else ""

    winner = wait_until(settled, "one is ready, the other says why not", timeout=90)
    loser = "two" if winner == "one" else "one"
    pods = plane.kubectl.items("pods", "-n", namespace, f"-l={names.SERVICE}={loser}")
    assert not any(pod["spec"].get("nodeName") for pod in pods), "the loser holds no GPU"
    plane.kubectl.delete(RGSVC, winner, "-n", namespace)
    plane.kubectl.wait_for(RGSVC, loser, "-n", namespace, that=ready, what="starts", timeout=90)


def test_the_older_of_two_services_keeps_a_model_name(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    model = {"source": "pvc://models/demo", "name": f"Llama-{namespace}"}
    plane.kubectl.apply(service("first", namespace, model=model))
    plane.kubectl.wait_for(RGSVC, "first", "-n", namespace, that=ready, what="is ready")
    plane.kubectl.apply(service("second", namespace, model=model))
    plane.kubectl.wait_for(
        RGSVC,
        "second",
        "-n",
        namespace,
        that=lambda r: reason(r) == "ModelNameTaken",
        what="is told",
    )
    plane.kubectl.delete(RGSVC, "first", "-n", namespace)
    plane.kubectl.wait_for(RGSVC, "second", "-n", namespace, that=ready, what="takes over")


def test_a_wrong_engine_setting_is_named_in_a_condition(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace, engine={"settings": {"no_such": 1}}))
    seen = plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, that=lambda r: reason(r) == "InvalidEngine", what="is told"
    )
    assert "no_such" in str(seen["status"]["conditions"])


def test_evictions_take_one_group_at_a_time(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    hardware = {"nodes": 2, "gpusPerNode": 8}
    late = {"metadata": {"annotations": {LATE: "true"}}}
    plane.kubectl.apply(
        service("llama", namespace, replicas=2, hardware=hardware, podOverrides=late)
    )
    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready")
    plane.kubectl.wait_for(
        "pdb", "llama", "-n", namespace, what="allows one pod",
        that=lambda b: b["status"].get("disruptionsAllowed") == 1,
    )  # fmt: skip

    def evict(pod: str) -> None:
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        plane.kubectl.run("create", "--raw", path, "--filename=-", text=json.dumps(body))

    first, second = sets(plane, namespace)
    evict(f"{first}-1")
    with pytest.raises(KubectlError, match="disruption budget"):
        evict(f"{second}-0")
    wait_until(
        lambda: first not in sets(plane, namespace), "its group is replaced whole", timeout=60
    )
    seen = plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready")
    assert second in sets(plane, namespace)
    assert sum(group["restarts"] for group in seen["status"]["groups"]) == 1
    plane.kubectl.wait_for(
        "pdb", "llama", "-n", namespace, what="allows one again",
        that=lambda b: b["status"].get("disruptionsAllowed") == 1,
    )  # fmt: skip
    evict(f"{second}-0")


# ---- life of the operator ------------------------------------------------------------------------


def test_an_operator_killed_in_the_middle_converges_after_its_restart(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace, replicas=3))
    wait_until(lambda: sets(plane, namespace), "the first group", timeout=30)
    operator.kill()
    plane.kubectl.patch(RGSVC, "llama", "-n", namespace, body={"spec": {"replicas": 2}})
    operator.start()
    plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, that=lambda r: ready(r) and r["status"]["replicas"] == 2,
        what="has two groups", timeout=90,
    )  # fmt: skip
    assert len(sets(plane, namespace)) == 2


def test_at_rest_it_writes_nothing(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace, replicas=2))
    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready")
    user = "system:serviceaccount:radixgrove:radixgrove-operator"

    def busy() -> list[str]:
        requests = plane.audit.read(user)
        return [r.resource for r in requests if r.writes and "leases" not in r.resource]

    wait_until(lambda: not busy(), "writes end", timeout=90, interval=4.0)
    assert busy() == []


def test_a_bystanders_write_costs_at_most_one_of_ours(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace))
    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready")
    user = "system:serviceaccount:radixgrove:radixgrove-operator"
    wait_until(
        lambda: not [r for r in plane.audit.read(user) if r.writes and "leases" not in r.resource],
        "writes end", timeout=90, interval=4.0,
    )  # fmt: skip
    plane.kubectl.patch("pdb", "llama", "-n", namespace, body={"spec": {"minAvailable": 7}})
    plane.kubectl.wait_for(
        "pdb",
        "llama",
        "-n",
        namespace,
        that=lambda b: b["spec"]["minAvailable"] == 0,
        what="is restored",
    )
    plane.kubectl.delete("networkpolicy", "llama-workers", "-n", namespace)
    plane.kubectl.wait_for(
        "networkpolicy", "llama-workers", "-n", namespace, that=bool, what="is restored"
    )
    wrote = [r for r in plane.audit.read(user) if r.writes and "leases" not in r.resource]
    assert len(wrote) == 2, [(w.verb, w.resource, w.name) for w in wrote]


def test_a_leader_stopped_past_its_lease_writes_nothing_when_it_continues(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    plane.kubectl.apply(service("llama", namespace))
    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready")
    operator.signal(signal.SIGSTOP)
    second = OperatorProcess(plane, tmp_path, redis_server.port)
    second.start()
    try:
        wait_until(lambda: '"leading"' in second.log.read_text(), "the second leads", timeout=60)
        log_before = len(operator.log.read_text())
        plane.kubectl.run("scale", RGSVC, "llama", "-n", namespace, "--replicas=2")
        plane.kubectl.wait_for(
            RGSVC, "llama", "-n", namespace, what="is scaled by the second",
            that=lambda r: ready(r) and r["status"]["replicas"] == 2,
        )  # fmt: skip
        operator.signal(signal.SIGCONT)
        assert operator.process is not None
        assert operator.process.wait(30) == 1
        operator.process = None
        assert "the lease was lost" in operator.log.read_text()[log_before:]
        assert len(sets(plane, namespace)) == 2
    finally:
        second.stop()


# ---- neighbours and modes ------------------------------------------------------------------------


def test_kserves_resource_of_the_same_name_lives_beside_ours(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    version = {
        "name": "v1beta1",
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        },
    }
    plane.kubectl.apply(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": "inferenceservices.serving.kserve.io"},
            "spec": {
                "group": "serving.kserve.io",
                "scope": "Namespaced",
                "names": {
                    "kind": "InferenceService",
                    "plural": "inferenceservices",
                    "singular": "inferenceservice",
                    "shortNames": ["isvc"],
                },
                "versions": [version],
            },
        }
    )
    crd_name = "crd/inferenceservices.serving.kserve.io"
    try:
        plane.kubectl.run("wait", "--for=condition=Established", crd_name, "--timeout=30s")
        theirs = service("theirs", namespace) | {"apiVersion": "serving.kserve.io/v1beta1"}
        wait_until(lambda: _applies(plane, theirs), "theirs is admitted", timeout=30)
        plane.kubectl.apply(service("ours", namespace))
        plane.kubectl.wait_for("rgsvc", "ours", "-n", namespace, that=ready, what="is ready")
        assert "theirs" not in plane.kubectl.run("get", "rgsvc", "-n", namespace)
        assert sets(plane, namespace) == ["ours-0-a1"]
    finally:
        plane.kubectl.delete("crd", "inferenceservices.serving.kserve.io")


def _applies(plane: ControlPlane, manifest: dict[str, Any]) -> bool:
    try:
        plane.kubectl.apply(manifest)
    except KubectlError:
        return False
    return True


def test_namespaced_mode_sees_only_its_namespace(
    plane: ControlPlane, redis_server: RedisServer, namespace: str, tmp_path: Path
) -> None:
    election = {"duration": 6.0, "renew_every": 1.0, "lease": "radixgrove-operator"}
    operator = OperatorProcess(
        plane, tmp_path, redis_server.port, [namespace], {"election": election}
    )
    plane.kubectl.run("create", "namespace", f"{namespace}-other")
    operator.start()
    try:
        plane.kubectl.apply(service("seen", namespace), service("unseen", f"{namespace}-other"))
        plane.kubectl.wait_for(RGSVC, "seen", "-n", namespace, that=ready, what="is ready")
        assert sets(plane, f"{namespace}-other") == []
        unseen = plane.kubectl.json("get", RGSVC, "unseen", "-n", f"{namespace}-other")
        assert "status" not in unseen
    finally:
        operator.kill()
        plane.kubectl.run("delete", "namespace", f"{namespace}-other", "--wait=false")


def test_an_idle_service_sleeps_and_a_held_request_wakes_it(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    scaling = {"min": 0, "max": 2, "cooldown": "1s", "targets": {"queue": 4}}
    plane.kubectl.apply(service("llama", namespace, replicas=0, autoscaling=scaling))
    plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, that=lambda r: reason(r) == "Asleep", what="sleeps"
    )
    entry = table(redis_server)[f"{namespace}.llama"]
    assert (entry.wakes, entry.desired) == (True, 0)

    def hold(requests: int) -> None:
        now, _ = redis_server.client.time()  # type: ignore[misc]
        field = demand_field("router-1", f"{namespace}.llama")
        value = Demand(held=requests, at_ms=int(now) * 1000).encode()
        redis_server.client.hset(demand_key("radixgrove"), field, value)

    hold(1)
    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=lambda r: ready(r) and (
        r["spec"]["replicas"] == 1), what="wakes")  # fmt: skip


def test_a_refused_pod_is_told_in_the_api_servers_words(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.run(
        "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    plane.kubectl.apply(
        service("plain", namespace), service("rdma", namespace, hardware={"network": "roce"})
    )
    plane.kubectl.wait_for(RGSVC, "plain", "-n", namespace, that=ready, what="is restricted")
    seen = plane.kubectl.wait_for(
        RGSVC, "rdma", "-n", namespace, that=lambda r: reason(r) == "PodRefused", what="is refused"
    )
    assert "IPC_LOCK" in str(seen["status"]["conditions"])


def test_a_bad_update_keeps_the_old_groups_and_a_rollback_heals(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.run(
        "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    rollout = {"maxUnavailable": 0, "maxSurge": 1}
    plane.kubectl.apply(service("llama", namespace, replicas=2, rollout=rollout))
    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=ready, what="is ready")
    before = sets(plane, namespace)
    plane.kubectl.patch(
        RGSVC,
        "llama",
        "-n",
        namespace,
        body={"spec": {"podOverrides": {"spec": {"hostPID": True}}}},
    )
    seen = plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, what="is blocked",
        that=lambda r: reason(r, "Progressing") == "RolloutBlocked",
    )  # fmt: skip
    assert condition(seen, "Ready") == "True"
    assert set(before) < set(sets(plane, namespace))
    plane.kubectl.patch(
        RGSVC, "llama", "-n", namespace, body={"spec": {"podOverrides": {"spec": None}}}
    )
    plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, what="is as before",
        that=lambda r: reason(r, "Progressing") == "Settled",
    )  # fmt: skip
    wait_until(lambda: sets(plane, namespace) == before, "old groups alone", timeout=30)

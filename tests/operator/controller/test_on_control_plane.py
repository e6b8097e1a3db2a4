"""Services from resource to model, by the operator as a process, on pretended nodes."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
import yaml

from radixgrove.operator.api import names
from radixgrove.protocol.keys import ServiceKeys
from radixgrove.protocol.model_table import Demand
from tests.checkout import ROOT
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.groups import lets_one_pod_go
from tests.cluster.harness.kubectl import KubectlError, condition
from tests.cluster.harness.kwok import LATE
from tests.cluster.harness.waiting import wait_until
from tests.conftest import RedisServer
from tests.operator.operator_process import OperatorProcess
from tests.operator.resources import (
    RGSVC,
    ready,
    reason,
    routable,
    service,
    sets,
    table,
    wait_ready,
)

pytestmark = pytest.mark.cluster


def test_a_service_becomes_ready_and_routers_learn_of_it(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    model = {"source": "pvc://models/demo", "name": f"Llama-{namespace}"}  # no other test's
    wanted = service("llama", namespace, model=model, replicas=2, hardware={"gpusPerNode": 8})
    plane.kubectl.apply(wanted)
    seen = wait_ready(plane, "llama", namespace)
    assert seen["status"]["summary"] == "2/2"
    assert seen["status"]["parallelism"]["tp"] == 8
    assert sets(plane, namespace) == ["llama-0-a1", "llama-1-a2"]
    wait_until(
        lambda: routable(redis_server, f"{namespace}.llama") == ["llama-0-a1-0", "llama-1-a2-0"],
        "routers know both groups",
    )
    assert table(redis_server)[f"{namespace}.llama"].names == [f"Llama-{namespace}"]
    listing = plane.kubectl.run("get", "rgsvc", "llama", "-n", namespace)
    assert "2/2" in listing
    assert "http://router/v1" in listing


def test_deleting_a_service_leaves_nothing(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace, router={"dedicated": True}))
    wait_ready(plane, "llama", namespace)
    plane.kubectl.delete(RGSVC, "llama", "-n", namespace)
    kinds = "statefulsets,deployments,pods,services,configmaps,pdb,networkpolicies,secrets"

    def left() -> list[str]:
        found = plane.kubectl.items(
            kinds, "-n", namespace, f"-l={names.MANAGED_BY}={names.MANAGER}"
        )
        return [f"{item['kind']}/{item['metadata']['name']}" for item in found]

    wait_until(lambda: left() == [], "nothing is left")
    wait_until(lambda: f"{namespace}.llama" not in table(redis_server), "routers forget it")


def test_a_lost_pod_recreates_its_whole_group_once(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    plane.kubectl.apply(service("big", namespace, hardware={"nodes": 2, "gpusPerNode": 8}))
    wait_ready(plane, "big", namespace)
    assert sets(plane, namespace) == ["big-0-a1"]
    plane.kubectl.delete("pod", "big-0-a1-1", "-n", namespace, "--grace-period=0", "--force")
    wait_until(lambda: sets(plane, namespace) == ["big-0-a2"], "the next attempt")
    seen = wait_ready(plane, "big", namespace)
    assert [group["restarts"] for group in seen["status"]["groups"]] == [1]
    wait_until(
        lambda: routable(redis_server, f"{namespace}.big") == ["big-0-a2-0"],
        "routers know the next",
    )


def test_changes_of_scale_recovery_and_router_restart_no_pod(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace))
    wait_ready(plane, "llama", namespace)
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
    wait_ready(plane, "llama", namespace)
    plane.kubectl.patch(
        RGSVC, "llama", "-n", namespace, body={"spec": {"engine": {"pageSize": 32}}}
    )
    plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace,
        that=lambda r: ready(r) and len(r["status"]["groups"]) == r["status"]["updatedReplicas"],
        what="runs the new revision",
    )  # fmt: skip
    wait_until(lambda: len(sets(plane, namespace)) == 2, "old groups are gone")

    def revisions() -> list[dict[str, Any]]:
        return plane.kubectl.items("configmaps", "-n", namespace, f"-l={names.SERVICE}=llama")

    wait_until(lambda: len(revisions()) == 1, "the old revision is gone")
    maps = revisions()
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
    plane.kubectl.apply(service("llama", namespace))  # which says nothing of replicas
    again = plane.kubectl.json("get", RGSVC, "llama", "-n", namespace)
    assert again["spec"]["replicas"] == 3
    plane.kubectl.run("scale", RGSVC, "llama", "-n", namespace, "--replicas=0")
    wait_until(lambda: sets(plane, namespace) == [], "no group is left")


def test_a_users_own_hpa_moves_replicas_and_is_not_overruled(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace))
    plane.kubectl.apply(
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "llama", "namespace": namespace},
            "spec": {
                "scaleTargetRef": {
                    "apiVersion": names.API_VERSION, "kind": names.KIND, "name": "llama",
                },
                "minReplicas": 2,  # which it brings about without any metric
                "maxReplicas": 3,
            },
        }
    )  # fmt: skip
    seen = plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, what="has two groups",
        that=lambda r: ready(r) and r["status"]["replicas"] == 2,
    )  # fmt: skip
    pods = plane.kubectl.items("pods", "-n", namespace, f"-l={seen['status']['selector']}")
    assert len(pods) == 2, "what an HPA counts"


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

    winner = wait_until(settled, "one is ready, the other says why not")
    loser = "two" if winner == "one" else "one"
    pods = plane.kubectl.items("pods", "-n", namespace, f"-l={names.SERVICE}={loser}")
    assert not any(pod["spec"].get("nodeName") for pod in pods), "the loser holds no GPU"
    plane.kubectl.delete(RGSVC, winner, "-n", namespace)
    plane.kubectl.wait_for(RGSVC, loser, "-n", namespace, that=ready, what="starts")


def test_a_group_too_large_for_the_cluster_gives_way_and_still_shows_its_pods(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("huge", namespace, hardware={"nodes": 5, "gpusPerNode": 8}))

    def pods() -> list[bool]:
        """Whether each has a node."""
        found = plane.kubectl.items("pods", "-n", namespace, f"-l={names.SERVICE}=huge")
        return sorted("nodeName" in pod["spec"] for pod in found)

    wait_until(lambda: pods() == [False, True, True, True, True], "it takes what there is")
    plane.kubectl.apply(service("small", namespace, hardware={"gpusPerNode": 8}))
    wait_ready(plane, "small", namespace)
    wait_until(lambda: pods() == [False, False, True, True, True], "its pods wait for two nodes")
    plane.kubectl.wait_for(
        RGSVC,
        "huge",
        "-n",
        namespace,
        that=lambda r: reason(r) == "InsufficientGPUs",
        what="says that it waits for GPUs",
    )


def test_of_two_services_the_first_keeps_a_model_name_and_the_other_serves_without_it(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    model = {"source": "pvc://models/demo", "name": f"Llama-{namespace}"}
    plane.kubectl.apply(service("first", namespace, model=model))
    wait_ready(plane, "first", namespace)
    plane.kubectl.apply(service("second", namespace, model=model))
    second = wait_ready(plane, "second", namespace)
    assert reason(second, "Degraded") == "ModelNameTaken"
    assert table(redis_server)[f"{namespace}.second"].names == [f"{namespace}/second"]
    plane.kubectl.delete(RGSVC, "first", "-n", namespace)
    wait_until(
        lambda: table(redis_server)[f"{namespace}.second"].names == [f"Llama-{namespace}"],
        "the other has the name",
    )


def test_a_wrong_engine_setting_is_named_in_a_condition(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace, engine={"settings": {"no_such": 1}}))
    seen = plane.kubectl.wait_for(
        RGSVC,
        "llama",
        "-n",
        namespace,
        that=lambda r: reason(r) == "InvalidEngine",
        what="is reported",
    )
    assert "no_such" in str(seen["status"]["conditions"])
    plane.kubectl.apply(
        service("own", namespace, router={"dedicated": True, "settings": {"no_such": {"x": 1}}})
    )
    seen = plane.kubectl.wait_for(
        RGSVC, "own", "-n", namespace, that=lambda r: reason(r, "Degraded") == "InvalidRouter",
        what="is reported",
    )  # fmt: skip
    assert "router.settings.no_such" in str(seen["status"]["conditions"])


@pytest.mark.parametrize(
    ("overrides", "said", "words"),
    [
        ({"spec": {"containers": "worker"}}, "InvalidPodOverrides", "containers must be a list"),
        ({"spec": {"tolerationz": []}}, "RequestRefused", "tolerationz"),
    ],
)
def test_an_override_that_would_be_dropped_or_cannot_be_laid_over_is_named(
    plane: ControlPlane, operator: OperatorProcess, namespace: str,
    overrides: dict[str, Any], said: str, words: str,
) -> None:  # fmt: skip
    plane.kubectl.apply(service("llama", namespace, podOverrides=overrides))
    seen = plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, that=lambda r: reason(r) == said, what="is reported"
    )
    assert words in str(seen["status"]["conditions"])
    body = {"spec": {"podOverrides": None}}
    plane.kubectl.patch(RGSVC, "llama", "-n", namespace, body=body)
    wait_ready(plane, "llama", namespace)


def test_a_refused_group_keeps_its_number_and_is_made_once_the_spec_is_right(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.audit.read()
    wrong = {"spec": {"tolerationz": []}}
    plane.kubectl.apply(service("llama", namespace, podOverrides=wrong))
    attempts: list[str] = []

    def tried() -> bool:
        seen = [r for r in plane.audit.read() if r.namespace == namespace and r.code >= 400]
        attempts.extend(r.name for r in seen if r.resource == "apps/statefulsets")
        return len(attempts) >= 4

    wait_until(tried, "four attempts are refused", interval=0.2)
    assert set(attempts) == {"llama-0-a1"}
    seen = plane.kubectl.json("get", RGSVC, "llama", "-n", namespace)
    assert seen["status"]["lastAttempt"] == 1
    body = {"spec": {"podOverrides": None}}
    plane.kubectl.patch(RGSVC, "llama", "-n", namespace, body=body)
    wait_ready(plane, "llama", namespace)
    assert sets(plane, namespace) == ["llama-0-a1"]


def test_evictions_take_one_group_at_a_time(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    hardware = {"nodes": 2, "gpusPerNode": 8}
    late = {"metadata": {"annotations": {LATE: "true"}}}
    plane.kubectl.apply(
        service("llama", namespace, replicas=2, hardware=hardware, podOverrides=late)
    )
    wait_ready(plane, "llama", namespace)
    budget = ("pdb", "llama", "-n", namespace)
    plane.kubectl.wait_for(*budget, that=lets_one_pod_go, what="allows one pod")

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
    wait_until(lambda: first not in sets(plane, namespace), "its group is replaced whole")
    seen = wait_ready(plane, "llama", namespace)
    assert second in sets(plane, namespace)
    assert sum(group["restarts"] for group in seen["status"]["groups"]) == 1
    plane.kubectl.wait_for(*budget, that=lets_one_pod_go, what="allows one again")
    evict(f"{second}-0")


def test_an_idle_service_sleeps_and_a_held_request_wakes_it(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    scaling = {"min": 0, "max": 2, "cooldown": "1s", "targets": {"queue": 4}}
    plane.kubectl.apply(service("llama", namespace, replicas=0, autoscaling=scaling))
    plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, that=lambda r: reason(r) == "Asleep", what="sleeps"
    )
    name = f"{namespace}.llama"
    wait_until(lambda: name in table(redis_server), "routers know it")
    entry = table(redis_server)[name]
    assert (entry.wakes, entry.desired) == (True, 0)

    def woken(resource: dict[str, Any]) -> bool:
        """A router says again and again what it holds: its word counts for some seconds."""
        now, _ = redis_server.client.time()  # type: ignore[misc]
        value = Demand(held=1, at_ms=int(now) * 1000).encode()
        redis_server.client.hset(ServiceKeys("radixgrove", name).demand, "router-1", value)
        return ready(resource) and resource["spec"]["replicas"] == 1

    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=woken, what="wakes")


def test_a_refused_pod_is_told_in_the_api_servers_words(
    plane: ControlPlane, operator: OperatorProcess, restricted: str
) -> None:
    plane.kubectl.apply(
        service("plain", restricted), service("rdma", restricted, hardware={"network": "roce"})
    )
    plane.kubectl.wait_for(RGSVC, "plain", "-n", restricted, that=ready, what="is restricted")
    plane.kubectl.wait_for(
        RGSVC, "rdma", "-n", restricted, what="is refused, and why",
        that=lambda r: reason(r) == "PodRefused" and "IPC_LOCK" in str(r["status"]["conditions"]),
    )  # fmt: skip


def test_a_bad_update_keeps_the_old_groups_and_a_rollback_heals(
    plane: ControlPlane, operator: OperatorProcess, restricted: str
) -> None:
    namespace = restricted
    rollout = {"maxUnavailable": 0, "maxSurge": 1}
    plane.kubectl.apply(service("llama", namespace, replicas=2, rollout=rollout))
    wait_ready(plane, "llama", namespace)
    before = sets(plane, namespace)
    plane.kubectl.patch(
        RGSVC,
        "llama",
        "-n",
        namespace,
        body={"spec": {"podOverrides": {"spec": {"securityContext": {"runAsUser": 0}}}}},
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
    wait_until(lambda: sets(plane, namespace) == before, "old groups alone")


def documented(command: str) -> str:
    """The command of docs/operator.md that begins so."""
    text = (ROOT / "docs" / "operator.md").read_text()
    (found, *_) = re.findall(rf"`(kubectl {re.escape(command)}[^`]*)`", text)
    return str(found)


def test_what_stands_for_kubectl_rollout_does_what_the_page_says(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace, replicas=2))
    wait_ready(plane, "llama", namespace)
    before = sets(plane, namespace)

    def typed(command: str) -> None:
        line = command.replace("NAME", "llama").removeprefix("kubectl")
        options = f"--kubeconfig={plane.kubectl.kubeconfig} -n {namespace}"
        typed_line = f"{plane.kubectl.program} {options}{line}"
        subprocess.run(["bash", "-c", typed_line], check=True, timeout=300)

    typed(documented("annotate rgsvc NAME serving.radixgrove.io/restart"))
    typed("kubectl wait rgsvc/NAME --for=condition=Progressing=true --timeout=60s")
    typed(documented("wait rgsvc/NAME --for=condition=Progressing=false"))
    typed(documented("wait rgsvc/NAME --for=condition=Degraded=false"))
    assert set(sets(plane, namespace)).isdisjoint(before)
    assert len(sets(plane, namespace)) == 2

"""The operator's own life: killed, stopped, stormed, at rest, and beside neighbours."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from radixgrove.operator.api import crd, names
from tests.cluster.harness.audit import Request
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kubectl import KubectlError
from tests.cluster.harness.kwok import LATE
from tests.cluster.harness.waiting import wait_until
from tests.conftest import RedisServer
from tests.operator.operator_process import (
    ACCOUNT,
    NAMESPACE,
    OperatorProcess,
    install,
    namespace_with_models,
)
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

CHILDREN = (
    "statefulsets,deployments,pods,services,configmaps,serviceaccounts,pdb,networkpolicies,jobs"
)


def user(home: str = NAMESPACE) -> str:
    return f"system:serviceaccount:{home}:{ACCOUNT}"


def writes(plane: ControlPlane, namespace: str) -> list[str]:
    """The operator's writes in a namespace since the last look."""
    return [
        f"{request.verb} {request.resource}/{request.name}"
        for request in plane.audit.read(user())
        if request.writes and request.namespace == namespace
    ]


def wait_for_rest(plane: ControlPlane, namespace: str) -> list[str]:
    """Until it has written nothing there for twice as long as it waits between looks at a start;
    what it wrote before."""
    last, wrote = time.monotonic(), list[str]()

    def rested() -> bool:
        nonlocal last
        new = writes(plane, namespace)
        wrote.extend(new)
        if new:
            last = time.monotonic()
        return time.monotonic() - last > 10.0

    wait_until(rested, "the operator is at rest", interval=1.0)
    return wrote


def children(plane: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    return plane.kubectl.items(CHILDREN, "-n", namespace, f"-l={names.MANAGED_BY}={names.MANAGER}")


# ---- killed --------------------------------------------------------------------------------------


def test_killed_while_scaling_it_converges_after_its_restart(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace, replicas=3))
    wait_until(lambda: sets(plane, namespace), "the first group")
    operator.kill()
    plane.kubectl.patch(RGSVC, "llama", "-n", namespace, body={"spec": {"replicas": 2}})
    operator.start()
    plane.kubectl.wait_for(
        RGSVC, "llama", "-n", namespace, that=lambda r: ready(r) and r["status"]["replicas"] == 2,
        what="has two groups",
    )  # fmt: skip
    wait_until(lambda: len(sets(plane, namespace)) == 2, "the third has gone")


def test_killed_while_rolling_it_ends_the_rollout_after_its_restart(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    rollout = {"maxUnavailable": 0, "maxSurge": 1}
    late = {"metadata": {"annotations": {LATE: "true"}}}
    plane.kubectl.apply(service("llama", namespace, replicas=2, rollout=rollout, podOverrides=late))
    wait_ready(plane, "llama", namespace)
    before = set(sets(plane, namespace))
    patch = {"spec": {"engine": {"pageSize": 32}}}
    plane.kubectl.patch(RGSVC, "llama", "-n", namespace, body=patch)
    wait_until(lambda: set(sets(plane, namespace)) - before, "the first new group")
    operator.kill()
    assert before & set(sets(plane, namespace)), "the rollout was not over yet"
    operator.start()
    wait_until(
        lambda: len(sets(plane, namespace)) == 2 and not before & set(sets(plane, namespace)),
        "only groups of the new revision are left",
    )
    wait_ready(plane, "llama", namespace)


def test_a_pod_replaced_while_it_was_dead_costs_the_whole_group(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    plane.kubectl.apply(service("big", namespace, hardware={"nodes": 2, "gpusPerNode": 8}))
    wait_ready(plane, "big", namespace)
    operator.kill()
    pod = ("pod", "big-0-a1-1", "-n", namespace)
    lost = plane.kubectl.json("get", *pod)["metadata"]["uid"]
    plane.kubectl.delete(*pod, "--grace-period=0", "--force")
    plane.kubectl.wait_for(
        *pod, what="stands again, as if nothing had happened",
        that=lambda p: p["metadata"]["uid"] != lost and p["status"].get("phase") == "Running",
    )  # fmt: skip
    operator.start()
    wait_until(lambda: sets(plane, namespace) == ["big-0-a2"], "the next attempt")
    seen = wait_ready(plane, "big", namespace)
    assert [group["restarts"] for group in seen["status"]["groups"]] == [1]
    wait_until(
        lambda: routable(redis_server, f"{namespace}.big") == ["big-0-a2-0"],
        "routers know the next",
    )


def test_a_service_deleted_while_it_was_dead_goes_at_once_and_routers_learn_of_it_later(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace, router={"dedicated": True}))
    plane.kubectl.apply(service("shared", namespace))
    for name in ("llama", "shared"):
        wait_ready(plane, name, namespace)
    wait_until(lambda: f"{namespace}.shared" in table(redis_server), "routers know it")
    operator.kill()
    for name in ("llama", "shared"):
        plane.kubectl.delete(RGSVC, name, "-n", namespace)
    wait_until(lambda: children(plane, namespace) == [], "nothing is left")
    assert f"{namespace}.shared" in table(redis_server)
    operator.start()
    wait_until(lambda: f"{namespace}.shared" not in table(redis_server), "routers forget it")


# ---- storms --------------------------------------------------------------------------------------


def test_a_storm_of_patches_ends_in_what_the_last_one_says(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace))
    for turn in range(40):
        spec = {"replicas": turn % 4, "engine": {"pageSize": 16 << turn % 3}}
        plane.kubectl.patch(RGSVC, "llama", "-n", namespace, body={"spec": spec})
    last = {"spec": {"replicas": 2, "engine": {"pageSize": 32}}}
    plane.kubectl.patch(RGSVC, "llama", "-n", namespace, body=last)

    def settled(resource: dict[str, Any]) -> bool:
        status = resource.get("status", {})
        return (
            ready(resource)
            and status["observedGeneration"] == resource["metadata"]["generation"]
            and status["updatedReplicas"] == len(status["groups"]) == 2
        )

    plane.kubectl.wait_for(RGSVC, "llama", "-n", namespace, that=settled, what="settles")
    wait_until(lambda: len(sets(plane, namespace)) == 2, "old groups are gone")

    def leaked() -> list[str]:
        """What belongs to a group or a revision that is no more."""
        found = children(plane, namespace)
        groups = [thing for thing in found if names.ATTEMPT in thing["metadata"]["labels"]]
        live = set(sets(plane, namespace))
        return [
            f"{thing['kind']}/{thing['metadata']['name']}"
            for thing in groups
            if not any(thing["metadata"]["name"].startswith(name) for name in live)
        ]

    wait_until(lambda: leaked() == [], "nothing of old groups is left")
    wait_until(
        lambda: len(plane.kubectl.items("configmaps", "-n", namespace, f"-l={names.SERVICE}=llama"))
        == 1,
        "one revision is left",
    )  # fmt: skip


def test_deleted_twice_and_made_again_it_is_served_by_children_of_the_new_one(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str
) -> None:
    ours = service("llama", namespace, replicas=2)
    for _ in range(3):
        plane.kubectl.apply(ours)
        wait_until(lambda: sets(plane, namespace), "a first group")
        for _ in range(2):
            plane.kubectl.delete(RGSVC, "llama", "-n", namespace, wait=False)
    plane.kubectl.apply(ours)
    seen = wait_ready(plane, "llama", namespace)

    def owners() -> set[str]:
        owned = plane.kubectl.items("statefulsets,pdb,configmaps", "-n", namespace,
                                    f"-l={names.SERVICE}=llama")  # fmt: skip
        return {owner["uid"] for o in owned for owner in o["metadata"]["ownerReferences"]}

    wait_until(lambda: owners() == {seen["metadata"]["uid"]}, "only its own are left")
    wait_until(
        lambda: len(routable(redis_server, f"{namespace}.llama")) == 2,
        "routers know two groups",
    )  # fmt: skip


# ---- at rest -------------------------------------------------------------------------------------


def test_at_rest_services_of_every_kind_cost_no_write(
    plane: ControlPlane, operator: OperatorProcess, restricted: str
) -> None:
    namespace = restricted
    scaling = {"min": 1, "max": 2, "targets": {"queue": 4}}
    expected = {
        "plain": "Serving",
        "routed": "Serving",
        "scaled": "Serving",
        "suspended": "Suspended",
        "refused": "PodRefused",
        "starved": "InsufficientGPUs",
    }
    plane.kubectl.apply(
        service("plain", namespace, replicas=2),
        service("routed", namespace, router={"dedicated": True}),
        service("scaled", namespace, autoscaling=scaling),
        service("suspended", namespace, suspend=True),
        service("refused", namespace, hardware={"network": "roce"}),
        service("starved", namespace, hardware={"gpusPerNode": 16}),
    )

    def reasons() -> dict[str, str]:
        found = plane.kubectl.items(RGSVC, "-n", namespace)
        return {item["metadata"]["name"]: reason(item) for item in found}

    wait_until(lambda: reasons() == expected, "all say how they stand", interval=1.0)
    wait_for_rest(plane, namespace)
    assert reasons() == expected


def test_a_bystanders_write_costs_at_most_one_of_ours(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace))
    wait_ready(plane, "llama", namespace)
    wait_for_rest(plane, namespace)
    plane.kubectl.patch("pdb", "llama", "-n", namespace, body={"spec": {"minAvailable": 7}})
    plane.kubectl.wait_for(
        "pdb", "llama", "-n", namespace, what="is restored",
        that=lambda b: b["spec"]["minAvailable"] == 0,
    )  # fmt: skip
    plane.kubectl.delete("networkpolicy", "llama-workers", "-n", namespace)
    plane.kubectl.wait_for(
        "networkpolicy", "llama-workers", "-n", namespace, that=bool, what="is restored"
    )
    wrote = wait_for_rest(plane, namespace)
    assert len(wrote) == 2, wrote


def nudge(plane: ControlPlane, name: str, namespace: str) -> None:
    """Something that changes nothing, and makes the operator look."""
    mark = f"nudged={time.monotonic_ns()}"
    plane.kubectl.run("annotate", RGSVC, name, "-n", namespace, mark, "--overwrite")


def writes_of_two_looks(plane: ControlPlane, name: str, namespace: str) -> list[str]:
    """One thread at a time looks at a service: where a look begins, the last one has ended."""
    wrote = []
    for _ in range(3):
        nudge(plane, name, namespace)
        seen = list[Request]()

        def looked(seen: list[Request] = seen) -> bool:
            seen += plane.audit.read(user())
            return any(r.verb == "get" and r.resource.endswith(names.PLURAL) for r in seen)

        wait_until(looked, "the operator looks")
        wrote += [f"{r.verb} {r.resource}" for r in seen if r.writes and r.namespace == namespace]
    return wrote


def test_under_an_older_crd_it_says_so_writes_nothing_at_rest_and_notices_the_new_one(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace))
    wait_ready(plane, "llama", namespace)
    status = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties"
    older = [{"op": "remove", "path": f"{status}/{name}"} for name in ("summary", "served")]
    crd_name = f"{names.PLURAL}.{names.GROUP}"

    def published() -> str:
        found = json.loads(plane.kubectl.run("get", "--raw", "/openapi/v3"))
        return str(found["paths"][f"apis/{names.API_VERSION}"])

    before = published()
    try:
        plane.kubectl.run("patch", "crd", crd_name, "--type=json", f"--patch={json.dumps(older)}")
        wait_until(lambda: published() != before, "the older schema is published")
        plane.kubectl.run("scale", RGSVC, "llama", "-n", namespace, "--replicas=2")
        seen = plane.kubectl.wait_for(
            RGSVC, "llama", "-n", namespace, what="is reported",
            that=lambda r: ready(r) and reason(r, "Degraded") == "OutdatedCRD",
        )  # fmt: skip
        assert "summary" not in seen["status"]
        assert "drops status.served, status.summary" in str(seen["status"]["conditions"])
        wait_for_rest(plane, namespace)
        assert writes_of_two_looks(plane, "llama", namespace) == []
    finally:
        plane.kubectl.apply(crd.custom_resource_definition())

    def renewed() -> bool:
        nudge(plane, "llama", namespace)
        seen = plane.kubectl.json("get", RGSVC, "llama", "-n", namespace)
        return reason(seen, "Degraded") == "AsExpected" and seen["status"]["summary"] == "2/2"

    wait_until(renewed, "the status is whole", interval=1.0)


def test_a_secret_of_keys_that_somebody_deleted_comes_back_as_it_was(
    plane: ControlPlane, operator: OperatorProcess, namespace: str
) -> None:
    plane.kubectl.apply(service("llama", namespace))
    wait_ready(plane, "llama", namespace)
    secret = ("secret", "radixgrove-keys", "-n", NAMESPACE)
    before = plane.kubectl.json("get", *secret)["data"]
    plane.kubectl.delete(*secret)
    after = plane.kubectl.wait_for(*secret, that=bool, what="is there again")
    assert after["data"] == before
    assert sets(plane, namespace) == ["llama-0-a1"]


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
    crd_name = "inferenceservices.serving.kserve.io"
    try:
        plane.kubectl.wait_established(crd_name)
        theirs = service("theirs", namespace) | {"apiVersion": "serving.kserve.io/v1beta1"}
        wait_until(lambda: _applies(plane, theirs), "theirs is admitted")
        plane.kubectl.apply(service("ours", namespace))
        plane.kubectl.wait_for("rgsvc", "ours", "-n", namespace, that=ready, what="is ready")
        assert "theirs" not in plane.kubectl.run("get", "rgsvc", "-n", namespace)
        assert "theirs" in plane.kubectl.run("get", "isvc", "-n", namespace)
        assert sets(plane, namespace) == ["ours-0-a1"]
    finally:
        plane.kubectl.delete("crd", "inferenceservices.serving.kserve.io")


def _applies(plane: ControlPlane, manifest: dict[str, Any]) -> bool:
    try:
        plane.kubectl.apply(manifest)
    except KubectlError:
        return False
    return True


def test_a_leader_stopped_past_its_lease_writes_nothing_when_it_continues(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    plane.kubectl.apply(service("llama", namespace))
    wait_ready(plane, "llama", namespace)
    # Nothing takes back a request that is half sent when its sender is stopped.
    wait_for_rest(plane, namespace)
    operator.signal(signal.SIGSTOP)
    second = OperatorProcess(plane, tmp_path, redis_server.port)
    second.start()
    try:
        wait_until(lambda: '"leading"' in second.log.read_text(), "the second leads")
        log_before = len(operator.log.read_text())
        plane.kubectl.run("scale", RGSVC, "llama", "-n", namespace, "--replicas=2")
        plane.kubectl.wait_for(
            RGSVC, "llama", "-n", namespace, what="is scaled by the second",
            that=lambda r: ready(r) and r["status"]["replicas"] == 2,
        )  # fmt: skip
        wait_for_rest(plane, namespace)
        operator.signal(signal.SIGCONT)
        assert operator.process is not None
        assert operator.process.wait(120) == 1
        operator.process = None
        assert "the lease was lost" in operator.log.read_text()[log_before:]
        assert writes(plane, namespace) == []
        assert len(sets(plane, namespace)) == 2
    finally:
        second.stop()


def test_namespaced_mode_sees_only_its_namespace(
    plane: ControlPlane, no_operator: None, redis_server: RedisServer, namespace: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    home, other = f"{namespace}-home", f"{namespace}-other"
    install(plane, [namespace], home)
    plane.kubectl.run("create", "namespace", other)
    plane.audit.read()
    operator = OperatorProcess(plane, tmp_path, redis_server.port, [namespace], home=home)
    operator.start()
    try:
        plane.kubectl.apply(service("unseen", other), service("seen", namespace))
        wait_ready(plane, "seen", namespace)
        assert sets(plane, other) == []
        assert "status" not in plane.kubectl.json("get", RGSVC, "unseen", "-n", other)
    finally:
        operator.stop()
        for made in (home, other):
            plane.kubectl.run("delete", "namespace", made, "--wait=false")
    asked = plane.audit.read(user(home))
    assert _across_the_cluster(asked) == {"nodes"}
    assert {request.namespace for request in asked} == {"", namespace, home}
    assert [request for request in asked if request.code == 403] == []


def test_a_name_that_a_team_gives_up_goes_to_no_namesake_before_its_time(
    plane: ControlPlane, no_operator: None, redis_server: RedisServer, namespace: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Deleted and applied again, a service finds its name, and its clients' prompts, its own."""
    home, rival = f"{namespace}-home", f"{namespace}-rival"
    plane.kubectl.apply(*namespace_with_models(rival))
    install(plane, [namespace, rival], home)
    name = f"Llama-{namespace}"
    wanted = {"model": {"source": "pvc://models/demo", "name": name}}
    operator = OperatorProcess(
        plane, tmp_path, redis_server.port, [namespace, rival], {"name_hold": 3600.0}, home
    )

    def names_of(team: str) -> list[str]:
        entry = table(redis_server).get(f"{team}.llama")
        return entry.names if entry else []

    operator.start()
    try:
        plane.kubectl.apply(service("llama", namespace, **wanted))
        wait_ready(plane, "llama", namespace)
        plane.kubectl.apply(service("llama", rival, **wanted))
        assert reason(wait_ready(plane, "llama", rival), "Degraded") == "ModelNameTaken"
        plane.kubectl.delete(RGSVC, "llama", "-n", namespace)
        wait_until(lambda: not names_of(namespace), "routers forget the service")
        operator.stop()
        operator.start()
        plane.kubectl.patch(RGSVC, "llama", "-n", rival, body={"spec": {"replicas": 2}})
        wait_ready(plane, "llama", rival)
        assert names_of(rival) == [f"{rival}/{name}"]
        plane.kubectl.apply(service("llama", namespace, **wanted))
        wait_ready(plane, "llama", namespace)
        assert names_of(namespace) == [name]
        # Where names are kept for no time, the rival has it as soon as it is given up.
        operator.stop()
        operator.settings["name_hold"] = 0.0
        operator.start()
        plane.kubectl.delete(RGSVC, "llama", "-n", namespace)
        wait_until(lambda: names_of(rival) == [name], "the rival has the name")
    finally:
        operator.stop()
        for made in (home, rival):
            plane.kubectl.run("delete", "namespace", made, "--wait=false")
        plane.kubectl.run("delete", "persistentvolume", rival, "--wait=false")


def test_a_second_installation_leaves_alone_what_the_first_looks_after_and_says_so(
    plane: ControlPlane, operator: OperatorProcess, redis_server: RedisServer, namespace: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    plane.kubectl.apply(service("llama", namespace))
    wait_ready(plane, "llama", namespace)
    home = f"{namespace}-home"
    install(plane, [namespace], home)
    plane.audit.read()
    redis_url = f"redis://127.0.0.1:{redis_server.port}/1"
    second = OperatorProcess(
        plane, tmp_path, redis_server.port, [namespace], {"redis": {"url": redis_url}}, home
    )
    second.start()

    def reasons() -> set[str]:
        return {event["reason"] for event in plane.kubectl.items("events", "-n", namespace)}

    try:
        wait_until(lambda: "ServedElsewhere" in reasons(), "the second says so", interval=1.0)
    finally:
        second.stop()
        plane.kubectl.run("delete", "namespace", home, "--wait=false")
    asked = plane.audit.read(user(home))
    assert {r.resource for r in asked if r.writes and r.namespace == namespace} == {"events"}
    assert [request for request in asked if request.code == 403] == []
    assert f"{NAMESPACE}/radixgrove-operator" in second.log.read_text(), "it names the owner"
    assert routable(redis_server, f"{namespace}.llama") == ["llama-0-a1-0"]


def test_a_service_is_taken_over_from_an_installation_that_died(
    plane: ControlPlane, no_operator: None, shared_operator: OperatorProcess,
    redis_server: RedisServer, namespace: str, tmp_path: Path,
) -> None:  # fmt: skip
    home = f"{namespace}-home"
    install(plane, [namespace], home)
    settings = {
        "redis": {"url": f"redis://127.0.0.1:{redis_server.port}/1"},
        "election": {"duration": 3.0, "renew_every": 0.5},
    }
    first = OperatorProcess(plane, tmp_path, redis_server.port, [namespace], settings, home)
    first.start()
    try:
        plane.kubectl.apply(service("llama", namespace))
        seen = wait_ready(plane, "llama", namespace)
        assert seen["status"]["operator"] == f"{home}/radixgrove-operator"
    finally:
        first.kill()  # its lease stays
    shared_operator.start()

    def taken() -> bool:
        nudge(plane, "llama", namespace)  # left alone, it would look again in a minute
        seen = plane.kubectl.json("get", RGSVC, "llama", "-n", namespace)
        return bool(seen["status"]["operator"] == f"{NAMESPACE}/radixgrove-operator")

    try:
        wait_until(taken, "the second installation takes it", interval=1.0)
        # Its keys and its Redis are others: groups that know the dead one's are replaced.
        wait_until(lambda: sets(plane, namespace) == ["llama-0-a2"], "the next attempt")
        wait_ready(plane, "llama", namespace)
        wait_until(
            lambda: routable(redis_server, f"{namespace}.llama") == ["llama-0-a2-0"],
            "routers know it",
        )
    finally:
        plane.kubectl.run("delete", "namespace", home, "--wait=false")


def _across_the_cluster(requests: Iterable[Request]) -> set[str]:
    return {request.resource for request in requests if not request.namespace}

"""Each verb of the operator's table is needed, is missed in words, and heals when given back."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_process import NAMESPACE, OperatorProcess, RedisServer, roles

from radixgrove.operator import names, rbac
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kubectl import condition
from tests.cluster.harness.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RGSVC = f"{names.PLURAL}.{names.GROUP}"
COMMIT = "c" * 40

# The owner's Deployment is the chart's; leases have their own test below; in cluster mode the
# rights in served namespaces include those to the operator's own Secret.
CASES = [
    (permission, verb)
    for permission, verb in rbac.single_verbs()
    if rbac.OWNER not in permission.names
    and permission.resource != "leases"
    and (permission.scope, permission.resource) != (rbac.Scope.OWN, "secrets")
]


@contextlib.contextmanager
def without(plane: ControlPlane, missing: rbac.Permission, verb: str) -> Iterator[None]:
    """The roles without one verb of one permission, in every namespace; as before afterwards."""
    table = list(rbac.PERMISSIONS)

    def reduced(permission: rbac.Permission) -> rbac.Permission:
        if permission != missing:
            return permission
        verbs = tuple(v for v in permission.verbs if v != verb)
        return dataclasses.replace(permission, verbs=verbs)

    rbac.PERMISSIONS[:] = [p for p in map(reduced, table) if p.verbs]
    try:
        plane.kubectl.apply(*roles([]))
    finally:
        rbac.PERMISSIONS[:] = table
    try:
        yield
    finally:
        plane.kubectl.apply(*roles([]))


def resource(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"source": "pvc://models/demo"}} | spec,
    }


def provoke(plane: ControlPlane, namespace: str) -> None:
    """Everything an operator does, in a few services."""
    kubectl = plane.kubectl
    sleepy = {"min": 0, "max": 2, "cooldown": "1s"}
    kubectl.apply(
        resource("served", namespace, router={"dedicated": True}),
        resource("fetched", namespace, model={"source": "hf://org/model", "revision": COMMIT}),
        resource("looked-up", namespace, model={"source": "hf://org/model"}),
        resource("scaled", namespace, autoscaling=sleepy | {"min": 2}),
        # Admitted by no namespace that enforces the restricted standard.
        resource("refused", namespace, podOverrides={"spec": {"hostNetwork": True}}),
    )


def change(plane: ControlPlane, namespace: str) -> None:
    """What makes it delete: a router that is not wanted, an old revision, a failed Job, groups."""
    body = {"spec": {"router": {"dedicated": False}, "engine": {"pageSize": 32}}}
    plane.kubectl.patch(RGSVC, "served", "-n", namespace, body=body)
    for job in plane.kubectl.items("jobs", "-n", namespace):
        name = job["metadata"]["name"]
        plane.kubectl.patch(
            "job", name, "-n", namespace, body={"spec": {"activeDeadlineSeconds": 1}}
        )


@pytest.fixture
def guarded_namespace(plane: ControlPlane, namespace: str) -> str:
    plane.kubectl.run(
        "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted"
    )
    return namespace


@pytest.mark.parametrize(
    ("permission", "verb"), CASES, ids=[f"{p.scope}-{p.resource}-{v}" for p, v in CASES]
)
def test_a_missing_verb_is_named_and_heals_when_given_back(
    plane: ControlPlane,
    redis_server: RedisServer,
    guarded_namespace: str,
    tmp_path: Path,
    permission: rbac.Permission,
    verb: str,
) -> None:
    plane.kubectl.delete("secret", "radixgrove-keys", "-n", NAMESPACE)
    operator = OperatorProcess(plane, tmp_path, redis_server.port)
    words = re.compile(rf'cannot {verb} resource \\*"{permission.resource}\\*"')

    def said() -> bool:
        status = str([r.get("status") for r in plane.kubectl.items(RGSVC, "-n", guarded_namespace)])
        return bool(words.search(operator.log.read_text()) or words.search(status))

    def served() -> bool:
        found = plane.kubectl.get(RGSVC, "served", "-n", guarded_namespace)
        return found is not None and condition(found, "Ready") == "True"

    try:
        with without(plane, permission, verb):
            operator.start()
            provoke(plane, guarded_namespace)
            if verb == "delete":
                wait_until(served, "it serves without that verb", timeout=60)
                change(plane, guarded_namespace)
            wait_until(said, f"{verb} of {permission.resource} is missed", timeout=120)
        wait_until(served, "it serves once the verb is back", timeout=90)
        assert operator.process is not None
        assert operator.process.poll() is None, "without a restart"
    finally:
        operator.kill()


@pytest.mark.parametrize("verb", ["get", "create", "update"])
def test_without_its_lease_it_says_so_and_leads_when_it_may(
    plane: ControlPlane, redis_server: RedisServer, tmp_path: Path, verb: str
) -> None:
    plane.kubectl.delete("lease", "radixgrove-operator", "-n", NAMESPACE)
    permission = next(p for p in rbac.PERMISSIONS if p.resource == "leases" and verb in p.verbs)
    operator = OperatorProcess(plane, tmp_path, redis_server.port)
    try:
        with without(plane, permission, verb):
            operator.start()
            if verb == "update":
                wait_until(lambda: '"leading"' in operator.log.read_text(), "leads", timeout=30)
            wait_until(
                lambda: "cannot renew the lease" in operator.log.read_text(), "says so", timeout=30
            )
        if verb != "update":
            wait_until(lambda: '"leading"' in operator.log.read_text(), "leads", timeout=60)
    finally:
        operator.kill()

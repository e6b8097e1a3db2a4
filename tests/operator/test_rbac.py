"""Each verb of the operator's table is needed, is missed in words, and heals when given back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from operator_process import (
    NAMESPACE,
    REPLACEMENTS,
    OperatorProcess,
    RedisServer,
    install,
    namespace_with_models,
    roles,
)

from radixgrove.operator import names, rbac
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kubectl import condition
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

RGSVC = f"{names.PLURAL}.{names.GROUP}"
COMMIT = "c" * 40
# Cases that run side by side, each an operator with a namespace and an account of its own: they
# mostly wait. Every one has a database of the same Redis.
_AT_ONCE = 4

Case = tuple[rbac.Permission, str]

# The owner's Deployment is the chart's; leases have their own test below.
CASES = [
    (permission, verb)
    for permission, verb in rbac.single_verbs()
    if rbac.OWNER not in permission.names and permission.resource != "leases"
]


def without(missing: rbac.Permission, verb: str) -> list[rbac.Permission]:
    """The table without one verb of one permission."""

    def reduced(permission: rbac.Permission) -> rbac.Permission:
        if permission != missing:
            return permission
        verbs = tuple(v for v in permission.verbs if v != verb)
        return dataclasses.replace(permission, verbs=verbs)

    return [p for p in map(reduced, rbac.PERMISSIONS) if p.verbs]


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


@dataclasses.dataclass(frozen=True)
class Trial:
    """An operator in namespaced mode, with one verb less at first."""

    plane: ControlPlane
    operator: OperatorProcess
    served_namespace: str
    permission: rbac.Permission
    verb: str

    def run(self) -> None:
        words = re.compile(rf'cannot {self.verb} resource \\*"{self.permission.resource}\\*"')

        def said() -> bool:
            return bool(words.search(self.operator.log.read_text())) or bool(
                words.search(str([r.get("status") for r in self._services()]))
            )

        self._grant(without(self.permission, self.verb))
        try:
            self.operator.start()
            provoke(self.plane, self.served_namespace)
            if self.verb == "delete":
                self._wait(self._serves, "it serves without that verb")
                change(self.plane, self.served_namespace)
            self._wait(said, f"{self.verb} of {self.permission.resource} is missed")
            self._grant(rbac.PERMISSIONS)
            self._wait(self._serves, "it serves once the verb is back")
            assert self.operator.process is not None
            assert self.operator.process.poll() is None, "without a restart"
        finally:
            self.operator.kill()

    def _grant(self, permissions: Sequence[rbac.Permission]) -> None:
        self.plane.kubectl.apply(*roles([self.served_namespace], self.operator.home, permissions))

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        # Several cases look at once, and a look costs a kubectl.
        wait_until(condition, what, timeout=180, interval=1.5)

    def _services(self) -> list[Any]:
        return self.plane.kubectl.items(RGSVC, "-n", self.served_namespace)

    def _serves(self) -> bool:
        found = self.plane.kubectl.get(RGSVC, "served", "-n", self.served_namespace)
        return found is not None and condition(found, "Ready") == "True"


def _prepare(plane: ControlPlane, directory: Path, redis_port: int, number: int) -> OperatorProcess:
    """Namespaces, account and operator (not started) of case `number`."""
    home, served = f"home-{number}", f"served-{number}"
    install(plane, [served], home)
    plane.kubectl.apply(*namespace_with_models(served))
    plane.kubectl.run("label", "namespace", served, "pod-security.kubernetes.io/enforce=restricted")
    own = directory / home
    own.mkdir()
    redis_url = f"redis://127.0.0.1:{redis_port}/{number % 16}"
    return OperatorProcess(plane, own, redis_port, [served], {"redis": {"url": redis_url}}, home)


def _incomplete_keys(namespace: str) -> dict[str, Any]:
    """A user's own Secret that lacks what the operator then adds."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": REPLACEMENTS[rbac.KEYS_SECRET], "namespace": namespace},
    }


@pytest.fixture(scope="module")
def outcomes(
    plane: ControlPlane, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Case, Future[None]]]:
    """Of the selected cases, which run side by side while their tests wait for them in turn."""
    chosen = [
        CASES[item.callspec.params["number"]]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == _TEST
    ]
    directory = tmp_path_factory.mktemp("rbac")
    with RedisServer(directory) as server, ThreadPoolExecutor(_AT_ONCE) as pool:

        def run(case: Case) -> None:
            number = CASES.index(case)
            operator = _prepare(plane, directory, server.port, number)
            permission, verb = case
            if (permission.scope, permission.resource, verb) == (
                rbac.Scope.OWN,
                "secrets",
                "patch",
            ):
                plane.kubectl.apply(_incomplete_keys(operator.home))
            Trial(plane, operator, f"served-{number}", *case).run()
            for namespace in (f"served-{number}", operator.home):
                plane.kubectl.delete("namespace", namespace, wait=False)

        try:
            yield {case: pool.submit(run, case) for case in chosen}
        finally:
            pool.shutdown(cancel_futures=True)


_TEST = "test_a_missing_verb_is_named_and_heals_when_given_back"


@pytest.mark.timeout(900)  # the first waits for the whole queue's start
@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=[f"{p.scope}-{p.resource}-{v}" for p, v in CASES]
)
def test_a_missing_verb_is_named_and_heals_when_given_back(
    outcomes: dict[Case, Future[None]], number: int
) -> None:
    outcomes[CASES[number]].result(timeout=800)


@pytest.mark.parametrize("verb", ["get", "create", "update"])
def test_without_its_lease_it_says_so_and_leads_when_it_may(
    plane: ControlPlane, redis_server: RedisServer, tmp_path: Path, verb: str
) -> None:
    plane.kubectl.delete("lease", "radixgrove-operator", "-n", NAMESPACE)
    permission = next(p for p in rbac.PERMISSIONS if p.resource == "leases" and verb in p.verbs)
    operator = OperatorProcess(plane, tmp_path, redis_server.port)
    try:
        plane.kubectl.apply(*roles([], permissions=without(permission, verb)))
        operator.start()
        if verb == "update":
            wait_until(lambda: '"leading"' in operator.log.read_text(), "leads", timeout=30)
        wait_until(
            lambda: "cannot renew the lease" in operator.log.read_text(), "says so", timeout=60
        )
        plane.kubectl.apply(*roles([]))
        if verb != "update":
            wait_until(lambda: '"leading"' in operator.log.read_text(), "leads", timeout=60)
    finally:
        plane.kubectl.apply(*roles([]))
        operator.kill()

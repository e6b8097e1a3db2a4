"""Each verb of the operator's table is needed, is missed in words, and heals when given back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from _pytest.mark import ParameterSet

from radixgrove.operator.api import names
from radixgrove.operator.kube import rbac
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kubectl import Kubectl, KubectlError, condition
from tests.cluster.harness.waiting import wait_until
from tests.conftest import RedisServer
from tests.operator.operator_process import (
    ACCOUNT,
    NAMESPACE,
    REPLACEMENTS,
    OperatorProcess,
    account,
    namespace_with_models,
    policies,
    roles,
)
from tests.operator.resources import RGSVC, service

pytestmark = pytest.mark.cluster

COMMIT = "c" * 40
ROOT = {"runAsNonRoot": False, "runAsUser": 0}
# Cases that run side by side, each an operator with a namespace and an account of its own: they
# mostly wait. Every one has a database of the same Redis.
_AT_ONCE = 4

Case = tuple[rbac.Permission, str]

# The owner's Deployment is the chart's; leases have their own test below.
CASES = [
    (permission, verb)
    for permission in rbac.PERMISSIONS
    for verb in permission.verbs
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


def provoke(plane: ControlPlane, namespace: str, needed: str) -> None:
    """Services that make the operator do everything, or all that it does with one resource."""
    fetched = [
        service("fetched", namespace, model={"source": "hf://org/model", "revision": COMMIT}),
        service("looked-up", namespace, model={"source": "hf://org/model"}),
    ]
    scaling = {"min": 2, "max": 2, "cooldown": "1s"}
    others = {
        # Names of services with a router of their own are kept nowhere.
        "configmaps": [service("shared", namespace)],
        "jobs": fetched,
        "persistentvolumeclaims": fetched,
        "namespaces": [
            service("slashed", namespace, model={"source": "pvc://models/x", "name": "org/model"})
        ],
        "inferenceservices/scale": [service("scaled", namespace, autoscaling=scaling)],
        # Admitted by no namespace that enforces the restricted standard.
        "events": [service("refused", namespace, podOverrides={"spec": {"securityContext": ROOT}})],
    }
    served = service("served", namespace, router={"dedicated": True, "autoscaling": {"max": 4}})
    plane.kubectl.apply(served, *others.get(needed, []))


def change(plane: ControlPlane, namespace: str, needed: str) -> None:
    """What makes it delete: a router that is not wanted, an old revision, a failed Job, groups."""
    shared = {"dedicated": False, "autoscaling": None}
    body = {"spec": {"router": shared, "engine": {"pageSize": 32}}}
    plane.kubectl.patch(RGSVC, "served", "-n", namespace, body=body)
    if needed != "jobs":
        return
    jobs = wait_until(lambda: plane.kubectl.items("jobs", "-n", namespace), "there is a Job")
    body = {"spec": {"activeDeadlineSeconds": 1}}
    for job in jobs:
        plane.kubectl.patch("job", job["metadata"]["name"], "-n", namespace, body=body)


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

        def named() -> bool:
            return bool(words.search(str([r.get("status") for r in self._services()])))

        def said() -> bool:
            return bool(words.search(self.operator.log.read_text())) or named()

        self._grant(without(self.permission, self.verb))
        try:
            self.operator.start()
            provoke(self.plane, self.served_namespace, self.permission.resource)
            if self.verb == "delete":
                self._wait(self._serves, "it serves without that verb")
                change(self.plane, self.served_namespace, self.permission.resource)
            self._wait(said, f"{self.verb} of {self.permission.resource} is missed")
            self._grant(rbac.PERMISSIONS)
            self._wait(lambda: self._serves() and not named(), "it serves and complains no more")
            assert self.operator.process is not None
            assert self.operator.process.poll() is None, "without a restart"
        finally:
            self.operator.kill()

    def _grant(self, permissions: Sequence[rbac.Permission]) -> None:
        self.plane.kubectl.apply(*roles([self.served_namespace], self.operator.home, permissions))

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        # Several cases look at once, and a look costs a kubectl.
        wait_until(condition, what, timeout=300, interval=1.5)

    def _services(self) -> list[Any]:
        return self.plane.kubectl.items(RGSVC, "-n", self.served_namespace)

    def _serves(self) -> bool:
        found = self.plane.kubectl.get(RGSVC, "served", "-n", self.served_namespace)
        return found is not None and condition(found, "Ready") == "True"


def _prepare(plane: ControlPlane, directory: Path, redis_port: int, number: int) -> OperatorProcess:
    """Namespaces, account and operator (not started) of case `number`."""
    home, served = f"home-{number}", f"served-{number}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.kubectl.apply(*account(home), *policies(home), *namespace_with_models(served, labels))
    own = directory / home
    own.mkdir()
    settings = {
        "redis": {
            "url": f"redis://127.0.0.1:{redis_port}/{number % 16}",
            "labels": {"app.kubernetes.io/component": "redis"},
            "prefix": f"rg{number}",  # users are those of the whole server
        },
        "model_cache": {"retry_after": 1.0},
    }
    return OperatorProcess(plane, own, redis_port, [served], settings, home)


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
            # The namespaces stay: to delete them costs the control plane more than a case does.
            plane.kubectl.delete(RGSVC, "--all", "-n", f"served-{number}", wait=False)

        try:
            yield {case: pool.submit(run, case) for case in chosen}
        finally:
            pool.shutdown(cancel_futures=True)


_TEST = "test_a_missing_verb_is_named_and_heals_when_given_back"


def _numbers() -> list[ParameterSet]:
    """All cases; the first of each kind of verb runs every time, the others with the slow tests."""
    usual: set[str] = set()
    found = []
    for number, (permission, verb) in enumerate(CASES):
        marks = [pytest.mark.slow] if verb in usual else []
        usual.add(verb)
        name = f"{permission.scope}-{permission.resource}-{verb}"
        found.append(pytest.param(number, id=name, marks=marks))
    return found


@pytest.mark.parametrize("number", _numbers())
def test_a_missing_verb_is_named_and_heals_when_given_back(
    outcomes: dict[Case, Future[None]], number: int
) -> None:
    outcomes[CASES[number]].result(timeout=1200)


@pytest.mark.parametrize("verb", ["get", "create", "update"])
def test_without_its_lease_it_says_so_and_leads_when_it_may(
    plane: ControlPlane, redis_server: RedisServer, tmp_path: Path, verb: str
) -> None:
    plane.kubectl.delete("lease", "radixgrove-operator", "-n", NAMESPACE)
    # Other operators' leases may be read too: with that right alone, it reads its own.
    permissions = [
        dataclasses.replace(p, verbs=tuple(v for v in p.verbs if v != verb))
        if p.resource == "leases"
        else p
        for p in rbac.PERMISSIONS
    ]
    operator = OperatorProcess(plane, tmp_path, redis_server.port)
    try:
        plane.kubectl.apply(*roles([], permissions=[p for p in permissions if p.verbs]))
        operator.start()
        if verb == "update":
            wait_until(lambda: '"leading"' in operator.log.read_text(), "leads")
        wait_until(lambda: "cannot renew the lease" in operator.log.read_text(), "says so")
        plane.kubectl.apply(*roles([]))
        if verb != "update":
            wait_until(lambda: '"leading"' in operator.log.read_text(), "leads")
    finally:
        plane.kubectl.apply(*roles([]))
        operator.kill()


# ---- what its rights would allow, and the admission policies refuse ------------------------------

_TOKEN = {"kubernetes.io/service-account.name": "default"}
_PROJECTED = {"sources": [{"serviceAccountToken": {"path": "token"}}]}


def _object(kind: str, version: str = "v1", name: str = "made", **fields: Any) -> dict[str, Any]:
    labels = {names.MANAGED_BY: names.MANAGER}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
        **fields,
    }


def _secret(name: str, kind: str = "Opaque") -> dict[str, Any]:
    made = _object("Secret", name=name, type=kind)
    if kind != "Opaque":
        made["metadata"]["annotations"] = _TOKEN
    return made


def _deployment(**spec: Any) -> dict[str, Any]:
    labels = {names.SERVICE: "llama"}
    pod = {
        "serviceAccountName": "llama",
        "automountServiceAccountToken": False,
        "containers": [{"name": "worker", "image": "x"}],
    }
    template = {"metadata": {"labels": labels}, "spec": pod | spec}
    wanted = {"selector": {"matchLabels": labels}, "template": template}
    return _object("Deployment", "apps/v1", spec=wanted)


def _adding(*capabilities: str) -> dict[str, Any]:
    added = {"capabilities": {"add": list(capabilities)}}
    return {"name": "x", "image": "x", "securityContext": added}


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (_secret("radixgrove-keys"), ""),
        (
            _secret("radixgrove-keys", "kubernetes.io/service-account-token"),
            "writes Opaque Secrets",
        ),
        (_secret("other"), "writes Opaque Secrets"),
        (_deployment(), ""),
        (_deployment(serviceAccountName="reader"), ""),
        (_deployment(serviceAccountName="admin"), "run as the service account"),
        (_deployment(serviceAccountName=None), "run as the service account"),
        (_deployment(automountServiceAccountToken=True), "no token"),
        (_deployment(volumes=[{"name": "token", "projected": _PROJECTED}]), "no token"),
        (_deployment(hostNetwork=True), "no namespace of their node"),
        (_deployment(hostPID=True), "no namespace of their node"),
        (_deployment(hostIPC=True), "no namespace of their node"),
        (
            _deployment(
                initContainers=[
                    {"name": "x", "image": "x", "securityContext": {"privileged": True}}
                ]
            ),
            "not privileged",
        ),
        (_deployment(containers=[_adding("IPC_LOCK")]), ""),
        (_deployment(containers=[_adding("IPC_LOCK", "SYS_ADMIN")]), "own their node"),
        (_deployment(initContainers=[_adding("ALL")]), "own their node"),
        (_deployment(volumes=[{"name": "host", "hostPath": {"path": "/models/llama"}}]), ""),
        (_deployment(volumes=[{"name": "host", "hostPath": {"path": "/"}}]), "no folder"),
        (_deployment(volumes=[{"name": "host", "hostPath": {"path": "/modelsx"}}]), "no folder"),
        (_object("ConfigMap"), ""),
        ({**_object("ConfigMap"), "metadata": {"name": "unlabelled"}}, "and nothing else"),
    ],
)
def test_what_its_rights_allow_is_refused_where_it_does_not_need_it(
    plane: ControlPlane, namespace: str, wanted: dict[str, Any], why: str
) -> None:
    tried = yaml.safe_dump(wanted)

    def outcome(kubectl: Kubectl) -> str:
        try:
            return kubectl.run("create", "-n", namespace, "--dry-run=server", "-f-", text=tried)
        except KubectlError as error:
            return str(error)

    assert "created" in outcome(plane.kubectl), "others may"
    operator = _as_operator(plane)
    wait_until(lambda: (why or "created") in outcome(operator), why or "it is made")
    if not why:
        assert "created" in outcome(operator)


@pytest.mark.parametrize("verb", ["delete", "label"])
def test_it_touches_nothing_that_it_did_not_make(
    plane: ControlPlane, namespace: str, verb: str
) -> None:
    more = ["x=y"] if verb == "label" else []
    operator = _as_operator(plane)

    def tried(name: str) -> str:
        try:
            return operator.run(verb, "configmap", name, *more, "-n", namespace, "--dry-run=server")
        except KubectlError as error:
            return str(error)

    theirs = {**_object("ConfigMap"), "metadata": {"name": "theirs"}}
    plane.kubectl.apply(theirs, _object("ConfigMap", name="its"), namespace=namespace)
    wait_until(lambda: "and nothing else" in tried("theirs"), "what is not its own is refused")
    assert "forbidden" not in tried("its")


def _as_operator(plane: ControlPlane) -> Kubectl:
    return Kubectl(plane.kubectl.program, plane.service_account_kubeconfig(NAMESPACE, ACCOUNT))

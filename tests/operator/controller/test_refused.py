"""What a refusal of the API server costs: looks, numbers of attempts, writes, and neighbours.

Every write comes back as an event of the watch, as in a cluster.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest

from radixgrove.operator.api import names
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.cluster.redis_users import RedisUsers
from radixgrove.operator.cluster.worker_probe import WorkerProbe
from radixgrove.operator.controller.access import Access
from radixgrove.operator.controller.app import App
from radixgrove.operator.controller.main import WATCHED
from radixgrove.operator.controller.name_ledger import NameLedger
from radixgrove.operator.controller.reconciler import Reconciler
from radixgrove.operator.controller.store import Key
from radixgrove.operator.controller.workqueue import WorkQueue
from radixgrove.operator.kube.client import KubeError, Object
from radixgrove.operator.kube.keys import Keys
from tests.operator.controller.test_app import Turns
from tests.operator.doubles import Probe, Table, Users
from tests.operator.memory_kube import MemoryKube, claim
from tests.operator.operator_builders import CONFIG

LLAMA, QWEN = ("team-a", "llama"), ("team-b", "qwen")


class RefusingKube(MemoryKube):
    """`refusal`: status and message with which StatefulSets are refused. Tells of every write."""

    def __init__(self) -> None:
        super().__init__()
        self.refusal: tuple[int, str] | None = None
        self.rewrites = False  # whether admission changes StatefulSets, each time otherwise
        self.attempted: list[str] = []  # names of StatefulSets
        self.app: App | None = None

    def add(self, thing: Object) -> Object:
        added = super().add(thing)
        if self.app is not None and thing["kind"] == names.KIND:
            self.app.service_event("MODIFIED", added)
        elif self.app is not None and thing["kind"] in WATCHED:
            self.app.child_event(thing["kind"], "MODIFIED", added)
        return added

    def _request(self, method: str, verb: str, kind: str, *where: Any, **more: Any) -> Object:
        if kind == "StatefulSet" and method == "PATCH":
            self.attempted.append(where[1])
            if self.refusal is not None:
                raise KubeError(verb, "statefulsets/{}/{}".format(*where), *self.refusal)
            if self.rewrites:
                made = super()._request(method, verb, kind, *where, **more)
                made["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror.example.com/w"
                made["metadata"]["annotations"]["rewritten"] = str(len(self.attempted))
                return copy.deepcopy(self.add(made))
        return super()._request(method, verb, kind, *where, **more)


class Cluster:
    """An operator at a time that the test sets."""

    def __init__(self) -> None:
        self.now, self.kube, self.table = 1000.0, RefusingKube(), Table()
        self.app = self.kube.app = App(self.kube, CONFIG, Turns())
        self.app.queue = WorkQueue(lambda key: key[0], clock=lambda: self.now)
        ledger = NameLedger(self.kube, self.app.store, CONFIG, self.app.queue.hint)
        self.access = Access(
            self.kube, self.app.store, Keys(self.kube, CONFIG), cast(RedisUsers, Users()), CONFIG,
            self.app.queue.hint,
        )  # fmt: skip
        self._reconciler = Reconciler(
            self.kube, self.app.store, self.access, ledger,
            cast(RedisStore, self.table), cast(WorkerProbe, Probe()), CONFIG,
            lambda key: None, self.app.queue.hint,
        )  # fmt: skip

        for key in (LLAMA, QWEN):
            self.kube.add(claim(key[0]))

    def apply(self, key: Key, **spec: Any) -> None:
        """As a user does: the generation counts."""
        live = self.kube.get(names.KIND, *key)
        if live is None:
            metadata = {"namespace": key[0], "name": key[1], "generation": 0}
            live = {"kind": names.KIND, "metadata": metadata}
        live["metadata"]["generation"] += 1
        self.kube.add(live | {"spec": {"model": {"source": "pvc://models/demo"}} | spec})

    def run(self, seconds: float) -> list[Key]:
        """Lets the operator work for so long; the services it has looked at, in order."""
        looked, end = list[Key](), self.now + seconds
        while self.now < end:
            key = self.app.queue.get(0)
            if key is None:
                self.now += 0.25
            else:
                looked.append(key)
                self.app._work_on(key, "reconciler-0", self._reconciler)
            assert len(looked) < 1000, "it does not come to rest"
        return looked

    def status(self, key: Key) -> Any:
        return self.kube.objects[names.KIND, *key]["status"]

    def condition(self, key: Key) -> str:
        found = next(c for c in self.status(key)["conditions"] if c["type"] == "Ready")
        return f"{found['reason']}: {found['message']}"


REFUSALS = [
    (400, "unknown field spec.template.spec.tolerationz"),
    (
        500,
        "failed to create typed patch object (a/llama-0-a1): .spec: field not declared in schema",
    ),
    (403, "exceeded quota: count/statefulsets.apps=0"),
    (403, "ValidatingAdmissionPolicy 'no-gpus' denied request"),
    (422, "spec.template.spec.containers[0].image: Required value"),
    (500, 'failed calling webhook "pods.example.com": connection refused'),
    (500, 'admission webhook "pods.example.com" denied the request: no'),
]


@pytest.mark.parametrize(
    "refusal",
    REFUSALS,
    ids=["field", "typed field", "quota", "policy", "invalid", "lost webhook", "webhook"],
)
def test_a_refused_service_is_looked_at_once_a_minute_and_burns_no_number(
    refusal: tuple[int, str],
) -> None:
    cluster = Cluster()
    cluster.kube.refusal = refusal
    cluster.apply(LLAMA)
    looked = cluster.run(600)
    assert len(looked) <= 18, "seven looks in the first minute, then one a minute"
    assert set(cluster.kube.attempted) == {"llama-0-a1"}
    assert cluster.status(LLAMA)["lastAttempt"] == 1
    assert refusal[1] in cluster.condition(LLAMA)
    cluster.kube.written.clear()
    assert len(cluster.run(600)) == 10
    assert cluster.kube.written == [], "a look that changes nothing writes nothing"


def test_a_new_generation_and_the_restart_annotation_act_at_once() -> None:
    cluster = Cluster()
    cluster.kube.refusal = REFUSALS[0]
    cluster.apply(LLAMA)
    cluster.run(300)
    before = len(cluster.kube.attempted)
    cluster.kube.objects[names.KIND, *LLAMA]["metadata"]["annotations"] = {names.RESTART: "now"}
    cluster.kube.add(cluster.kube.objects[names.KIND, *LLAMA])
    cluster.run(1)
    assert len(cluster.kube.attempted) > before
    cluster.run(300)
    cluster.kube.refusal = None
    cluster.apply(LLAMA, engine={"pageSize": 32})
    cluster.run(2)
    (made,) = cluster.kube.of("StatefulSet")
    assert made["metadata"]["name"] == "llama-0-a1", "the first of which something is made"


def test_several_refused_groups_keep_their_numbers() -> None:
    cluster = Cluster()
    cluster.kube.refusal = REFUSALS[1]
    cluster.apply(LLAMA, replicas=2)
    cluster.run(300)
    assert set(cluster.kube.attempted) == {"llama-0-a1", "llama-1-a2"}
    cluster.kube.refusal = None
    cluster.run(60)
    made = [found["metadata"]["name"] for found in cluster.kube.of("StatefulSet")]
    assert made == ["llama-0-a1", "llama-1-a2"]
    cluster.apply(LLAMA, replicas=3)
    cluster.run(10)
    assert "llama-2-a3" in cluster.kube.attempted


@pytest.mark.parametrize("status", [0, 409, 500, 504])
def test_a_number_of_which_something_may_have_been_made_is_not_used_again(status: int) -> None:
    """Pods of that name may exist on a node that does not answer."""
    cluster = Cluster()
    cluster.kube.refusal = (status, "no answer")
    cluster.apply(LLAMA)
    cluster.run(1)
    assert cluster.kube.attempted[:2] == ["llama-0-a1", "llama-0-a2"]


def test_what_admission_rewrites_is_written_once() -> None:
    """As a policy that names another registry in every template."""
    cluster = Cluster()
    cluster.kube.rewrites = True
    cluster.apply(LLAMA)
    cluster.run(300)
    assert cluster.kube.attempted == ["llama-0-a1"]
    made = cluster.kube.objects["StatefulSet", LLAMA[0], "llama-0-a1"]
    made["spec"]["replicas"] = 7  # somebody's hand
    cluster.kube.add(made)
    cluster.run(300)
    assert cluster.kube.attempted == ["llama-0-a1", "llama-0-a1"]


def test_a_neighbour_is_served_while_another_service_is_refused() -> None:
    cluster = Cluster()
    cluster.kube.refusal = REFUSALS[1]
    for number in range(12):
        cluster.apply(("team-a", f"s{number}"))
    cluster.apply(QWEN)
    assert cluster.run(600)[:2] == [("team-a", "s0"), QWEN]
    cluster.apply(QWEN, replicas=2)
    assert cluster.run(1)[0] == QWEN

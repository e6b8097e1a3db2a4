"""Services beside each other: which half-placed group holds up which other."""

from __future__ import annotations

from typing import Any, cast

import pytest

from radixgrove.operator.api import names
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.cluster.redis_users import RedisUsers
from radixgrove.operator.cluster.worker_probe import WorkerProbe
from radixgrove.operator.controller.access import Access
from radixgrove.operator.controller.name_ledger import NameLedger
from radixgrove.operator.controller.reconciler import Reconciler
from radixgrove.operator.controller.store import Key, Store
from radixgrove.operator.kube.keys import Keys
from tests.operator.doubles import Probe, Table, Users
from tests.operator.memory_kube import MemoryKube, claim, node
from tests.operator.operator_builders import CONFIG

HUGE, SMALL = ("team-a", "huge"), ("team-b", "small")
H100, A100 = ({"nvidia.com/gpu.product": name} for name in ("H100", "A100"))
WORDS = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


class Cluster:
    """Two nodes of H100s and one of A100s."""

    def __init__(self) -> None:
        self.kube, self.store, self.enqueued = MemoryKube(), Store(), list[Key]()
        ledger = NameLedger(self.kube, self.store, CONFIG, self.enqueued.append)
        self.access = Access(
            self.kube, self.store, Keys(self.kube, CONFIG), cast(RedisUsers, Users()), CONFIG,
            self.enqueued.append,
        )  # fmt: skip
        self._reconciler = Reconciler(
            self.kube, self.store, self.access, ledger, cast(RedisStore, Table()),
            cast(WorkerProbe, Probe()), CONFIG, lambda key: None, self.enqueued.append,
        )  # fmt: skip
        for key in (HUGE, SMALL):
            self.kube.add(claim(key[0]))
        for name, labels in (("h0", H100), ("h1", H100), ("a0", A100)):
            self.store.node_seen(self.kube.add(node(name, labels=labels)))

    def apply(self, key: Key, **spec: Any) -> None:
        metadata = {"namespace": key[0], "name": key[1], "generation": 1}
        wanted = {
            "model": {"source": "pvc://models/demo"},
            "image": "example.com/of-groups:1",
        } | spec
        self.kube.add({"kind": names.KIND, "metadata": metadata, "spec": wanted})

    def reconcile(self, key: Key) -> None:
        self.store.service_seen(self.kube.objects[names.KIND, *key])
        self._reconciler.reconcile(key)

    def huge_on_h0(self, **more: Any) -> None:
        """A group of 16 nodes, of which one is placed and the scheduler has given up on others."""
        hardware = {"nodes": 16, "gpusPerNode": 8, "gpuType": "H100"}
        self.apply(HUGE, hardware=hardware, **more)
        self.reconcile(HUGE)
        self.kube.run_pods("h0")
        for pod in self.kube.of("Pod")[1:]:
            unplaced = {"type": "PodScheduled", "status": "False", "message": WORDS}
            pod["spec"], pod["status"] = {}, {"phase": "Pending", "conditions": [unplaced]}
        self.reconcile(HUGE)

    def sets(self) -> list[str]:
        return [found["metadata"]["name"] for found in self.kube.of("StatefulSet")]


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        ({"hardware": {"gpuType": "A100"}}, True),
        ({"hardware": {"gpuType": "H100"}}, False),
        ({"hardware": {"gpusPerNode": 8}}, False),
        ({"hardware": {"device": "cpu"}}, True),
        ({"schedulerName": "volcano"}, True),
        ({"podOverrides": {"spec": {"nodeSelector": A100}}}, True),
        ({"podOverrides": {"spec": {"nodeSelector": {"pool": "of-ours"}}}}, True),
    ],
    ids=str,
)
def test_a_half_placed_group_holds_up_only_what_wants_its_nodes(
    spec: dict[str, Any], made: bool
) -> None:
    cluster = Cluster()
    cluster.huge_on_h0()
    cluster.apply(SMALL, **spec)
    cluster.reconcile(SMALL)
    assert ("small-0-a1" in cluster.sets()) is made


def test_a_group_that_cannot_fit_shows_its_pods_and_gives_way_to_one_that_can() -> None:
    cluster = Cluster()
    cluster.huge_on_h0()
    status = cluster.kube.objects[names.KIND, *HUGE]["status"]
    status["groups"][0]["partlySince"] = "2026-01-01T00:00:00Z"  # long ago
    cluster.reconcile(HUGE)
    assert cluster.sets() == ["huge-0-a1"], "no other needs what it holds"
    cluster.apply(SMALL, hardware={"gpuType": "H100"})
    cluster.reconcile(SMALL)
    assert "small-0-a1" in cluster.sets()
    unplaced = {"type": "PodScheduled", "status": "False", "message": WORDS}
    cluster.kube.run_pods("h1", of="small-0-a1")
    pod = cluster.kube.the("Pod", "small-0-a1-0")
    pod["spec"], pod["status"] = {}, {"phase": "Pending", "conditions": [unplaced]}
    cluster.reconcile(SMALL)
    cluster.reconcile(HUGE)
    assert cluster.sets() == ["small-0-a1"]
    conditions = cluster.kube.objects[names.KIND, *HUGE]["status"]["conditions"]
    ready = next(c for c in conditions if c["type"] == "Ready")
    assert ready["reason"] == "InsufficientGPUs"
    assert "gave up 1 of 16 placed pods for a service of another namespace" in ready["message"]

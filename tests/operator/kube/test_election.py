"""Who leads after whom: a lease in memory, campaigns in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from radixgrove.operator.api.config import Election
from radixgrove.operator.kube.client import Object
from radixgrove.operator.kube.election import LeaderElection
from tests.cluster.harness.waiting import wait_until
from tests.operator.memory_kube import MemoryKube
from tests.operator.operator_builders import CONFIG

# No lease runs out while a test lasts.
PATIENT = CONFIG.model_copy(update={"election": Election(duration=600.0, renew_every=0.02)})


class Registry(MemoryKube):
    """Counts how often somebody has looked at the lease."""

    looks = 0

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        self.looks += kind == "Lease"
        return super().get(kind, namespace, name)

    def holder(self) -> str:
        return str(self.the("Lease", PATIENT.election.lease)["spec"]["holderIdentity"])


@contextmanager
def campaign(kube: Registry, pod: str) -> Iterator[LeaderElection]:
    election = LeaderElection(PATIENT, pod)
    run = threading.Thread(target=election.run, args=(kube, lambda: None, lambda: None))
    run.start()
    try:
        yield election
    finally:
        election.stopping.set()
        run.join(30)


def killed_leader(kube: Registry, pod: str) -> str:
    """The holder of a lease that was never given back, as of a process that was killed."""
    with campaign(kube, pod) as election:
        wait_until(lambda: election.leading, "it leads", interval=0.01)
        lease = kube.the("Lease", PATIENT.election.lease)
        held = {**lease, "metadata": dict(lease["metadata"]), "spec": dict(lease["spec"])}
    kube.add(held)
    return kube.holder()


def test_a_container_takes_the_lease_of_the_one_before_it_at_once() -> None:
    kube = Registry()
    before = killed_leader(kube, "operator-abc")
    with campaign(kube, "operator-abc") as election:
        wait_until(lambda: election.leading, "it leads", timeout=60, interval=0.01)
        assert kube.holder() != before
        lease = kube.the("Lease", PATIENT.election.lease)
        assert lease["spec"]["leaseTransitions"] == 1


def test_every_other_process_waits_for_the_lease_to_run_out() -> None:
    kube = Registry()
    before = killed_leader(kube, "operator-abc")
    for pod in ("operator-ab", "operator-abcd", ""):
        with campaign(kube, pod) as election:
            looks = kube.looks
            wait_until(lambda seen=looks: kube.looks > seen + 3, "it looks", interval=0.01)
            assert not election.leading
    assert kube.holder() == before


@pytest.mark.parametrize("spec", [None, {}, {"holderIdentity": None, "leaseTransitions": None}])
def test_a_lease_of_nobody_is_taken(spec: Object | None) -> None:
    kube = Registry()
    meta = {"name": PATIENT.election.lease, "namespace": PATIENT.namespace}
    kube.add({"kind": "Lease", "metadata": meta} | ({} if spec is None else {"spec": spec}))
    with campaign(kube, "operator-abc") as election:
        wait_until(lambda: election.leading, "it leads", timeout=60, interval=0.01)
        assert kube.holder().startswith("operator-abc/")


def test_outside_of_pods_nobody_inherits() -> None:
    kube = Registry()
    before = killed_leader(kube, "")
    with campaign(kube, "") as election:
        looks = kube.looks
        wait_until(lambda: kube.looks > looks + 3, "it looks", interval=0.01)
        assert not election.leading
    assert kube.holder() == before

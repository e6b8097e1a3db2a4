"""A node is lost: its groups move whole, and nothing of them serves when it comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.cluster.harness import demo, groups, machine
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.faults import Faults
from tests.cluster.harness.node import Node
from tests.cluster.harness.served import Served
from tests.cluster.harness.traffic import Client, Traffic
from tests.cluster.harness.volumes import Mounts
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

MOVED_WITHIN = 60.0  # seconds from the loss to Ready elsewhere
SILENT_FOR = 30.0


@pytest.fixture
def pair(installed: Cluster, victim: Node, worker_mounts: Mounts) -> Iterator[Served]:
    """A ready group with one pod on the first node and one on the victim."""
    served = Served(installed.kubectl, demo.NAMESPACE, "lost-pair")
    first, second, _ = installed.nodes
    with groups.cordoned(installed, second):
        served.apply(groups.spec(worker_mounts))
        served.wait_until_ready(1)
    assert {pod.node for pod in groups.members(served)} == {first.name, victim.name}
    yield served
    served.delete()


@pytest.fixture
def single(installed: Cluster, victim: Node, worker_mounts: Mounts) -> Iterator[Served]:
    """A ready group of one pod, on the victim."""
    served = Served(installed.kubectl, demo.NAMESPACE, "lost-single")
    with groups.cordoned(installed, *installed.nodes[:2]):
        served.apply(groups.spec(worker_mounts, nodes=1))
        served.wait_until_ready(1)
    assert [pod.node for pod in groups.members(served)] == [victim.name]
    yield served
    served.delete()


def test_groups_of_a_frozen_node_move_and_stay_moved_when_it_thaws(
    pair: Served, single: Served, victim: Node, faults: Faults, client: Client
) -> None:
    services = (pair, single)
    old = [groups.members(served) for served in services]
    with machine.alone():
        faults.freeze(victim)
        _wait_until_moved(services, old, victim)
    with _only_new_ones_serve(services, client):
        faults.thaw(victim)
        faults.wait_until(victim, ready=True)
        _wait_until_old_pods_are_gone(services, old)


def test_groups_of_a_node_cut_off_move_and_do_not_serve_when_its_network_is_back(
    pair: Served, single: Served, victim: Node, faults: Faults, client: Client
) -> None:
    services = (pair, single)
    old = [groups.members(served) for served in services]
    with machine.alone():
        faults.stop_kubelet(victim)
        faults.cut_off(victim)
        _wait_until_moved(services, old, victim)
    with _only_new_ones_serve(services, client) as traffics:
        faults.reconnect(victim)
        until = time.time() + SILENT_FOR
        wait_until(
            lambda: all(t.outcomes and t.outcomes[-1].began > until for t in traffics),
            f"requests were sent for {SILENT_FOR:g} s",
        )
        # The old worker lives, and reaches Redis and routers again.
        assert _says(victim, single, old[1][0].name) == "serving"
        faults.start_kubelet(victim)
        _wait_until_old_pods_are_gone(services, old)


def _wait_until_moved(
    services: tuple[Served, ...], old: list[list[groups.Member]], victim: Node
) -> None:
    deadline = time.monotonic() + MOVED_WITHIN
    for served, before in zip(services, old, strict=True):
        left = deadline - time.monotonic()
        groups.wait_until_recreated(served, before, timeout=left)
        assert victim.name not in {pod.node for pod in groups.members(served)}


@contextmanager
def _only_new_ones_serve(services: tuple[Served, ...], client: Client) -> Iterator[list[Traffic]]:
    """Whatever happens inside: every request is answered, and by the present rank 0."""
    present = [groups.members(served) for served in services]
    attempts = [served.status()["lastAttempt"] for served in services]
    with ExitStack() as stack:
        traffics = [
            stack.enter_context(
                Traffic(client, served.status()["url"], served.name, clients=1, tokens=4)
            )
            for served in services
        ]
        yield traffics
        for traffic in traffics:
            traffic.wait_for_more(3)
    for served, traffic, before, attempt in zip(services, traffics, present, attempts, strict=True):
        assert traffic.failures == []
        assert {groups.server(o.text) for o in traffic.outcomes} == {before[0].name}
        assert [pod.uid for pod in groups.members(served)] == [pod.uid for pod in before]
        assert served.status()["lastAttempt"] == attempt


def _wait_until_old_pods_are_gone(
    services: tuple[Served, ...], old: list[list[groups.Member]]
) -> None:
    uids = {pod.uid for before in old for pod in before}
    wait_until(
        lambda: not uids & {uid for served in services for uid in served.pods().values()},
        "the old pods are gone",
    )


def _says(node: Node, served: Served, pod: str) -> str:
    """What a pod answers to its probe, asked on its own node."""
    found = served.kubectl.json("get", "pod", pod, "-n", served.namespace)
    return node.run("curl", "--silent", f"http://{found['status']['podIP']}:8100/readyz")

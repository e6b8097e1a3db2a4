"""Groups of two pods on two nodes: they live, serve and die whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.harness import demo, groups
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.served import Served
from tests.cluster.harness.traffic import Client
from tests.cluster.harness.volumes import Mounts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def _leaves_nothing(cluster: Cluster) -> Iterator[None]:
    """The shared service is deleted after the last of this module's tests."""
    yield
    Served(cluster.kubectl, demo.NAMESPACE, "pair").delete()


@pytest.fixture
def pair(installed: Cluster, worker_mounts: Mounts) -> Served:
    """One ready group of two pods, shared by the tests of this module."""
    served = Served(installed.kubectl, demo.NAMESPACE, "pair")
    served.apply(groups.spec(worker_mounts))
    served.wait_until_ready(1)
    return served


def test_two_pods_on_two_nodes_meet_and_answer_through_the_router(
    pair: Served, client: Client
) -> None:
    pods = groups.members(pair)
    assert [pod.rank for pod in pods] == [0, 1]
    assert pods[0].node != pods[1].node
    status = pair.status()
    answer = client.ask(status["url"], pair.name, "Who are you?")
    assert answer.startswith(f"{pods[0].name}: 1 2 3")

"""From `helm install` to an answer: the project's own images and chart on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.harness import demo, release
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.served import Served
from tests.cluster.harness.traffic import Client
from tests.cluster.harness.volumes import Mounts

pytestmark = pytest.mark.cluster


@pytest.fixture
def served(installed: Cluster, worker_mounts: Mounts) -> Iterator[Served]:
    service = Served(installed.kubectl, demo.NAMESPACE, "answers")
    service.apply(demo.spec(worker_mounts, 2))
    yield service
    service.delete()


def test_the_demo_model_answers_through_the_router_service(served: Served, client: Client) -> None:
    status = served.wait_until_ready(2)
    answer = client.ask(
        status["url"], status["model"]["name"], "What is the capital of France? One word."
    )
    assert "Paris" in answer


def test_helm_test_passes(installed: Cluster) -> None:
    said = release.helm(installed, "test", "radixgrove", "-n", release.NAMESPACE, "--timeout=240s")
    assert "Phase:          Succeeded" in said

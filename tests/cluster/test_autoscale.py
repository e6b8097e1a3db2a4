"""Groups come and go through the scale subresource, by hand and by the built-in autoscaler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.harness import demo
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.served import KIND, Served, reason
from tests.cluster.harness.traffic import Client, Traffic
from tests.cluster.harness.volumes import Mounts
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

# One request at a time, so that a handful of clients makes a queue.
ENGINE = {"contextLength": 512, "kvTokens": 2048, "maxRunning": 1, "settings": {"cpu_threads": 1}}
SCALING = {"min": 0, "max": 2, "targets": {"queue": 2}, "cooldown": "10s"}


@pytest.fixture
def served(installed: Cluster) -> Iterator[Served]:
    service = Served(installed.kubectl, demo.NAMESPACE, "scaled")
    yield service
    service.delete()


def test_the_scale_subresource_moves_groups_and_leaves_the_others_alone(
    served: Served, worker_mounts: Mounts
) -> None:
    served.apply(demo.spec(worker_mounts, 1, engine=ENGINE))
    served.wait_until_ready(1)
    first = served.pods()

    served.scale(2)
    served.wait_until_ready(2)
    assert first.items() < served.pods().items()
    scale = served.kubectl.json(
        "get", KIND, served.name, "-n", served.namespace, "--subresource=scale"
    )
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2)
    selected = served.kubectl.items(
        "pods", "-n", served.namespace, f"--selector={scale['status']['selector']}"
    )
    assert {pod["metadata"]["name"] for pod in selected} == served.pods().keys()

    served.scale(1)
    served.wait_until_ready(1)
    wait_until(lambda: served.pods() == first, "only the first group is left")


def test_the_autoscaler_wakes_grows_shrinks_and_puts_to_sleep_without_a_failed_request(
    served: Served, worker_mounts: Mounts, client: Client
) -> None:
    served.apply(demo.spec(worker_mounts, 0, engine=ENGINE, autoscaling=SCALING))
    asleep = served.wait(lambda s: reason(s, "Ready") == "True/Asleep", "it sleeps")
    assert served.pods() == {}

    # From zero: the router holds the very first request until a group serves it.
    with Traffic(client, asleep["url"], served.name, clients=1) as first:
        first.wait_for_more(1)
    assert first.failures == []

    with Traffic(client, asleep["url"], served.name, clients=6, tokens=24) as many:
        served.wait(lambda s: s.get("readyReplicas") == 2, "a queue brings a second group")
        many.wait_for_more(6)
    assert many.failures == []

    with Traffic(client, asleep["url"], served.name, clients=1) as few:
        served.wait(
            lambda s: s.get("replicas") == s.get("readyReplicas") == 1, "calm takes one away"
        )
        few.wait_for_more(2)
    assert few.failures == []

    served.wait(lambda s: reason(s, "Ready") == "True/Asleep", "it falls asleep")
    wait_until(lambda: not served.pods(), "no pod is left")

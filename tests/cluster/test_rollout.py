"""Rollouts of a served model: no request fails, and a bad revision never takes over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.harness import demo
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.served import Served, message, reason
from tests.cluster.harness.traffic import Client, Traffic
from tests.cluster.harness.volumes import Mounts
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

ENGINE = {"contextLength": 512, "kvTokens": 4096, "maxRunning": 4, "settings": {"cpu_threads": 1}}
# Every group's start costs the two cores of one machine: no more of them than the tests need.
SURGE = {"maxUnavailable": 0, "maxSurge": 1}


@pytest.fixture
def served(installed: Cluster, worker_mounts: Mounts) -> Iterator[Served]:
    service = Served(installed.kubectl, demo.NAMESPACE, "rolled")
    service.apply(demo.spec(worker_mounts, 2, engine=ENGINE, rollout=SURGE))
    service.wait_until_ready(2)
    yield service
    service.delete()


def test_no_request_fails_while_engine_settings_roll_and_while_a_bad_model_does_not(
    served: Served, client: Client
) -> None:
    before, status = served.pods(), served.status()
    with Traffic(client, status["url"], served.name) as traffic:
        traffic.wait_for_more(2)
        # Clients go on with the name of before; old and new replicas call themselves otherwise.
        names = {"name": f"{served.name}-2", "aliases": [served.name]}
        served.patch({"model": names, "engine": {"maxRunning": 5, "hostCacheGib": 0.25}})
        rolled = served.wait_until_ready(2)
        assert rolled["revision"] != status["revision"]
        wait_until(lambda: not before.keys() & served.pods().keys(), "the old pods are gone")
        traffic.wait_for_more(2)
        for pod in served.staying_pods():
            (worker,) = pod["spec"]["containers"]
            # 3Gi that the service asks for, 1Gi of /dev/shm, and the host cache.
            assert worker["resources"]["limits"]["memory"] == "4352Mi"
            log = served.kubectl.run("logs", pod["metadata"]["name"], "-n", served.namespace)
            assert "memory: host tier" in log

        good, source = served.pods(), served.read()["spec"]["model"]["source"]
        served.patch({"model": {"source": f"{source}-which-is-missing"}})
        served.wait(
            lambda s: (
                reason(s, "Progressing") == "False/RolloutBlocked"
                and reason(s, "Degraded").startswith("True/")
                and "which-is-missing" in message(s, "Degraded")
                and reason(s, "Ready") == "True/Serving"
            ),
            "the rollout is blocked, the status says why, the old groups serve",
        )
        traffic.wait_for_more(4)
        assert good.items() <= served.pods().items()

        served.patch({"model": {"source": source}})
        served.wait_until_ready(2)
        served.wait(lambda s: reason(s, "Degraded") == "False/AsExpected", "all is well again")
        wait_until(lambda: served.pods() == good, "only the good pods are left")
        traffic.wait_for_more(2)
    assert traffic.failures == []


@pytest.fixture
def alone(installed: Cluster, worker_mounts: Mounts) -> Iterator[Served]:
    """A single replica with the default rollout, which gives it up before its successor starts."""
    service = Served(installed.kubectl, demo.NAMESPACE, "alone")
    service.apply(demo.spec(worker_mounts, 1, engine=ENGINE))
    service.wait_until_ready(1)
    yield service
    service.delete()


def test_a_single_replica_survives_a_bad_image_and_comes_back_from_a_bad_model(
    alone: Served,
) -> None:
    before = alone.pods()
    alone.patch({"image": "localhost/radixgrove/worker:missing"})
    alone.wait(
        lambda s: (
            reason(s, "Progressing") == "False/RolloutBlocked"
            and reason(s, "Degraded") == "True/ImagePull"
            and "worker:missing" in message(s, "Degraded")
            and reason(s, "Ready") == "True/Serving"
        ),
        "the image is found wanting before the running group goes",
    )
    assert alone.pods() == before

    source = alone.read()["spec"]["model"]["source"]
    alone.patch({"image": None, "model": {"source": f"{source}-which-is-missing"}})
    status = alone.wait(
        lambda s: (
            reason(s, "Progressing") == "False/RolledBack"
            and reason(s, "Ready") == "True/Serving"
            and reason(s, "ModelCached").startswith("True/")
        ),
        "the last good revision is back",
    )
    assert "which-is-missing" in message(status, "Degraded")
    alone.patch({"model": {"source": source}})
    settled = alone.wait_until_ready(1)
    assert reason(settled, "Degraded") == "False/AsExpected"

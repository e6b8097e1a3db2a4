"""The life of a release: upgraded under load, uninstalled without orphans, installed again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.harness import demo, previous, release
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.kubectl import Kubectl, KubectlError
from tests.cluster.harness.served import SERVICE_LABEL, Served
from tests.cluster.harness.traffic import Client, Traffic
from tests.cluster.harness.volumes import Mounts
from tests.cluster.harness.waiting import wait_until

pytestmark = pytest.mark.cluster

ENGINE = {"contextLength": 512, "kvTokens": 2048, "maxRunning": 4, "settings": {"cpu_threads": 1}}
CRD = "inferenceservices.serving.radixgrove.io"
# What every namespace has, and what the cluster itself keeps about the past.
_ALWAYS_THERE = {"configmaps/kube-root-ca.crt", "serviceaccounts/default"}
_RECORDS = ("events", "events.events.k8s.io")


@pytest.fixture
def served(cluster: Cluster, worker_mounts: Mounts) -> Iterator[Served]:
    """Not applied yet: the tests say under which release."""
    service = Served(cluster.kubectl, demo.NAMESPACE, "kept")
    yield service
    if cluster.kubectl.get("crd", CRD) is not None:
        service.delete()


def spec_of(mounts: Mounts) -> dict[str, Any]:
    return demo.spec(mounts, 2, engine=ENGINE)


def objects(cluster: Cluster, *where: str) -> set[str]:
    """`resource/name` of everything that `where` selects, of every kind there is."""
    kubectl = cluster.kubectl
    scope = "--namespaced=" + str("-n" in where).lower()
    kinds = kubectl.run("api-resources", "--verbs=list", scope, "--output=name").split()
    found = set()
    for kind in kinds:
        if kind in _RECORDS:
            continue
        for item in _items(kubectl, kind, *where):
            found.add(f"{kind}/{item['metadata']['name']}")
    return found


def _items(kubectl: Kubectl, kind: str, *where: str) -> list[Any]:
    """None of a kind that is served no more: the list of kinds lags behind."""
    try:
        return kubectl.items(kind, *where)
    except KubectlError as error:
        if "could not find the requested resource" in error.stderr:
            return []
        raise


def test_an_upgrade_under_load_restarts_no_worker_and_fails_no_request(
    cluster: Cluster,
    release_images: None,
    worker_mounts: Mounts,
    served: Served,
    client: Client,
    tmp_path: Path,
) -> None:
    release.uninstall(cluster)
    cluster.build_images(previous.recipe())
    release.install(cluster, previous.values(), chart=previous.make_chart(tmp_path))
    served.apply(spec_of(worker_mounts))
    status = served.wait_until_ready(2)
    before = served.pods()

    with Traffic(client, status["url"], served.name) as traffic:
        traffic.wait_for_more(2)
        release.install(cluster)
        traffic.wait_for_more(6)
    assert traffic.failures == []
    crd = cluster.kubectl.json("get", "crd", CRD)
    known = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert previous.NEW_FIELD in known["properties"]
    assert served.wait_until_ready(2)["revision"] == status["revision"]
    assert served.pods() == before

    # A group made now is rendered by the new operator, and of the same revision.
    served.scale(3)
    assert served.wait_until_ready(3)["revision"] == status["revision"]
    assert before.items() < served.pods().items()


@pytest.mark.slow
def test_uninstalling_leaves_no_orphan_and_keeps_services_only_when_told_to(
    installed: Cluster, worker_mounts: Mounts, served: Served, client: Client
) -> None:
    kubectl = installed.kubectl
    served.apply(spec_of(worker_mounts))
    url = served.wait_until_ready(2)["url"]
    running = served.pods()

    release.uninstall(installed)
    wait_until(
        lambda: objects(installed, "-n", release.NAMESPACE) == _ALWAYS_THERE,
        "nothing is left in the release's namespace", interval=2,
    )  # fmt: skip
    ours = "--selector=app.kubernetes.io/instance=radixgrove"
    assert objects(installed, ours) == {f"customresourcedefinitions.apiextensions.k8s.io/{CRD}"}
    assert served.pods() == running

    # Installed again, it has other keys: the groups that know the old ones are replaced.
    release.install(installed, {"crds": {"keep": False}})
    wait_until(lambda: not running.keys() & served.pods().keys(), "the groups are new", timeout=300)
    served.wait_until_ready(2)
    assert "Paris" in client.ask(url, served.name, "What is the capital of France? One word.")

    release.uninstall(installed)
    assert kubectl.get("crd", CRD) is None
    wait_until(
        lambda: objects(installed, "-n", served.namespace, f"--selector={SERVICE_LABEL}") == set(),
        "nothing of the service is left", interval=2,
    )  # fmt: skip
    managed = "--selector=app.kubernetes.io/managed-by=radixgrove"
    assert objects(installed, "-n", served.namespace, managed) == set()
    assert objects(installed, ours) == set()

"""Fixtures of the tests that need a real Kubernetes.

`RADIXGROVE_TEST_KUBECONFIG` names an existing cluster instead of the one that is made here; tests
that need nodes of our own are then skipped. `KUBECONFIG` is deliberately not read: these tests
break things.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.harness import build, demo, images, pods, release
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.faults import Faults
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.node import Node
from tests.cluster.harness.traffic import Client
from tests.cluster.harness.volumes import Mounts

_EXISTING = "RADIXGROVE_TEST_KUBECONFIG"


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane without nodes, shared by the session: work in a namespace of your own."""
    with ControlPlane() as running:
        yield running


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two real nodes with eight advertised GPUs each, shared by the session."""
    if _EXISTING in os.environ:
        pytest.skip(f"needs nodes of its own, and {_EXISTING} names an existing cluster")
    with Cluster(nodes=2) as running:
        yield running


@pytest.fixture(scope="session")
def kubectl(request: pytest.FixtureRequest) -> Kubectl:
    """kubectl as administrator of the existing cluster, if one is named, or else of `cluster`."""
    existing = os.environ.get(_EXISTING)
    if existing is None:
        running: Cluster = request.getfixturevalue("cluster")
        return running.kubectl
    program = shutil.which("kubectl") or build.ensure(build.CONTROL_PLANE) / "kubectl"
    return Kubectl(Path(program), Path(existing))


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    """A fresh namespace in which only pods of the `restricted` standard are admitted."""
    name = f"test-{secrets.token_hex(4)}"
    pods.make_namespace(kubectl, name)
    yield name
    kubectl.delete("namespace", name, wait=False)


@pytest.fixture
def faults(cluster: Cluster) -> Iterator[Faults]:
    """Breaks nodes and pods of `cluster`; everything is repaired when the test ends."""
    with Faults(cluster) as injector:
        yield injector


@pytest.fixture(scope="session")
def environment_image(cluster: Cluster) -> str:
    """An image that runs the checkout's code from a mounted environment: the release's worker."""
    name = release.image("worker")
    cluster.build_images(images.environment(name))
    return name


@pytest.fixture(scope="session")
def release_images(cluster: Cluster) -> None:
    """The project's own images, on every node."""
    release.build_images(cluster)


@pytest.fixture
def installed(cluster: Cluster, release_images: None) -> Cluster:
    """`cluster` with the chart's release in it, which all tests share."""
    if not release.is_installed(cluster):
        release.install(cluster)
    return cluster


@pytest.fixture
def victim(installed: Cluster, client: Client) -> Node:
    """A third node, which runs nothing of the release and not the client."""
    return installed.nodes[2] if len(installed.nodes) > 2 else installed.add_node()


@pytest.fixture(scope="session")
def worker_mounts(cluster: Cluster) -> Mounts:
    """Claims in the namespace `demo.NAMESPACE`, from which workers get the model and their code."""
    return demo.prepare_namespace(cluster)


@pytest.fixture(scope="session")
def client(cluster: Cluster, worker_mounts: Mounts, environment_image: str) -> Client:
    """A pod outside the product, from which requests are sent."""
    return Client.start(cluster.kubectl, demo.NAMESPACE, environment_image, worker_mounts)

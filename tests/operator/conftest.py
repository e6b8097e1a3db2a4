"""Fixtures of the operator's tests."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import RedisServer

if TYPE_CHECKING:
    from tests.cluster.harness.control_plane import ControlPlane
    from tests.operator.operator_process import OperatorProcess

NODES = 4


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    """A control plane with four pretended nodes of eight GPUs and the CRD."""
    from tests.cluster.harness.control_plane import ControlPlane
    from tests.cluster.harness.kwok import PretendedNodes
    from tests.operator.operator_process import install

    with ControlPlane() as running, PretendedNodes(running, NODES):
        install(running, [])
        yield running


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def shared_operator(
    plane: ControlPlane, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """An operator in cluster mode, not started yet, of all tests of a file."""
    from tests.operator.operator_process import OperatorProcess

    process = OperatorProcess(plane, tmp_path_factory.mktemp("operator"), redis_server.port)
    try:
        yield process
    finally:
        process.stop()


@pytest.fixture
def operator(shared_operator: OperatorProcess) -> Iterator[OperatorProcess]:
    """The file's operator, running; its log of this test is shown when the test fails."""
    shared_operator.ensure()
    before = len(shared_operator.log.read_bytes())
    yield shared_operator
    sys.stderr.write(shared_operator.log.read_bytes()[before:].decode()[-20000:])


@pytest.fixture
def no_operator(shared_operator: OperatorProcess) -> None:
    """The file's operator has ended and given its lease back."""
    shared_operator.stop()


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own with a claim `models`; gone afterwards with all in it."""
    yield from _namespace(plane, {})


@pytest.fixture
def restricted(plane: ControlPlane) -> Iterator[str]:
    """Such a namespace that has enforced the `restricted` standard from the beginning."""
    yield from _namespace(plane, {"pod-security.kubernetes.io/enforce": "restricted"})


def _namespace(plane: ControlPlane, labels: dict[str, str]) -> Iterator[str]:
    from tests.operator.operator_process import namespace_with_models

    name = f"t-{secrets.token_hex(4)}"
    plane.kubectl.apply(*namespace_with_models(name, labels))
    yield name
    plane.kubectl.run("delete", "namespace", name, "--wait=false")
    plane.kubectl.run("delete", "persistentvolume", name, "--wait=false")

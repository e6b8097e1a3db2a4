"""Fixtures of the operator's tests. The folder is no package, because its name is a module's."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from operator_process import OperatorProcess, RedisServer

    from tests.cluster.harness.control_plane import ControlPlane

NODES = 4


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    """A control plane with four pretended nodes of eight GPUs and the CRD."""
    from operator_process import install

    from tests.cluster.harness.control_plane import ControlPlane
    from tests.cluster.harness.kwok import PretendedNodes

    with ControlPlane() as running, PretendedNodes(running, NODES):
        install(running, [])
        yield running


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    from operator_process import RedisServer

    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def operator(
    plane: ControlPlane, redis_server: RedisServer, tmp_path: Path
) -> Iterator[OperatorProcess]:
    """A running operator in cluster mode."""
    from operator_process import OperatorProcess

    process = OperatorProcess(plane, tmp_path, redis_server.port)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        sys.stderr.write(process.log.read_text()[-20000:])


@pytest.fixture
def namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own with a claim `models`; gone afterwards with all in it."""
    from operator_process import namespace_with_models

    name = f"t-{secrets.token_hex(4)}"
    plane.kubectl.apply(*namespace_with_models(name))
    yield name
    plane.kubectl.run("delete", "namespace", name, "--wait=false")
    plane.kubectl.run("delete", "persistentvolume", name, "--wait=false")

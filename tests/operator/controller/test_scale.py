"""Many services on nodes of eight GPUs, all taken (more: `benchmarks.cluster.operator_scale`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cluster.harness.control_plane import ControlPlane

pytestmark = pytest.mark.cluster

NODES = 60
SERVICES = 30
SHORTEST_PERIOD = 5.0  # seconds between two looks at the same thing that no watch reports


@pytest.fixture
def large_plane() -> Iterator[ControlPlane]:
    from tests.cluster.harness.control_plane import ControlPlane
    from tests.cluster.harness.kwok import PretendedNodes
    from tests.operator.operator_process import install, namespace_with_models

    with ControlPlane() as plane, PretendedNodes(plane, NODES):
        install(plane, [])
        plane.kubectl.apply(*namespace_with_models("served"))
        yield plane


def test_many_services_become_ready_cost_nothing_at_rest_and_little_when_they_go(
    large_plane: ControlPlane, tmp_path: Path
) -> None:
    from tests.conftest import RedisServer
    from tests.operator.operator_process import OperatorProcess
    from tests.operator.scale import measure, summary

    with RedisServer(tmp_path) as server:
        operator = OperatorProcess(large_plane, tmp_path, server.port)
        try:
            # Long enough for watches, of which every one is begun again once in five minutes.
            found = measure(large_plane, operator, "served", SERVICES, rest=45.0)
        finally:
            operator.kill()
    print(summary(found))
    assert found.rest_writes == 0
    # The watches report all that a service has; the rest costs the same however many there are.
    assert found.rest_reads_of_services == 0
    assert found.rest_reads_of_one <= found.rest_seconds / SHORTEST_PERIOD + 2
    assert found.memory_bytes < 400 * 2**20
    assert found.writes <= 25 * SERVICES
    assert found.delete_requests <= 25 * SERVICES

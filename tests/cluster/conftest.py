"""Fixtures of the tests that need a real Kubernetes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster.harness.control_plane import ControlPlane


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane without nodes, shared by the session: work in a namespace of your own."""
    with ControlPlane() as running:
        yield running

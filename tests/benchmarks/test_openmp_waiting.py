"""What is measured under this project's name is what workers get."""

from __future__ import annotations

import pytest

from benchmarks.engine.openmp_waiting import sides
from radixgrove.service import machine


def test_ours_spins_short_where_an_engine_cannot_follow_its_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "cores", lambda *_: 0)  # fewer than there are: a quota
    assert sides()["radixgrove"] == {"GOMP_SPINCOUNT": "1000"}

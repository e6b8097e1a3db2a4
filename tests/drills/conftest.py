from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def results(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures go to the test's own directory, but where they are asked for."""
    directory = request.config.getoption("--record-drills") or tmp_path / "results"
    monkeypatch.setenv("BENCHMARK_RESULTS", str(directory))

"""An engine of a real worker dies beside a load: the other one answers what had not begun."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from tests.drills.load import Load
from tests.drills.stage import watched
from tests.e2e.conftest import MODEL, UpProcess
from tests.router.harness import eventually

pytestmark = pytest.mark.drill

_RATE = 1.0  # requests a second: the demo model on a small machine


def _request(number: int) -> dict[str, object]:
    return {"model": MODEL, "prompt": f"Story {number} begins", "max_tokens": 8, "ignore_eos": True}


async def _not(condition: Callable[[], Awaitable[bool]]) -> bool:
    return not await condition()


async def test_an_engine_is_killed(tmp_path: Path, demo_model_dir: Path) -> None:
    up = UpProcess(tmp_path / "log", ("--replicas", "2"))
    try:
        up.start()

        async def healthy() -> bool:
            return [entry["state"] for entry in up.replicas().values()] == ["ready"] * 2

        def memory() -> list[float]:
            router = up.find("radixgrove.cli", "router")
            return [psutil.Process(router.pid).memory_info().rss / 2**20]

        load = Load([up.url], _request, _RATE, timeout=120)
        subject = "one router, two workers of the demo model"
        async with load, watched(load, healthy, memory, "An engine is killed", subject, cuts=True):
            up.engine("replica-0").kill()
            await eventually(lambda: _not(healthy), what="the loss to be seen")
    finally:
        up.kill()

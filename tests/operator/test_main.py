"""The process around the handlers."""

from __future__ import annotations

import asyncio
import gc
import getpass
import threading
from collections.abc import Collection
from typing import Any, cast

import pytest
from kopf._core.reactor import running

from radixgrove.operator import main
from radixgrove.operator.app import App
from radixgrove.operator.config import OperatorConfig

CONFIG = OperatorConfig.model_validate(
    {
        "namespace": "home",
        "images": {"worker": "w", "router": "r", "operator": "o"},
        "redis": {"url": "redis://redis"},
        "router": {"url": "http://router/v1", "labels": {}},
    }
)


class _Beating:
    def beat(self) -> None:
        pass


async def test_it_watches_as_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's numeric user has none, and kopf asks for it unless it is told an identity."""
    made: list[asyncio.Task[Any]] = []

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 10001")

    async def end_at_once(tasks: Collection[asyncio.Task[Any]], **_: Any) -> None:
        made.extend(tasks)
        left = set(tasks)
        while left:  # kopf's cleanup can take a cancellation for that of what it waits for
            for task in left:
                task.cancel()
            _, left = await asyncio.wait(left, timeout=0.2)
        await asyncio.gather(*tasks, return_exceptions=True)

    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.setattr(running, "run_tasks", end_at_once)
    stop = threading.Event()
    await main.watch(cast(App, _Beating()), CONFIG, stop)
    assert made, "kopf got as far as its tasks"
    assert stop.is_set(), "whatever ends the watches ends the operator"
    gc.collect()  # tasks that kopf forgot complain now, not in the middle of another test

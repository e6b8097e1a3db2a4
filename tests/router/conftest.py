from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RedisServer, find_free_port
from tests.forks import Main
from tests.router.harness import Router, SimulatedReplica
from tests.router.mains import busy_main

MakeReplica = Callable[..., Awaitable[SimulatedReplica]]
MakeRouter = Callable[..., Awaitable[Router]]


@pytest.fixture
async def make_replica() -> AsyncIterator[MakeReplica]:
    """Starts simulated replicas in this process; they end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**options: Any) -> SimulatedReplica:
            replica = SimulatedReplica(**options)
            await replica.start()
            stack.push_async_callback(replica.stop)
            return replica

        yield make


@pytest.fixture
async def make_router(tmp_path: Path) -> AsyncIterator[MakeRouter]:
    """Starts router processes; they end with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(
            redis: RedisServer | None = None,
            *,
            ready: bool = True,
            main: Main = busy_main,
            **settings: Any,
        ) -> Router:
            if redis is not None:
                settings["redis_url"] = redis.url
            # A slow machine is no reason to place without Redis.
            settings.setdefault("redis_timeout", 10.0)
            router = Router(tmp_path, find_free_port(), find_free_port(), settings, main)
            stack.push_async_callback(router.close)
            await router.start(ready=ready)
            return router

        yield make

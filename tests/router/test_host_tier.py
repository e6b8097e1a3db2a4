"""Placement by what replicas hold in host memory: real index, real script, real publishers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import pytest
import redis

from radixgrove.protocol.blocks import HASH_BYTES, members
from radixgrove.protocol.keys import router_key
from radixgrove.protocol.registry import Registration
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router.placement import Placement, PlacementRequest, Placer
from radixgrove.router.replicas import Breaker, Replica, Service
from radixgrove.service.redis_link import RedisLink
from radixgrove.worker.messages import Tier
from tests.conftest import RedisServer
from tests.router.harness import eventually
from tests.router.publishing import HASHER, KEYS, Engine, chain, running

BLOCKS = 40
PATHS = [chain(seed, BLOCKS) for seed in range(1, 31)]
FAST = 160_000.0  # tokens/s from the host: ten times what the replicas compute


class Fleet:
    """Two equally loaded replicas, and a router's placement before them."""

    def __init__(self, redis_url: str, engines: list[Engine], placer: Placer) -> None:
        self.first, self.second = engines
        self._placer = placer
        self._client = redis.Redis.from_url(redis_url)

    async def in_step(self) -> None:
        for engine in (self.first, self.second):
            await eventually(partial(engine.in_step, self._client))

    async def place(self, path: bytes) -> Placement:
        """Where a request with this prefix and a block of its own goes; it ends at once."""
        known = [Registration.decode(record) for record in self._client.hvals(KEYS.replicas)]
        service = Service("default", ["m"])
        service.set_replicas({r.replica_id: _ready(r) for r in known})
        ask = PlacementRequest(
            (BLOCKS + 1) * 16, members(path, HASHER.domain64("local")), block_tokens=16
        )

        async def placed() -> Placement | None:
            for engine in (self.first, self.second):
                engine.pulse()  # one that is late for long counts as stuck
            return await self._placer.place(service, ask)

        decision: Placement = await eventually(placed)
        self._placer.release(decision)
        return decision


def _ready(registration: Registration) -> Replica:
    breaker = Breaker(failures_to_open=5, open_seconds=10.0)
    name, url = registration.replica_id, registration.url
    return Replica(name, url, breaker, registration, ready=True)


# A slow machine is no reason to place without Redis.
PATIENT = RouterSettings(redis_timeout=10.0)


@contextlib.asynccontextmanager
async def fleet(redis_url: str, host_rate: float) -> AsyncIterator[Fleet]:
    link = RedisLink(redis_url, router_key("radixgrove", "router"), "nothing is placed")
    async with (
        running(redis_url, replica_id="r0", host_tokens_per_second=host_rate) as first,
        running(redis_url, replica_id="r1", host_tokens_per_second=host_rate) as second,
    ):
        task = asyncio.create_task(link.run())
        await link.wait_until_up(10)
        try:
            yield Fleet(redis_url, [first, second], Placer(PATIENT, "router", link))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_prefix_in_host_memory_is_better_than_none(redis_server: RedisServer) -> None:
    async with fleet(redis_server.url, FAST) as replicas:
        for path in PATHS:
            replicas.first.change(True, Tier.GPU, path)
            replicas.first.move(path, Tier.GPU, Tier.HOST)
        await replicas.in_step()
        for path in PATHS:
            decision = await replicas.place(path)
            assert decision.replica.id == "r0"
            assert decision.matched_tokens == decision.host_tokens == BLOCKS * 16
            # One request runs (1 ms), a block comes back in 0.1 ms and is computed in 1 ms.
            assert decision.time_ms == pytest.approx(1 + BLOCKS * 0.1 + 1)


async def test_a_prefix_on_the_gpu_is_better_than_one_in_host_memory(
    redis_server: RedisServer,
) -> None:
    async with fleet(redis_server.url, FAST) as replicas:
        for path in PATHS:
            replicas.first.change(True, Tier.HOST, path)
            replicas.second.change(True, Tier.GPU, path)
        await replicas.in_step()
        for path in PATHS:
            decision = await replicas.place(path)
            assert (decision.replica.id, decision.host_tokens) == ("r1", 0)
            assert decision.matched_tokens == BLOCKS * 16


async def test_what_is_in_host_memory_continues_what_is_on_the_gpu(
    redis_server: RedisServer,
) -> None:
    on_gpu = 25
    async with fleet(redis_server.url, FAST) as replicas:
        for path in PATHS:
            replicas.first.change(True, Tier.GPU, path)
            replicas.first.move(path[on_gpu * HASH_BYTES :], Tier.GPU, Tier.HOST)
            replicas.second.change(True, Tier.GPU, path[: on_gpu * HASH_BYTES])
        await replicas.in_step()
        for path in PATHS:
            decision = await replicas.place(path)
            assert decision.replica.id == "r0"
            assert decision.matched_tokens == BLOCKS * 16
            assert decision.host_tokens == (BLOCKS - on_gpu) * 16


@pytest.mark.parametrize("host_rate", [0.0, 16_000.0, 100.0], ids=["none", "as slow", "slower"])
async def test_host_memory_that_does_not_beat_computing_draws_nothing(
    host_rate: float, redis_server: RedisServer
) -> None:
    async with fleet(redis_server.url, host_rate) as replicas:
        for path in PATHS:
            replicas.first.change(True, Tier.HOST, path)
        await replicas.in_step()
        decisions = [await replicas.place(path) for path in PATHS]
    assert {decision.replica.id for decision in decisions} == {"r0", "r1"}
    assert {(d.matched_tokens, d.host_tokens) for d in decisions} == {(0, 0)}

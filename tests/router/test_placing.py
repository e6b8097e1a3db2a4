"""End to end: where requests go, and what a client sees of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest
import redis

from tests.conftest import RedisServer
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import MODEL, Router, SimulatedReplica, eventually, prompt

SHARED = tuple(range(100, 140))


async def _pair(make_replica: MakeReplica, redis: RedisServer) -> list[SimulatedReplica]:
    return [await make_replica(redis_url=redis.url, replica_id=f"r{i}") for i in range(2)]


async def test_repeated_prefix_goes_where_it_is_cached(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replicas = await _pair(make_replica, redis_server)
    router = await make_router(redis_server)
    first = await router.complete(prompt(*SHARED, 1))
    assert first.matched_tokens == 0
    for tail in range(2, 8):
        answer = await router.complete(prompt(*SHARED, tail))
        assert answer.replica == first.replica
        assert answer.matched_tokens == len(SHARED) * 16
        cached = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(SHARED) * 16
    assert sorted(replica.counters.requests for replica in replicas) == [0, 7]
    for kind in ("predicted", "reported"):
        sample = f'radixgrove_router_{kind}_cached_tokens_total{{model="{MODEL}"}}'
        assert await router.metric(sample) == 6 * len(SHARED) * 16


async def test_new_prompts_spread_over_equally_loaded_replicas(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await _pair(make_replica, redis_server)
    router = await make_router(redis_server)
    seen = Counter([(await router.complete(prompt(1000 + i))).replica for i in range(24)])
    assert set(seen) == {"r0", "r1"}  # a tie always broken the same way would herd


async def test_burst_with_one_new_prefix_stays_together(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """No replica has published the prefix yet: pending records alone keep the burst together."""
    replicas = await _pair(make_replica, redis_server)
    router = await make_router(redis_server)
    answers = await asyncio.gather(
        *(router.complete(prompt(*range(300, 400), 5000 + i)) for i in range(20))
    )
    assert len({answer.replica for answer in answers}) == 1
    misses = sum(replica.counters.blocks - replica.counters.hits for replica in replicas)
    assert misses == 100 + 20  # the prefix was computed once


async def test_burst_of_different_prompts_does_not_fall_on_one_replica(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """Load is booked at dispatch: the first byte would be too late."""
    replicas = await _pair(make_replica, redis_server)
    router = await make_router(redis_server)
    await asyncio.gather(
        *(router.complete(prompt(*range(1000 * i, 1000 * i + 50))) for i in range(1, 21))
    )
    assert min(replica.counters.requests for replica in replicas) >= 8


async def test_hot_prefix_spills_when_queueing_costs_more_than_recomputing(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replicas = await _pair(make_replica, redis_server)
    router = await make_router(redis_server)
    hot = (1, 2, 3, 4)
    await router.complete(prompt(*hot))
    answers = await asyncio.gather(
        *(
            router.complete(prompt(*hot, *range(10_000 + 60 * i, 10_060 + 60 * i)))
            for i in range(24)
        )
    )
    assert {answer.replica for answer in answers} == {"r0", "r1"}
    assert min(replica.counters.requests for replica in replicas) >= 6


async def test_two_routers_share_one_view_of_load(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replicas = await _pair(make_replica, redis_server)
    first, second = await make_router(redis_server), await make_router(redis_server)
    await asyncio.gather(
        *(
            (first, second)[i % 2].complete(prompt(*range(1000 * i, 1000 * i + 40)))
            for i in range(1, 25)
        )
    )
    assert min(replica.counters.requests for replica in replicas) >= 9


@pytest.mark.parametrize("policy", ["prefix", "least-load"])
async def test_second_router_avoids_what_the_first_one_booked(
    policy: str, redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """Routers that each balance their own requests alone would send half of these to the queue."""
    replicas = await _pair(make_replica, redis_server)
    first, second = [await make_router(redis_server, policy=policy) for _ in range(2)]
    long = asyncio.create_task(first.complete(prompt(*range(8000))))  # 8 s of prefill
    await eventually(lambda: sum(replica.counters.requests for replica in replicas) == 1)
    free = next(f"r{i}" for i, replica in enumerate(replicas) if not replica.counters.requests)
    answers = await asyncio.gather(
        *(second.complete(prompt(*range(10_000 * i, 10_000 * i + 20))) for i in range(1, 9))
    )
    assert {answer.replica for answer in answers} == {free}
    long.cancel()


async def test_second_router_sees_what_the_first_one_cached(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await _pair(make_replica, redis_server)
    first, second = await make_router(redis_server), await make_router(redis_server)
    cached = await first.complete(prompt(*SHARED, 1))
    again = await second.complete(prompt(*SHARED, 2))
    assert (again.replica, again.matched_tokens) == (cached.replica, len(SHARED) * 16)


async def test_eviction_reaches_the_index(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url, capacity=50)
    router = await make_router(redis_server)
    await router.complete(prompt(*range(40)))
    await router.complete(prompt(*range(1000, 1045)))

    async def forgotten() -> bool:
        return (await router.complete(prompt(*range(40)))).matched_tokens < 40 * 16

    await eventually(forgotten)


@pytest.mark.parametrize("policy", ["least-load", "round-robin", "random"])
async def test_other_policies_ignore_prefixes(
    policy: str, redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await _pair(make_replica, redis_server)
    router = await make_router(redis_server, policy=policy)
    answers = [await router.complete(prompt(*SHARED, i)) for i in range(24)]
    assert {answer.replica for answer in answers} == {"r0", "r1"}
    if policy == "round-robin":
        names = [answer.replica for answer in answers]
        assert names[::2] == names[:1] * 12
        assert names[1::2] == names[1:2] * 12


async def test_load_returns_to_zero_however_requests_end(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    (replica,) = [await make_replica(redis_url=redis_server.url, block_ms=0.1)]
    router = await make_router(redis_server, retries=0)
    await router.complete(prompt(*range(30)))
    await router.complete(prompt(*range(30)), stream=True)
    replica.behaviour.status = 500
    assert (await router.complete(prompt(*range(30)))).status == 500
    replica.behaviour.status = 200
    replica.behaviour.break_after = 1
    assert (await router.complete(prompt(*range(30)), stream=True)).cut
    replica.behaviour.break_after = None
    replica.behaviour.hang = True
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(router.complete(prompt(*range(30))), 0.3)

    client = redis.Redis.from_url(redis_server.url)

    def clean() -> bool:
        loads = [client.hgetall(key) for key in client.keys("radixgrove:{default}:load:*")]
        booked = [name for load in loads for name in load if not name.startswith(b"@")]
        return not booked and not client.hlen("radixgrove:{default}:reserved")

    await eventually(clean, what="the end of all bookings")
    assert await router.metric("radixgrove_router_requests_in_flight") == 0


async def test_replicas_of_different_lengths_get_what_fits_them_whole(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    lengths = {"short": 64, "long": 128}
    for name, length in lengths.items():
        await make_replica(redis_url=redis_server.url, replica_id=name, max_model_len=length)
    router = await make_router(redis_server)
    await eventually(partial(_knows, router, len(lengths)), what="both replicas")
    for number in range(3):
        answer = await router.complete(prompt(number, 1, 2), max_tokens=17)
        assert (answer.status, answer.replica) == (200, "long")
    shown = await router.complete(prompt(*range(8)), echo=True, max_tokens=0)
    assert (shown.status, shown.replica) == (200, "long")
    scored = await router.complete(prompt(*range(8)), echo=True, max_tokens=0, logprobs=1)
    assert scored.error["code"] == "context_length_exceeded"


async def _knows(router: Router, count: int) -> bool:
    states = [replica["state"] for replica in (await router.status())["replicas"]]
    return states == ["ready"] * count

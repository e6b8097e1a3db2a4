"""Jobs that take long: clients that give up and try again, and clients that wait."""

from __future__ import annotations

import asyncio

import aiohttp
import openai
import pytest

from radixgrove.protocol.keys import ServiceKeys
from tests.conftest import RedisServer
from tests.redis_faults import route
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import MODEL, SimulatedReplica, completion, eventually, prompt


def under_way(replica: SimulatedReplica) -> int:
    counters = replica.counters
    return counters.requests - counters.aborted - counters.finished


async def test_client_that_times_out_and_retries_has_one_job_at_a_time(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """OpenAI's client sends a job again after its timeout: the one before must have ended."""
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server)
    assert (await router.complete(prompt(1))).status == 200  # the way is warm
    replica.behaviour.token_seconds = 60.0
    client = openai.AsyncOpenAI(
        base_url=router.url + "/v1", api_key="none", timeout=2.5, max_retries=2
    )
    most = 0

    async def job() -> None:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(model=MODEL, prompt=prompt(1), max_tokens=2)

    task = asyncio.create_task(job())
    while not task.done():
        most = max(most, under_way(replica))
        await asyncio.wait([task], timeout=0.01)
    await task
    await client.close()
    await eventually(lambda: replica.counters.aborted == 3, what="the last abort")
    assert replica.counters.requests == 1 + 3
    assert most == 1

    async def idle() -> bool:
        (entry,) = (await router.status())["replicas"]
        return bool(entry["in_flight"] == 0)

    await eventually(idle, what="the router to know of it")
    replica.behaviour.token_seconds = 0.0
    assert (await router.complete(prompt(1))).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_first_byte_timeout_bounds_a_slow_answer(
    stream: bool, redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """A limit on connecting, on a request's arrival or between bytes is none on generating."""
    replica = await make_replica(redis_url=redis_server.url)
    router = await make_router(
        redis_server, connect_timeout=1.0, request_timeout=1.0, idle_timeout=1.7
    )
    replica.behaviour.tokens, replica.behaviour.token_seconds = 4, 0.5
    answer = await router.complete(prompt(1), stream=stream)
    assert answer.status == 200
    assert not answer.cut
    assert b"error" not in answer.body
    assert answer.body.count(b"tok") + answer.body.count("tök".encode()) >= 4


async def test_a_client_that_leaves_while_its_request_is_placed_gives_the_booking_back(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(redis_url=redis_server.url)
    async with route(redis_server.port) as way:
        router = await make_router(redis_url=way.url)
        assert (await router.complete(prompt(1))).status == 200  # the way is warm
        way.delay = 2.0
        async with aiohttp.ClientSession() as session:
            job = asyncio.create_task(
                session.post(router.url + "/v1/completions", json=completion(prompt(2)))
            )

            async def arrived() -> bool:
                return bool((await router.status())["in_flight"] == 1)

            await eventually(arrived, what="the request")
            job.cancel()
        sample = f'radixgrove_router_requests_total{{model="{MODEL}",status="499"}}'

        async def over() -> bool:
            return await router.metric(sample) == 1

        await eventually(over, what="the router sees it gone")
        assert replica.counters.requests == 1, "it never went to the replica"
        (entry,) = (await router.status())["replicas"]
        assert entry["in_flight"] == 0
        reserved = ServiceKeys("radixgrove", "default").reserved
        await eventually(lambda: redis_server.client.hlen(reserved) == 0, what="no reservation")

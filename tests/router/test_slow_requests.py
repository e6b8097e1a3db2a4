"""Jobs that take long: clients that give up and try again, and clients that wait."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.conftest import RedisServer
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import MODEL, SimulatedReplica, eventually, prompt


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
        base_url=router.url + "/v1", api_key="none", timeout=1.5, max_retries=2
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

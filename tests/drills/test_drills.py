"""Each ordinary fault, beside a load: no request fails, all is healthy again, memory stays.

`make test-drills`; `docs/reliability.md` has the table of what they cost.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from radixgrove.protocol import index
from radixgrove.protocol.keys import services_key
from tests.drills.stage import drill
from tests.redis_faults import REFUSALS, well
from tests.router.harness import MODEL, eventually
from tests.router.publishing import register

pytestmark = pytest.mark.drill

FAULT = 8.0  # seconds: longer than a lease


async def test_redis_dies_and_comes_back_empty(tmp_path: Path) -> None:
    async with drill(tmp_path, "Redis is killed and comes back empty") as stage:
        stage.redis.kill()
        await asyncio.sleep(FAULT)
        stage.redis.start()


async def test_redis_stands_still(tmp_path: Path) -> None:
    async with drill(tmp_path, "Redis stands still (SIGSTOP)") as stage:
        assert stage.redis.process is not None
        stage.redis.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(FAULT)
        stage.redis.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_redis_refuses_writes(tmp_path: Path, refusal: str) -> None:
    async with drill(tmp_path, f"Redis refuses writes ({refusal})") as stage:
        REFUSALS[refusal](stage.redis.client)
        await asyncio.sleep(FAULT)
        well(stage.redis.client)


async def test_redis_fails_over_and_leaves_connections_open(tmp_path: Path) -> None:
    async with drill(tmp_path, "Redis fails over, old connections stay open") as stage:
        old, new = stage.redis.client, stage.second_redis.client
        new.execute_command("REPLICAOF", "127.0.0.1", stage.redis.port)
        await eventually(
            lambda: new.info("replication").get("master_link_status") == "up", what="the copy"
        )
        new.execute_command("REPLICAOF", "NO", "ONE")
        stage.redis_route.target = stage.second_redis.port
        old.execute_command("REPLICAOF", "127.0.0.1", stage.second_redis.port)


async def test_redis_is_half_a_second_away(tmp_path: Path) -> None:
    async with drill(tmp_path, "Redis is 500 ms away") as stage:
        stage.redis_route.delay = 0.5
        await asyncio.sleep(FAULT)
        stage.redis_route.delay = 0.0


async def test_a_key_of_another_service_has_the_wrong_type(tmp_path: Path) -> None:
    async with drill(tmp_path, "A key of another service has the wrong type") as stage:
        stage.redis.client.sadd("radixgrove:services", "other")
        stage.redis.client.set("radixgrove:other:replicas", "no hash")
        await asyncio.sleep(FAULT)


async def test_a_replica_is_killed(tmp_path: Path) -> None:
    async with drill(tmp_path, "A replica is killed", cuts=True) as stage:
        stage.replicas[0].kill()
        await asyncio.sleep(FAULT)
        stage.replicas[0].start()


async def test_all_replicas_but_one_are_killed(tmp_path: Path) -> None:
    async with drill(tmp_path, "All replicas but one are killed", cuts=True) as stage:
        for replica in stage.replicas[1:]:
            replica.kill()
        await asyncio.sleep(FAULT)
        for replica in stage.replicas[1:]:
            replica.start()


async def test_a_replica_stands_still(tmp_path: Path) -> None:
    async with drill(tmp_path, "A replica stands still (SIGSTOP)", cuts=True) as stage:
        stage.replicas[0].signal(signal.SIGSTOP)
        await asyncio.sleep(2 * FAULT)
        stage.replicas[0].signal(signal.SIGCONT)


async def test_a_router_stands_still(tmp_path: Path) -> None:
    """What its clients sent waits with it."""
    async with drill(tmp_path, "A router stands still (SIGSTOP)") as stage:
        process = stage.routers[0].process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(FAULT)
        process.send_signal(signal.SIGCONT)


async def test_a_router_is_killed(tmp_path: Path) -> None:
    """What was under way through it is lost with its connections."""
    name = "A router is killed"
    async with drill(tmp_path, name, cuts=True, losses=True) as stage:
        stage.routers[0].kill()
        await asyncio.sleep(FAULT)
        await stage.routers[0].start()


async def test_a_thousand_services_come_and_go(tmp_path: Path) -> None:
    async with drill(tmp_path, "A thousand services come and die") as stage:
        client = stage.redis.client
        client.script_load(index.script("register").text)
        for number in range(1000):
            register(stage.redis, f"gone-{number}", lease_ms=1)
            await asyncio.sleep(0)
        assert len(client.keys("radixgrove:{gone-*")) > 8000
        left = lambda: client.keys("radixgrove:{gone-*")  # noqa: E731
        await eventually(lambda: not left(), deadline=90, what="the end of their keys")
        assert client.smembers(services_key("radixgrove")) == {b"default"}


async def test_prompts_of_megabytes(tmp_path: Path) -> None:
    async with drill(
        tmp_path, "Four prompts of 8 MB at a time, for a model of 8,192 tokens"
    ) as stage:
        router = stage.routers[0]
        for _ in range(3):
            answers = await asyncio.gather(
                *(router.complete("word " * 1_600_000, model=MODEL) for _ in range(4))
            )
            assert {answer.status for answer in answers} == {400}

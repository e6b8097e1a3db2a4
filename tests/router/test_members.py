"""Data-parallel members of a group: replicas to the placement, one group to fence and drain."""

from __future__ import annotations

import asyncio
import random

from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.protocol.model_table import SHARED, ModelEntry
from radixgrove.service.redis_client import connect
from tests.conftest import RedisServer
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import MODEL, Router, SimulatedReplica, eventually, prompt


async def make_group(
    make_replica: MakeReplica, server: RedisServer, name: str = "g"
) -> list[SimulatedReplica]:
    options = {"redis_url": server.url, "replica_id": name, "dp": 2}
    first = await make_replica(**options)
    return [first, await make_replica(**options, host=first)]


async def knows(router: Router, *names: str) -> None:
    async def ready() -> bool:
        replicas = (await router.status())["replicas"]
        return {r["replica"] for r in replicas if r["state"] == "ready"} == set(names)

    await eventually(ready, what=f"{names} are ready")


async def test_a_burst_stays_on_one_member_and_new_prompts_go_to_both(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    members = await make_group(make_replica, redis_server)
    router = await make_router(redis_server)
    await knows(router, "g/0", "g/1")
    shared = tuple(range(100, 140))
    await asyncio.gather(*(router.complete(prompt(*shared, tail)) for tail in range(1, 17)))
    assert sorted(member.counters.requests for member in members) == [0, 16]
    replicas = (await router.status())["replicas"]
    assert [(r["replica"], r["group"]) for r in replicas] == [("g/0", "g"), ("g/1", "g")]
    assert len({r["url"] for r in replicas}) == 1
    for first in range(1000, 1024):
        await router.complete(prompt(first))
    assert min(member.counters.requests for member in members) > 0


async def conversations(router: Router) -> None:
    """Some with a common beginning, turn after turn, in an order of chance."""
    order = random.Random(7)
    chats = [[number % 3, 1000 + 50 * number] for number in range(16)]
    for turn in range(5):
        for chat in order.sample(chats, len(chats)):
            chat += [chat[1] + 2 * turn + 1, chat[1] + 2 * turn + 2]
            await router.complete(prompt(*chat))


async def test_two_members_have_the_hits_of_two_replicas(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    rates = []
    for service, names in (("group", ["g/0", "g/1"]), ("single", ["r0", "r1"])):
        options = {"redis_url": redis_server.url, "service": service, "models": [MODEL]}
        if service == "group":
            first = await make_replica(**options, replica_id="g", dp=2)
            replicas = [first, await make_replica(**options, replica_id="g", dp=2, host=first)]
        else:
            replicas = [await make_replica(**options, replica_id=name) for name in names]
        router = await make_router(redis_server)
        await knows(router, *names)
        await conversations(router)
        blocks = sum(replica.counters.blocks for replica in replicas)
        rates.append(sum(replica.counters.hits for replica in replicas) / blocks)
        await router.stop()
        for replica in replicas:
            assert replica.publisher is not None
            await replica.publisher.close()
    assert abs(rates[0] - rates[1]) <= 0.01, rates
    assert rates[0] > 0.5


async def test_groups_are_fenced_off_as_a_whole(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """One that the table does not list, and one that is not at its pod's address."""
    listed, *outside = [
        await make_group(make_replica, redis_server, name) for name in ("new", "old", "moved")
    ]
    entry = ModelEntry(
        service="default",
        names=[MODEL],
        attempts=["new", "moved"],
        desired=2,
        urls={"new": listed[0].url, "moved": "http://10.0.0.1:8100"},
    )
    with connect(redis_server.url, 5.0) as client:
        RedisStore(client, "radixgrove").put(SHARED, 1.0, entry)
    router = await make_router(redis_server, model_table=SHARED)
    await knows(router, "new/0", "new/1")
    for first in range(1000, 1016):
        assert (await router.complete(prompt(first))).status == 200
    assert [member.counters.requests for group in outside for member in group] == [0] * 4


async def test_a_group_is_drained_by_its_name_and_a_member_by_its_own(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_group(make_replica, redis_server)
    await make_replica(redis_url=redis_server.url, replica_id="single")
    router = await make_router(redis_server)
    await knows(router, "g/0", "g/1", "single")
    for path, left in (
        ("/replicas/g%2F1/drain", ["g/0", "single"]),
        ("/replicas/g/drain", ["single"]),
        ("/replicas/g/undrain", ["g/0", "g/1", "single"]),
    ):
        assert (await router.post(path, {}, management=True)).status == 200
        await knows(router, *left)


async def test_a_group_is_drained_as_a_whole_while_redis_is_away(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_group(make_replica, redis_server)
    await make_replica(redis_url=redis_server.url, replica_id="single")
    router = await make_router(redis_server)
    await knows(router, "g/0", "g/1", "single")
    redis_server.kill()
    answer = await router.post("/replicas/g/drain", {}, management=True)
    assert answer.status == 503
    await knows(router, "single")


async def test_when_one_member_dies_the_other_is_not_asked(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    members = await make_group(make_replica, redis_server)
    single = await make_replica(redis_url=redis_server.url, replica_id="single")
    router = await make_router(redis_server, retries=1)
    await knows(router, "g/0", "g/1", "single")
    for member in members:
        member.behaviour.status = 503
    for first in range(1000, 1008):
        assert (await router.complete(prompt(first))).replica == "single"
    assert single.counters.requests == 8
    # Of each request the group has heard once.
    assert sum(member.counters.requests for member in members) <= 8

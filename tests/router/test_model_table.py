"""The operator's table says which models exist; leases say who serves them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator

import aiohttp
import pytest
import redis

from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.protocol.keys import ServiceKeys, router_key
from radixgrove.protocol.model_table import SHARED, ModelEntry, table_key
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router import fleet
from radixgrove.router.fleet import Fleet
from radixgrove.service.redis_client import connect
from radixgrove.service.redis_link import RedisLink
from tests.conftest import RedisServer
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import Answer, Router, completion, eventually, prompt

PREFIX = "radixgrove"


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with connect(redis_server.url, 5.0) as connection:
        yield connection


@pytest.fixture
def operator(client: redis.Redis) -> RedisStore:
    """The operator's own hand: the table is written as it writes it."""
    return RedisStore(client, PREFIX)


def entry(name: str, *attempts: str, desired: int = 1, wakes: bool = False) -> ModelEntry:
    return ModelEntry(
        service=f"svc-{name}",
        names=[name, f"{name}-alias"],
        attempts=list(attempts),
        desired=desired,
        wakes=wakes,
    )


async def ask(router: Router, model: str) -> Answer:
    return await router.post("/v1/completions", completion(prompt(1), model=model))


async def models(router: Router) -> list[str]:
    return [item["id"] for item in (await router.get("/v1/models")).json["data"]]


def refused_for_now(answer: Answer) -> bool:
    return (
        answer.status == 503
        and answer.error["code"] == "service_unavailable"
        and int(answer.headers["retry-after"]) >= 1
    )


async def test_known_models_without_replicas_are_503_and_unknown_ones_404(
    redis_server: RedisServer, operator: RedisStore, make_router: MakeRouter
) -> None:
    operator.put(SHARED, 1.0, entry("starting", "starting-0"))
    operator.put(SHARED, 2.0, entry("off", desired=0))
    patient, router = [
        await make_router(redis_server, ready=False, model_table=SHARED, queue_timeout=seconds)
        for seconds in (600.0, 0.2)
    ]
    expected = ["off", "off-alias", "starting", "starting-alias"]
    for one in (patient, router):
        await eventually(lambda one=one: _is(models(one), expected), what="the table's models")
    # Nothing is on its way to `off`; a replica may be to the other, so its requests are held first.
    assert refused_for_now(await ask(patient, "off"))
    held = asyncio.create_task(ask(patient, "starting"))
    sample = 'radixgrove_router_requests_held{model="starting"}'
    await eventually(lambda: _is(patient.metric(sample), 1.0), what="the request to be held")
    held.cancel()
    for model in ("starting", "starting-alias"):
        assert refused_for_now(await ask(router, model))
    unknown = await ask(router, "absent")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")
    assert (await router.get("/v1/models/off")).status == 200
    assert (await router.get("/v1/models/absent")).status == 404


async def test_router_that_has_not_read_the_table_is_not_ready_and_calls_no_model_unknown(
    redis_server: RedisServer, make_router: MakeRouter
) -> None:
    redis_server.kill()
    router = await make_router(redis_server, ready=False, model_table=SHARED)
    alone = "/readyz?without-replicas=true"
    assert (await router.get(alone)).status == 503
    assert refused_for_now(await ask(router, "starting"))
    redis_server.start()
    with connect(redis_server.url, 5.0) as connection:
        RedisStore(connection, PREFIX).put(SHARED, 1.0, entry("starting", "starting-0"))
    await eventually(lambda: router.answers(alone), what="the router is ready")
    assert (await ask(router, "absent")).status == 404


async def test_unknown_model_beside_a_single_sleeping_one_is_404_at_once(
    redis_server: RedisServer, operator: RedisStore, make_router: MakeRouter
) -> None:
    operator.put(SHARED, 1.0, entry("sleeper", desired=0, wakes=True))
    router = await make_router(redis_server, ready=False, model_table=SHARED, queue_timeout=30.0)
    await eventually(lambda: _is(models(router), ["sleeper", "sleeper-alias"]))
    async with asyncio.timeout(25):
        assert (await ask(router, "absent")).status == 404


async def test_a_rollout_to_another_model_is_served_by_old_and_new_replicas_side_by_side(
    redis_server: RedisServer,
    operator: RedisStore,
    make_replica: MakeReplica,
    make_router: MakeRouter,
) -> None:
    """Each is asked for a name that it knows; prefixes are found on those that are more."""
    operator.put(SHARED, 1.0, entry("new", "one", "two", "three"))
    replicas = [
        await make_replica(
            redis_url=redis_server.url,
            service="svc-new",
            replica_id=replica_id,
            models=names,
            namespace=names[0],
            weight_version=names[0],
            keep_bodies=True,
        )
        for replica_id, names in (
            ("one", ["old"]),
            ("two", ["new", "new-alias"]),
            ("three", ["new", "new-alias"]),
        )
    ]
    router = await make_router(redis_server, model_table=SHARED)
    blocks, served = itertools.count(), set()

    async def all_serve() -> bool:
        answer = await router.post(
            "/v1/completions", completion(prompt(next(blocks)), model="new-alias")
        )
        assert answer.status == 200
        served.add(answer.replica)
        return len(served) == len(replicas)

    await eventually(all_serve, what="each replica has served")
    asked = [{json.loads(body)["model"] for body in r.counters.bodies} for r in replicas]
    assert asked == [{"old"}, {"new-alias"}, {"new-alias"}]

    async def found_again() -> bool:
        answer = await router.complete(prompt(*range(1000, 1009)), model="new")
        return answer.replica != "one" and answer.matched_tokens > 0

    await eventually(found_again, what="a prefix on a new replica")


async def test_held_request_is_seen_by_the_operator_and_answered_once_a_replica_is_there(
    redis_server: RedisServer,
    client: redis.Redis,
    operator: RedisStore,
    make_replica: MakeReplica,
    make_router: MakeRouter,
) -> None:
    operator.put(SHARED, 1.0, entry("sleeper", desired=0, wakes=True))
    router = await make_router(redis_server, ready=False, model_table=SHARED, queue_timeout=30.0)
    await eventually(lambda: _is(models(router), ["sleeper", "sleeper-alias"]))
    held = asyncio.create_task(ask(router, "sleeper"))
    await eventually(lambda: operator.load("svc-sleeper", []).held == 1, what="the demand")
    operator.put(SHARED, 1.0, entry("sleeper", "sleeper-a1", desired=1, wakes=True))
    await make_replica(
        redis_url=redis_server.url,
        service="svc-sleeper",
        replica_id="sleeper-a1",
        models=["sleeper", "sleeper-alias"],
    )
    answer = await held
    assert (answer.status, answer.replica) == (200, "sleeper-a1")
    await eventually(lambda: operator.load("svc-sleeper", []).held == 0, what="the demand's end")
    await eventually(
        lambda: not client.exists(ServiceKeys(PREFIX, "svc-sleeper").demand),
        what="its field is gone too",
    )


async def test_a_request_that_gave_up_soon_still_wakes_its_model(
    redis_server: RedisServer, operator: RedisStore, make_router: MakeRouter
) -> None:
    operator.put(SHARED, 1.0, entry("sleeper", desired=0, wakes=True))
    router = await make_router(redis_server, ready=False, model_table=SHARED, queue_timeout=0.0)
    await eventually(lambda: _is(models(router), ["sleeper", "sleeper-alias"]))
    assert operator.load("svc-sleeper", []).held == 0
    assert refused_for_now(await ask(router, "sleeper"))
    await eventually(lambda: operator.load("svc-sleeper", []).held == 1, what="the demand")


async def test_client_that_leaves_while_held_wakes_nothing_any_more(
    redis_server: RedisServer, operator: RedisStore, make_router: MakeRouter
) -> None:
    operator.put(SHARED, 1.0, entry("sleeper", desired=0, wakes=True))
    router = await make_router(redis_server, ready=False, model_table=SHARED, queue_timeout=600.0)
    await eventually(lambda: _is(models(router), ["sleeper", "sleeper-alias"]))
    sample = 'radixgrove_router_requests_held{model="sleeper"}'
    request = asyncio.create_task(ask(router, "sleeper"))
    await eventually(lambda: _is(router.metric(sample), 1.0), what="the request to be held")
    request.cancel()
    await asyncio.wait([request])
    gone = 'radixgrove_router_requests_total{model="sleeper",status="499"}'
    await eventually(lambda: _is(router.metric(gone), 1.0), what="the request's end")
    assert await router.metric(sample) == 0.0


async def test_only_listed_attempts_serve(
    redis_server: RedisServer,
    operator: RedisStore,
    make_replica: MakeReplica,
    make_router: MakeRouter,
) -> None:
    for attempt in ("m-a1", "m-a2"):
        await make_replica(
            redis_url=redis_server.url, service="svc-m", replica_id=attempt, models=["m", "m-alias"]
        )
    await make_replica(redis_url=redis_server.url, service="svc-stray", models=["stray"])
    operator.put(SHARED, 1.0, entry("m", "m-a1"))
    router = await make_router(redis_server, model_table=SHARED, queue_timeout=0.5)
    answers = [await ask(router, "m") for _ in range(4)]
    assert {answer.replica for answer in answers} == {"m-a1"}
    assert (await ask(router, "stray")).status == 404
    operator.put(SHARED, 1.0, entry("m", "m-a2"))  # recovery has made the next attempt

    async def moved() -> bool:
        return (await ask(router, "m")).replica == "m-a2"

    await eventually(moved, what="the next attempt")
    operator.drop("svc-m")
    await eventually(lambda: _is(models(router), []), what="the model's end")
    assert (await ask(router, "m")).status == 404


async def test_elder_resource_keeps_a_name_that_two_claim(
    redis_server: RedisServer,
    operator: RedisStore,
    make_replica: MakeReplica,
    make_router: MakeRouter,
) -> None:
    for service in ("svc-a", "svc-z"):
        await make_replica(
            redis_url=redis_server.url, service=service, replica_id=f"{service}-0", models=["m"]
        )
        operator.put(
            SHARED,
            1.0 if service == "svc-z" else 2.0,
            ModelEntry(service=service, names=["m"], attempts=[f"{service}-0"], desired=1),
        )
    router = await make_router(redis_server, model_table=SHARED)
    answers = [await ask(router, "m") for _ in range(4)]
    assert {answer.replica for answer in answers} == {"svc-z-0"}


async def test_scoped_names_work_without_being_listed_and_workers_see_the_name_they_serve(
    redis_server: RedisServer,
    operator: RedisStore,
    make_replica: MakeReplica,
    make_router: MakeRouter,
) -> None:
    replicas = {}
    for number, team in enumerate(("team-a", "team-b")):
        service, bare = f"{team}.llama", ["llama"] if team == "team-a" else []
        replicas[team] = await make_replica(
            redis_url=redis_server.url, service=service, replica_id=f"{team}-0",
            models=["llama", "big"], keep_bodies=True,
        )  # fmt: skip
        listed = bare or [f"{team}/llama"]
        scoped = [f"{team}/{name}" for name in ("llama", "big", "resource")]
        operator.put(
            SHARED,
            float(number),
            ModelEntry(
                service=service,
                names=listed,
                scoped=[name for name in scoped if name not in listed],
                attempts=[f"{team}-0"],
                desired=1,
            ),
        )
    router = await make_router(redis_server, model_table=SHARED)
    await eventually(lambda: _is(models(router), ["llama", "team-b/llama"]))
    for model, team, served in (
        ("llama", "team-a", "llama"),
        ("team-a/llama", "team-a", "llama"),
        ("team-b/llama", "team-b", "llama"),
        ("team-b/resource", "team-b", "llama"),
    ):
        answer = await ask(router, model)
        assert (answer.status, answer.replica) == (200, f"{team}-0"), model
        body = json.loads(replicas[team].counters.bodies[-1])
        assert body == completion(prompt(1), model=served)
    assert (await ask(router, "big")).status == 404
    assert (await router.get("/v1/models/team-b/resource")).json["root"] == "team-b/llama"


async def test_last_table_stays_in_force_when_it_is_lost_or_malformed(
    redis_server: RedisServer,
    operator: RedisStore,
    client: redis.Redis,
    make_router: MakeRouter,
) -> None:
    operator.put(SHARED, 1.0, entry("m", desired=0))
    router = await make_router(redis_server, ready=False, model_table=SHARED)
    await eventually(lambda: _is(models(router), ["m", "m-alias"]))
    client.set(table_key(PREFIX, SHARED), b"{")
    await eventually(lambda: "malformed" in router.log.read_text(), what="the complaint")
    assert await models(router) == ["m", "m-alias"]
    client.flushall()
    operator.rewrite()
    operator.put(SHARED, 2.0, entry("new", desired=0))
    await eventually(lambda: _is(models(router), ["m", "m-alias", "new", "new-alias"]))


async def _is(work: object, expected: object) -> bool:
    return bool(await work == expected)  # type: ignore[misc]


async def test_router_waits_for_the_table_no_longer_than_its_patience(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "TABLE_PATIENCE_SECONDS", 600.0)
    settings = RouterSettings(redis_url=redis_server.url, model_table=SHARED)
    link = RedisLink(redis_server.url, router_key(PREFIX, "router"), "nothing is read")
    waiting = Fleet(settings, "router", link, aiohttp.ClientSession)
    assert not waiting.informed
    tasks = [asyncio.create_task(work) for work in (link.run(), waiting.run())]
    try:
        await link.wait_until_up(10)
        assert not waiting.informed
        monkeypatch.setattr(fleet, "TABLE_PATIENCE_SECONDS", 0.0)
        await eventually(lambda: waiting.informed, what="the router goes by what is there")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

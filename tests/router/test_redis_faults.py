"""A Redis that answers and is none to rely on: full, slow, with bad keys, or never tidied up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import redis

from radixgrove.protocol import index
from radixgrove.protocol.blocks import members
from radixgrove.protocol.keys import MEASURED, ServiceKeys, router_key, services_key
from radixgrove.protocol.registry import Lease, Registration
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router import fleet, janitor, metrics, registered
from radixgrove.router.demand import DemandReport
from radixgrove.router.exposition import metrics_text
from radixgrove.router.fleet import Fleet
from radixgrove.router.janitor import Janitor
from radixgrove.router.placement import PlacementRequest, Placer
from radixgrove.router.replicas import Breaker, Replica, Service
from radixgrove.service.cluster_directory import BlockingDirectory, ClusterDirectory
from radixgrove.service.redis_link import RedisLink
from radixgrove.worker.messages import Tier
from tests.conftest import RedisServer, find_free_port
from tests.redis_faults import REFUSALS, RedisClock, route, well
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import Router, eventually, prompt
from tests.router.publishing import HASHER, chain, register, running

PREFIX = "radixgrove"
LONG_SERVICES = 20


@contextlib.asynccontextmanager
async def linked(url: str) -> AsyncIterator[RedisLink]:
    link = RedisLink(url, router_key(PREFIX, "router"), "this is a test")
    task = asyncio.create_task(link.run())
    await link.wait_until_up(20)
    try:
        yield link
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _redis_up(router: Router) -> float:
    return await router.metric("radixgrove_router_redis_up")


def _leases_ran_out(server: RedisServer) -> bool:
    seconds, micros = server.client.time()
    now = seconds * 1000 + micros / 1000
    leases = server.client.hgetall(ServiceKeys(PREFIX, "default").leases)
    return all(Lease.unpack(lease).expires_ms < now for lease in leases.values())


async def _placed_by_redis(router: Router) -> float:
    text = (await router.get("/metrics")).body.decode()
    lines = [line for line in text.splitlines() if "placements_total{" in line]
    return sum(float(line.split()[-1]) for line in lines if 'decided="redis"' in line)


# ---- writes are refused ------------------------------------------------------------------------


async def test_requests_are_served_on_while_redis_is_full(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """Its leases ran out because nothing could renew them: they prove no replica dead."""
    replicas = [
        await make_replica(redis_url=redis_server.url, replica_id=name) for name in ("r0", "r1")
    ]
    router = await make_router(redis_server)
    assert (await router.complete(prompt(1))).status == 200
    REFUSALS["OOM"](redis_server.client)
    await eventually(lambda: _leases_ran_out(redis_server), what="the leases' end")
    assert await _redis_up(router) == 0
    answers = [await router.complete(prompt(100 + i)) for i in range(8)]
    assert [answer.status for answer in answers] == [200] * 8
    assert (await router.get("/readyz")).status == 200
    # A router that starts now asks the registered replicas themselves, too.
    second = await make_router(redis_server)
    assert (await second.complete(prompt(200))).status == 200
    # One that is gone is found out without its lease.
    await replicas[1].stop()
    replicas[1].behaviour.ready = False
    states = {"r0": "ready", "r1": "not-ready"}
    await eventually(lambda: _has_states(router, states), what="the dead replica to be noticed")

    well(redis_server.client)
    before = await _placed_by_redis(router)

    async def placed() -> bool:
        assert (await router.complete(prompt(300))).status == 200
        return await _placed_by_redis(router) > before

    await eventually(placed, what="placement by Redis")
    assert await _redis_up(router) == 1


async def _has_states(router: Router, states: dict[str, str]) -> bool:
    found = {r["replica"]: r["state"] for r in (await router.status())["replicas"]}
    return found == states


async def test_a_publisher_goes_on_where_it_was_when_redis_takes_writes_again(
    redis_server: RedisServer,
) -> None:
    async with running(redis_server.url) as engine:
        await eventually(lambda: engine.publisher.status().synchronised)
        generation = engine.publisher.status().generation
        REFUSALS["NOREPLICAS"](redis_server.client)
        await eventually(lambda: not engine.publisher.status().connected)
        assert "NOREPLICAS" in engine.publisher.status().problem
        await eventually(lambda: _leases_ran_out(redis_server))
        well(redis_server.client)
        await eventually(lambda: not _leases_ran_out(redis_server), what="the lease")
        assert engine.publisher.status().generation == generation
        await eventually(lambda: engine.publisher.status().problem == "")


# ---- slow --------------------------------------------------------------------------------------


def _service(*registrations: Registration) -> Service:
    service = Service("default", ["m"])
    replicas = [
        Replica(r.replica_id, r.url, Breaker(5, 10.0), r, ready=True) for r in registrations
    ]
    service.set_replicas({replica.id: replica for replica in replicas})
    return service


async def test_a_placement_that_comes_too_late_is_given_back(redis_server: RedisServer) -> None:
    keys = ServiceKeys(PREFIX, "default")
    async with (
        running(redis_server.url) as engine,
        route(redis_server.port) as way,
        linked(way.url) as link,
    ):
        found = Registration.decode(redis_server.client.hget(keys.replicas, "r0"))
        service = _service(found)
        patient = Placer(RouterSettings(redis_timeout=10.0), "router", link)
        ask = PlacementRequest(161, members(chain(1, 10), HASHER.domain64("local")), 16)
        placed = await patient.place(service, ask)
        assert placed is not None
        assert placed.decided == "redis"
        patient.release(placed)
        way.delay = 1.0
        placer = Placer(RouterSettings(redis_timeout=0.05), "router", link)
        late = await placer.place(service, ask)
        assert late is not None
        assert late.decided == "degraded"
        load = keys.load(engine.publisher.status().generation)
        await eventually(lambda: redis_server.client.hlen(keys.reserved) > 0, what="the booking")
        await eventually(lambda: redis_server.client.hlen(keys.reserved) == 0, what="its end")
        await eventually(lambda: not redis_server.client.hexists(load, "router"))
        placer.release(late)
        assert service.replicas["r0"].in_flight == 0


async def test_a_redis_that_is_slow_all_the_time_is_not_asked(redis_server: RedisServer) -> None:
    async with (
        running(redis_server.url) as engine,
        route(redis_server.port) as way,
        linked(way.url) as link,
    ):
        keys = ServiceKeys(PREFIX, "default")
        found = Registration.decode(redis_server.client.hget(keys.replicas, "r0"))
        service, placer = _service(found), Placer(RouterSettings(), "router", link)
        way.delay = 0.2
        await eventually(lambda: link.round_trip >= 0.2)
        ask = PlacementRequest(10, b"", 16)
        decisions = [await placer.place(service, ask) for _ in range(5)]
        assert [d.decided for d in decisions if d is not None] == ["degraded"] * 5
        assert redis_server.client.hlen(keys.reserved) == 0
        assert link.up  # its heartbeats are taken all the same
        way.delay = 0.0
        await eventually(lambda: link.round_trip < 0.05)

        async def by_redis() -> bool:
            engine.pulse()  # one that is late for long counts as stuck
            decision = await placer.place(service, ask)
            return decision is not None and decision.decided == "redis"

        await eventually(by_redis)


async def test_services_are_looked_at_side_by_side(redis_server: RedisServer) -> None:
    """One after the other, twenty of them at half a second would outlast a lease."""
    async with contextlib.AsyncExitStack() as stack:
        for number in range(LONG_SERVICES):
            await stack.enter_async_context(running(redis_server.url, service=f"s{number}"))
        way = await stack.enter_async_context(route(redis_server.port))
        way.delay = 0.5
        link = await stack.enter_async_context(linked(way.url))
        settings = RouterSettings(redis_url=way.url, cluster_secret="secret")
        fleet = Fleet(settings, "router", link, aiohttp.ClientSession)
        placer = Placer(settings, "router", link)
        following = asyncio.create_task(fleet.run())
        try:
            await eventually(lambda: len(list(fleet.services)) == LONG_SERVICES, deadline=8)
            assert fleet.ready()
            async with asyncio.timeout(8):
                await placer.heartbeat(fleet.services)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    names = [ServiceKeys(PREFIX, f"s{number}").routers for number in range(LONG_SERVICES)]
    assert redis_server.client.exists(*names) == LONG_SERVICES


async def test_counts_of_replicas_and_models_that_are_gone_end(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registered, "REMEMBER_SECONDS", 1.0)
    monkeypatch.setattr(fleet, "MEMORY_SECONDS", 0.0)
    monkeypatch.setattr(fleet, "MODEL_MEMORY_SECONDS", 0.0)
    async with linked(redis_server.url) as link:
        settings = RouterSettings(redis_url=redis_server.url, cluster_secret="secret")
        followed = Fleet(settings, "router", link, aiohttp.ClientSession)
        following = asyncio.create_task(followed.run())
        try:
            async with running(redis_server.url):
                await eventually(followed.ready)
                metrics.series(metrics.PLACEMENTS, "r0", "redis").inc()
                metrics.HELD.labels("m").inc()
                metrics.series(metrics.REQUESTS, "m", 200).inc()
                metrics.series(metrics.FIRST_BYTE_SECONDS, "m").observe(1.0)
                assert b'replica="r0"' in metrics_text()
                assert b'model="m"' in metrics_text()
            await eventually(lambda: b'replica="r0"' not in metrics_text(), what="the counts' end")
            await eventually(lambda: b'model="m"' not in metrics_text(), what="the model's end")
            metrics.series(metrics.REQUESTS, "m", 200).inc()
            assert b'model="m",status="200"} 1.0' in metrics_text()
            metrics.forget_counts("m")
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


# ---- bad keys ----------------------------------------------------------------------------------


async def test_a_bad_key_harms_its_own_service_only(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url, replica_id="r0")
    router = await make_router(redis_server)
    client = redis_server.client
    client.sadd(services_key(PREFIX), "aaa", b"\xff\xfe")
    client.set(ServiceKeys(PREFIX, "aaa").leases, "no hash")
    client.hset(ServiceKeys(PREFIX, "default").replicas, "r9", b'{"url": "http://[half"}')
    client.hset(ServiceKeys(PREFIX, "default").leases, b"\xff", b"no lease")
    await eventually(lambda: "'aaa' cannot be read" in router.log.read_text())
    await make_replica(redis_url=redis_server.url, replica_id="r1")
    states = {"r0": "ready", "r1": "ready"}
    await eventually(lambda: _has_states(router, states), what="the new replica")
    await eventually(lambda: not client.sismember(services_key(PREFIX), b"\xff\xfe"))
    assert (await router.complete(prompt(1))).status == 200
    assert await _redis_up(router) == 1


async def test_a_shared_set_of_the_wrong_type_leaves_what_is_known(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url, replica_id="r0")
    router = await make_router(redis_server)
    redis_server.client.set(services_key(PREFIX), "no set")
    await eventually(lambda: "services cannot be read" in router.log.read_text())
    # Its lease is followed on: were it not, it would have run out.
    await eventually(lambda: _seen_again(router, redis_server))
    assert (await router.complete(prompt(1))).status == 200


async def _seen_again(router: Router, server: RedisServer) -> bool:
    return await _has_states(router, {"r0": "ready"}) and not _leases_ran_out(server)


async def test_a_worker_that_cannot_join_the_shared_set_has_its_lease_all_the_same(
    redis_server: RedisServer,
) -> None:
    """Routers with a model table do not need the set; it is joined once that can be."""
    client, services = redis_server.client, services_key(PREFIX)
    client.set(services, "no set")
    async with running(redis_server.url) as engine:
        await eventually(lambda: engine.publisher.status().registered, what="the registration")
        generation = engine.publisher.status().generation
        client.delete(services)
        await eventually(lambda: client.smembers(services) == {b"default"}, what="the service")
        assert engine.publisher.status().generation == generation


async def test_listed_services_are_cleaned_up_beside_a_shared_set_of_the_wrong_type(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "LEASE_GRACE_SECONDS", 0.0)
    client = redis_server.client
    keys, _ = register(redis_server, "s0", 1)
    client.delete(services_key(PREFIX))
    client.set(services_key(PREFIX), "no set")
    async with linked(redis_server.url) as link:
        tidy = Janitor(link, PREFIX, lambda: ["s0"])
        await eventually(lambda: _cleaned(tidy, client, keys), what="the end of its keys")


async def _cleaned(tidy: Janitor, client: redis.Redis, keys: ServiceKeys) -> bool:
    await tidy.clean()
    return not client.exists(keys.leases, keys.replicas, keys.identity)


async def test_a_demand_that_redis_refuses_leaves_others_alone(redis_server: RedisServer) -> None:
    """What holds requests for a service that sleeps is what wakes it."""
    client = redis_server.client
    demands = [ServiceKeys(PREFIX, name).demand for name in ("aaa", "bbb")]
    services = [Service(name, [name], held=1) for name in ("aaa", "bbb")]
    client.set(demands[0], "no hash")
    report = DemandReport(PREFIX, "router")
    async with linked(redis_server.url) as link:
        await report.send(link, services)
        assert client.hkeys(demands[1]) == [b"router"]
        client.delete(demands[0])
        await report.send(link, services)
        assert client.hkeys(demands[0]) == [b"router"]


NESTED = b"[" * 100_000
INFINITE = Lease._HEAD.pack(1e15, 1) + struct.pack("<IIIIIddd", 0, 0, 0, 0, 0, math.inf, 0, 0)


async def test_entries_that_make_no_sense_harm_nothing_but_themselves(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """As a pod may write them that has the rights of its own namespace alone."""
    await make_replica(redis_url=redis_server.url, replica_id="r0")
    router = await make_router(redis_server)
    client = redis_server.client
    for measured in (NESTED, b'"\xff'):
        keys, entry = register(redis_server, "aaa", 50_000)
        client.hset(keys.load(entry.generation), MEASURED, measured)
    client.hset(keys.replicas, mapping={"r8": NESTED, "r9": b'{"engine": ' + NESTED})
    client.hset(keys.leases, "infinite", INFINITE)
    client.hset(keys.demand, "router", NESTED)
    await eventually(lambda: "malformed entries of service 'aaa'" in router.log.read_text())
    await make_replica(redis_url=redis_server.url, replica_id="r1")
    states = {"r0": "ready", "r1": "ready"}
    await eventually(lambda: _has_ready(router, states), what="the new replica")
    assert (await router.complete(prompt(1))).status == 200


async def test_entries_without_end_are_not_read(redis_server: RedisServer) -> None:
    """Nor many of them: one service must not fill the memory of what reads all services."""
    keys, entry = register(redis_server, "aaa", 50_000)
    client, long = redis_server.client, b"x" * (8 << 20)
    client.hset(keys.load(entry.generation), mapping={MEASURED: long, "other": long})
    client.hset(keys.replicas, mapping={b"r8": long, long: b"{}"})
    client.hset(keys.leases, mapping={f"many-{number}": long[:60_000] for number in range(200)})
    client.hset(keys.demand, "router", long)
    async with linked(redis_server.url) as link:
        before = client.info("stats")["total_net_output_bytes"]
        record = await ClusterDirectory(link, PREFIX).service("aaa", measured=True)
        blocking = BlockingDirectory(client, PREFIX)
        again = blocking.service("aaa")
        assert blocking.demand("aaa") == {}
        sent = client.info("stats")["total_net_output_bytes"] - before
    for seen in (record, again):
        assert list(seen.registrations) == [entry.replica_id]
        assert seen.malformed >= 2 + 200
    assert not record.measured
    assert sent < 2 * (9 << 20)


async def _has_ready(router: Router, states: dict[str, str]) -> bool:
    found = {r["replica"]: r["state"] for r in (await router.status())["replicas"]}
    return found.items() >= states.items()


# ---- its clock ---------------------------------------------------------------------------------


@pytest.fixture
def clock(tmp_path: Path) -> RedisClock:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler for a clock that can be set")
    return RedisClock(tmp_path)


async def test_a_clock_that_is_set_forward_costs_no_index(
    tmp_path: Path, clock: RedisClock
) -> None:
    """All leases have ended at once, and none of their owners."""
    with RedisServer(tmp_path, environment=clock.environment) as server:
        keys, entry = register(server, "s0", 50_000)
        async with linked(server.url) as link:
            link.since = time.monotonic() - 100.0
            tidy = Janitor(link, PREFIX)
            await tidy.clean()
            assert link.settled
            clock.set_forward(3600)
            await tidy.clean()
            assert not link.settled
            assert server.client.exists(keys.tree("gpu", entry.generation))
            link.since = time.monotonic() - 100.0  # since then each could have renewed its own
            await tidy.clean()
            assert not server.client.exists(keys.tree("gpu", entry.generation))


async def test_a_lease_from_before_the_clock_was_set_back_is_none(
    tmp_path: Path, clock: RedisClock
) -> None:
    """Its owner may have died: one that lives has another by now."""
    with RedisServer(tmp_path, environment=clock.environment) as server:
        keys, entry = register(server, "default", 50_000)
        async with linked(server.url) as link:
            directory = ClusterDirectory(link, PREFIX)
            placer = Placer(RouterSettings(redis_timeout=10.0), "router", link)
            ask, service = PlacementRequest(10, b"", 16), _service(entry)
            assert (await directory.service("default")).lease_of(entry) is not None
            assert await placer.place(service, ask) is not None
            clock.set_forward(-3600)
            assert (await directory.service("default")).lease_of(entry) is None
            link.since = time.monotonic() - 100.0
            assert await placer.place(service, ask) is None
            await placer.heartbeat([service])
            server.client.zadd(keys.routers, {"died": 1000.0 * (time.time() + 5.0)})
            await placer.heartbeat([service])
            assert server.client.zrange(keys.routers, 0, -1) == [b"router"]


# ---- every key has an end ----------------------------------------------------------------------


async def test_a_thousand_services_that_came_and_went_leave_nothing(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them left, half of them died; no model table lists any."""
    monkeypatch.setattr(janitor, "LEASE_GRACE_SECONDS", 0.0)
    client = redis_server.client
    async with linked(redis_server.url) as link:
        tidy = Janitor(link, PREFIX)
        await tidy.clean()
        client.script_load(index.script("register").text)
        before, memory = set(client.keys()), client.info("memory")["used_memory"]
        for number in range(1000):
            leaves = number % 2 == 0
            keys, entry = register(redis_server, f"s{number}", 60_000 if leaves else 1)
            if leaves:
                client.eval(
                    index.script("unregister").text,
                    *(2, keys.replicas, keys.leases, "r0", entry.generation),
                )
        await tidy.measure()
        assert len(client.keys()) > 8000
        assert client.info("memory")["used_memory"] > memory + (1 << 20)
        await tidy.clean()
        assert set(client.keys()) == before
        # Its table of keys shrinks, and buffers go, a while later.
        await eventually(lambda: client.info("memory")["used_memory"] < memory + (1 << 18))


async def test_a_service_that_lives_is_left_alone(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(janitor, "LEASE_GRACE_SECONDS", 0.0)
    async with running(redis_server.url) as engine, linked(redis_server.url) as link:
        engine.change(True, Tier.GPU, chain(1, 3))
        await eventually(lambda: engine.in_step(redis_server.client))
        before = set(redis_server.client.keys())
        await Janitor(link, PREFIX).clean()
        assert set(redis_server.client.keys()) == before
        assert redis_server.client.smembers(services_key(PREFIX)) == {b"default"}


async def test_leases_that_ran_out_while_redis_was_away_cost_no_index(
    redis_server: RedisServer,
) -> None:
    """After an outage longer than the grace, a worker needs a moment to renew its lease."""
    register(redis_server, "s0", 1)
    keys = ServiceKeys(PREFIX, "s0")
    async with linked(redis_server.url) as link:
        lease = redis_server.client.hgetall(keys.leases).popitem()
        record = Lease._HEAD.pack(1.0, 1) + lease[1][Lease._HEAD.size :]
        redis_server.client.hset(keys.leases, lease[0], record)
        await Janitor(link, PREFIX).clean()
        assert redis_server.client.hlen(keys.leases) == 1
        link.since = time.monotonic() - janitor.LEASE_GRACE_SECONDS - 1
        await Janitor(link, PREFIX).clean()
    assert redis_server.client.hlen(keys.leases) == 0


async def test_what_routers_write_ends_with_them(redis_server: RedisServer) -> None:
    keys = ServiceKeys(PREFIX, "default")
    async with running(redis_server.url) as engine, linked(redis_server.url) as link:
        found = Registration.decode(redis_server.client.hget(keys.replicas, "r0"))
        settings = RouterSettings(redis_timeout=10.0)
        service, placer = _service(found), Placer(settings, "router", link)
        assert await placer.place(service, PlacementRequest(10, b"", 16)) is not None
        await placer.heartbeat([service])
        load = keys.load(engine.publisher.status().generation)
        for key in (keys.routers, keys.reserved, load, router_key(PREFIX, "router")):
            assert 0 < redis_server.client.pttl(key) <= 60_000, key


async def test_bookings_of_which_a_router_was_never_informed_end(redis_server: RedisServer) -> None:
    """Their answers, or what was to end them, were lost with a connection."""
    keys = ServiceKeys(PREFIX, "default")
    async with running(redis_server.url) as engine, linked(redis_server.url) as link:
        found = Registration.decode(redis_server.client.hget(keys.replicas, "r0"))
        settings = RouterSettings(redis_timeout=10.0)
        service, placer = _service(found), Placer(settings, "router", link)
        placed = await placer.place(service, PlacementRequest(10, b"", 16))
        assert placed is not None
        generation, now = engine.publisher.status().generation, int(1000 * time.time())
        for router in ("router", "another"):
            entry = f"{router} 20 {generation} 1 {now}"
            redis_server.client.hset(keys.reserved, f"{router}-lost", entry)
        await placer.heartbeat([service])
        left = {placed.reservation.encode(), b"another-lost"}
        assert set(redis_server.client.hkeys(keys.reserved)) == left


async def test_bookings_whose_answer_or_release_a_connection_took_with_it_end(
    redis_server: RedisServer,
) -> None:
    keys = ServiceKeys(PREFIX, "default")
    ask = PlacementRequest(10, b"", 16)
    async with (
        running(redis_server.url),
        route(redis_server.port) as way,
        linked(way.url) as link,
    ):
        found = Registration.decode(redis_server.client.hget(keys.replicas, "r0"))
        service, placer = _service(found), Placer(RouterSettings(redis_timeout=10), "router", link)
        ended = await placer.place(service, ask)
        going_on = await placer.place(service, ask)
        assert ended is not None
        assert going_on is not None
        way.delay = 60.0
        placing = asyncio.create_task(placer.place(service, ask))
        await eventually(lambda: redis_server.client.hlen(keys.reserved) == 3)
        way.cut()
        unanswered = await placing
        assert unanswered is not None
        assert unanswered.decided == "degraded"
        placer.release(ended)
        assert redis_server.client.hlen(keys.reserved) == 3
        way.delay = 0.0
        await link.wait_until_up(20)
        await placer.heartbeat([service])
    assert redis_server.client.hkeys(keys.reserved) == [going_on.reservation.encode()]


async def test_how_full_redis_is_can_be_seen(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    redis_server.client.config_set("maxmemory", str(1 << 30))
    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server)
    limit = "radixgrove_router_redis_max_bytes"

    async def knows_limit() -> bool:
        return await router.metric(limit) == 1 << 30

    await eventually(knows_limit)
    assert await router.metric("radixgrove_router_redis_keys") > 0
    assert 0 < await router.metric("radixgrove_router_redis_used_bytes") < 1 << 30


# ---- tasks and processes -----------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["ends", "fails"])
def test_a_task_that_ends_is_the_end_of_the_router(outcome: str, tmp_path: Path) -> None:
    program = f"""
import sys
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router.fleet import Fleet
from radixgrove.router.main import run_process
async def run(self):
    if {outcome!r} == "fails":
        raise ValueError("unforeseen")
Fleet.run = run
sys.exit(run_process(RouterSettings(port=0, management_port={find_free_port()}), 0, None))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "one of its tasks did" in done.stderr


def test_gauges_count_living_processes_only(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}

    def python(program: str) -> str:
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    ended = """
from radixgrove.router import metrics
metrics.IN_FLIGHT.set(7)
metrics.REPLICAS.labels("m", "ready").set(2)
metrics.REDIS_UP.set(0)
metrics.RETRIES.labels("connect").inc()
"""
    python(ended)
    living = """
from radixgrove.router import metrics
from radixgrove.router.exposition import metrics_text
metrics.IN_FLIGHT.set(1)
metrics.REPLICAS.labels("m", "ready").set(0)
metrics.REDIS_UP.set(1)
print(metrics_text().decode())
"""
    lines = python(living).splitlines()
    assert "radixgrove_router_requests_in_flight 1.0" in lines
    assert 'radixgrove_router_replicas{model="m",state="ready"} 0.0' in lines
    assert "radixgrove_router_redis_up 1.0" in lines
    assert 'radixgrove_router_retries_total{reason="connect"} 1.0' in lines  # counters go on

"""Model tables, leases and demand on a real Redis."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.protocol.keys import ServiceKeys
from radixgrove.protocol.model_table import (
    SHARED,
    Demand,
    ModelEntry,
    ModelTable,
    table_key,
)
from radixgrove.protocol.registry import EngineInfo, Lease, LeaseState, LoadReport, Registration
from radixgrove.service.redis_client import WrongType, connect
from radixgrove.service.redis_rules import RedisUnavailable
from tests.conftest import RedisServer

PREFIX = "radixgrove"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


def side(server: RedisServer) -> RedisStore:
    return RedisStore(connect(f"redis://127.0.0.1:{server.port}/0", 2.0), PREFIX)


def entry(service: str, *attempts: str, name: str = "m") -> ModelEntry:
    return ModelEntry(service=service, names=[name], attempts=list(attempts), desired=1)


def table(server: RedisServer, name: str = SHARED) -> list[ModelEntry]:
    data = server.client.get(table_key(PREFIX, name))
    assert isinstance(data, bytes)
    return ModelTable.decode(data).entries


def test_routers_see_what_was_put_and_older_resources_come_first(server: RedisServer) -> None:
    operator = side(server)
    operator.put(SHARED, 2.0, entry("ns.young", "y-0"))
    operator.put(SHARED, 1.0, entry("ns.old", "o-0"))
    assert [found.service for found in table(server)] == ["ns.old", "ns.young"]


def test_a_new_leader_keeps_what_it_has_not_looked_at_yet(server: RedisServer) -> None:
    side(server).put(SHARED, 1.0, entry("ns.a", "a-0"))
    side(server).put(SHARED, 2.0, entry("ns.b", "b-0"))
    assert {found.service for found in table(server)} == {"ns.a", "ns.b"}


def test_deleted_services_leave_the_table(server: RedisServer) -> None:
    side(server).put(SHARED, 1.0, entry("ns.a", "a-0"))
    heir = side(server)
    heir.keep_only({"ns.b"})
    assert table(server) == []
    heir.put(SHARED, 1.0, entry("ns.b", "b-0"))
    heir.drop("ns.b")
    assert table(server) == []


def test_a_service_that_gets_its_own_router_leaves_the_shared_one(server: RedisServer) -> None:
    operator = side(server)
    operator.put(SHARED, 1.0, entry("ns.a", "a-0"))
    operator.put("ns.a", 1.0, entry("ns.a", "a-0"))
    assert table(server) == []
    assert [found.service for found in table(server, "ns.a")] == ["ns.a"]


def test_a_redis_that_lost_its_memory_gets_the_table_back(server: RedisServer) -> None:
    operator = side(server)
    operator.put(SHARED, 1.0, entry("ns.a", "a-0"))
    server.client.flushall()
    operator.rewrite()
    assert [found.service for found in table(server)] == ["ns.a"]


def test_an_empty_table_is_written_too(server: RedisServer) -> None:
    operator = side(server)
    operator.keep_only(set())
    operator.rewrite()
    assert server.client.exists(table_key(PREFIX, SHARED))
    assert table(server) == []


def test_a_new_leader_before_an_empty_redis_writes_no_half_table(server: RedisServer) -> None:
    operator = side(server)
    operator.expect({"ns.a", "ns.b", "ns.c"})
    operator.put(SHARED, 1.0, entry("ns.a", "a-0"))
    operator.drop("ns.c")
    operator.rewrite()
    assert not server.client.exists(table_key(PREFIX, SHARED))
    operator.put(SHARED, 2.0, entry("ns.b", "b-0"))
    assert [found.service for found in table(server)] == ["ns.a", "ns.b"]


def test_a_new_leader_goes_on_with_the_table_that_is_there(server: RedisServer) -> None:
    side(server).put(SHARED, 1.0, entry("ns.b", "b-0"))
    heir = side(server)
    heir.expect({"ns.a", "ns.b"})
    heir.put(SHARED, 2.0, entry("ns.a", "a-0"))
    assert {found.service for found in table(server)} == {"ns.a", "ns.b"}


def test_a_malformed_table_is_made_anew(server: RedisServer) -> None:
    server.client.set(table_key(PREFIX, SHARED), b"\xff not a table")
    side(server).put(SHARED, 1.0, entry("ns.a", "a-0"))
    assert [found.service for found in table(server)] == ["ns.a"]


def test_what_could_not_be_written_is_tried_again(server: RedisServer) -> None:
    operator = side(server)
    operator.put(SHARED, 1.0, entry("ns.a", "a-0"))
    server.client.config_set("maxmemory", "1")
    for _ in range(2):
        with pytest.raises(RedisUnavailable):
            operator.put(SHARED, 1.0, entry("ns.a", "a-0", "a-1"))
    server.client.config_set("maxmemory", "0")
    operator.put(SHARED, 1.0, entry("ns.a", "a-0", "a-1"))
    assert table(server)[0].attempts == ["a-0", "a-1"]


def register(server: RedisServer, replica: str, lease: Lease, **member: Any) -> None:
    keys = ServiceKeys(PREFIX, "ns.a")
    registration = Registration(
        replica_id=replica, service="ns.a", url="http://10.0.0.1:8100", models=["m"], namespace="n",
        root="r", index_block=16, tokenizer_digest="t", generation=f"g-{replica}",
        engine=EngineInfo(page_size=16, max_model_len=100, max_running=16), **member,
    )  # fmt: skip
    head = Lease._HEAD.pack(lease.expires_ms, int(lease.state)) + lease.report.pack()
    server.client.hset(keys.replicas, replica, registration.encode())
    server.client.hset(keys.leases, registration.generation, head)


def test_load_counts_living_replicas_that_the_table_lists(server: RedisServer) -> None:
    future = time.time() * 1000 + 60_000
    report = LoadReport(running=3, waiting=2, pages_total=100, pages_free=25)
    register(server, "a-0", Lease(future, LeaseState.READY, report))
    register(server, "b-0", Lease(future, LeaseState.DRAINING, report))
    register(server, "c-0", Lease(1.0, LeaseState.READY, report))
    register(server, "old-0", Lease(future, LeaseState.READY, report))
    now_ms = int(time.time() * 1000)
    for router, held, at in (("r1", 4, now_ms), ("r2", 1, now_ms), ("gone", 9, now_ms - 60_000)):
        value = Demand(held=held, at_ms=at).encode()
        server.client.hset(ServiceKeys(PREFIX, "ns.a").demand, router, value)
    found = side(server).load("ns.a", ["a-0", "b-0", "c-0"])
    assert (found.replicas, found.running, found.waiting, found.held) == (1, 3, 2, 5)
    assert found.kv_used == pytest.approx(0.75)
    assert found.slots == 16


def test_members_of_a_group_are_one_replica_to_the_autoscaler(server: RedisServer) -> None:
    future = time.time() * 1000 + 60_000
    report = LoadReport(running=3, pages_total=100, pages_free=25)
    for dp_rank in range(2):
        lease = Lease(future, LeaseState.READY, report)
        register(server, f"a-0/{dp_rank}", lease, group="a-0", dp_rank=dp_rank, dp=2)
    found = side(server).load("ns.a", ["a-0"])
    assert (found.replicas, found.running, found.slots) == (1, 6, 32)
    assert side(server).holds_lease("ns.a", "a-0")
    assert not side(server).holds_lease("ns.a", "a-0/1"), "a member is no group"
    ready = LeaseState.READY
    assert side(server).members("ns.a") == {"a-0": {"a-0/0": ready, "a-0/1": ready}}


def test_demands_of_routers_that_died_long_ago_are_swept(server: RedisServer) -> None:
    now_ms = int(time.time() * 1000)
    for router, at in (("here", now_ms), ("gone", now_ms - 3_600_000)):
        value = Demand(held=1, at_ms=at).encode()
        server.client.hset(ServiceKeys(PREFIX, "ns.a").demand, router, value)
    server.client.hset(ServiceKeys(PREFIX, "ns.a").demand, "nonsense", b"{")
    assert side(server).load("ns.a", []).held == 1
    assert server.client.hkeys(ServiceKeys(PREFIX, "ns.a").demand) == [b"here"]


def test_a_key_of_the_wrong_type_is_no_outage(server: RedisServer) -> None:
    """It harms itself alone: what is the operator's is made anew."""
    report = LoadReport(running=3, pages_total=100, pages_free=25)
    register(server, "a-0", Lease(time.time() * 1000 + 60_000, LeaseState.READY, report))
    server.client.set(ServiceKeys(PREFIX, "ns.a").demand, "no hash")
    operator = side(server)
    assert (operator.load("ns.a", ["a-0"]).running, operator.load("ns.a", []).held) == (3, 0)
    assert not server.client.exists(ServiceKeys(PREFIX, "ns.a").demand)
    for heal in (lambda: operator.put(SHARED, 1.0, entry("ns.a", "a-0")), operator.rewrite):
        server.client.delete(table_key(PREFIX, SHARED))
        server.client.hset(table_key(PREFIX, SHARED), "no", "table")
        heal()
        assert [found.service for found in table(server)] == ["ns.a"]
    server.client.set(ServiceKeys(PREFIX, "ns.b").leases, "no hash")
    with pytest.raises(WrongType):
        operator.load("ns.b", [])


def test_a_lease_is_held_until_it_expires(server: RedisServer) -> None:
    report = LoadReport()
    register(server, "a-0", Lease(time.time() * 1000 + 60_000, LeaseState.NOT_READY, report))
    register(server, "b-0", Lease(1.0, LeaseState.READY, report))
    operator = side(server)
    assert operator.holds_lease("ns.a", "a-0")
    assert not operator.holds_lease("ns.a", "b-0")
    assert not operator.holds_lease("ns.a", "never-there")


def test_redis_away_is_said(server: RedisServer, tmp_path: Path) -> None:
    operator = RedisStore(connect("redis://127.0.0.1:1/0", 0.2), PREFIX)
    with pytest.raises(RedisUnavailable):
        operator.put(SHARED, 1.0, entry("ns.a", "a-0"))
    with pytest.raises(RedisUnavailable):
        operator.load("ns.a", [])


def test_a_dedicated_routers_table_goes_with_its_service(server: RedisServer) -> None:
    operator = side(server)
    for name in ("ns.a", "ns.b"):
        operator.put(name, 1.0, entry(name, "a-0"))
    operator.drop("ns.a")
    assert not server.client.exists(table_key(PREFIX, "ns.a"))
    heir = side(server)  # of a leader that ended before it could drop the other one
    heir.keep_only(set())
    heir.rewrite()
    assert not server.client.exists(table_key(PREFIX, "ns.b"))


def test_a_replica_of_the_release_before_is_read(server: RedisServer) -> None:
    from tests.protocol.test_registry import OLD

    keys = ServiceKeys(PREFIX, "ns.a")
    lease = Lease(time.time() * 1000 + 60_000, LeaseState.READY, LoadReport(running=2))
    head = Lease._HEAD.pack(lease.expires_ms, int(lease.state)) + lease.report.pack()
    server.client.hset(keys.replicas, "r0", msgspec.json.encode(OLD))
    server.client.hset(keys.leases, OLD["generation"], head)
    assert side(server).holds_lease("ns.a", "r0")
    found = side(server).load("ns.a", ["r0"])
    assert (found.running, found.slots) == (2, 64)

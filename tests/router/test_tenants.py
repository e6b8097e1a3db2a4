"""Namespaces before one router and one Redis: what a pod of one can do to the models of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.cluster.redis_users import RedisUsers, UsersRefused
from radixgrove.operator.kube.keys import Keys, Phase, with_user
from radixgrove.protocol.keys import ServiceKeys, services_key
from radixgrove.protocol.model_table import SHARED, ModelEntry, ModelTable, table_key
from radixgrove.protocol.tenancy import ROUTER, NamespaceKeys, derive, user_name
from radixgrove.service.redis_client import connect
from tests.conftest import RedisServer
from tests.operator.memory_kube import MemoryKube
from tests.operator.operator_builders import CONFIG
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import Router, completion, eventually, prompt

PREFIX = "radixgrove"
VICTIM, ATTACKER = "team-a.llama", "team-b.llama"
SERVICES = {"team-a": {VICTIM}, "team-b": {ATTACKER}}


@dataclass
class Installation:
    """The operator's hands, and what it gives to namespaces."""

    server: RedisServer
    keys: Keys
    store: RedisStore
    users: RedisUsers
    namespaces: Mapping[str, set[str]]

    def url(self, who: str) -> str:
        password = derive(self.root_key, "redis", who)
        return with_user(self.server.url, user_name(PREFIX, who), password)

    @property
    def root_key(self) -> str:
        return self.keys.ensure()["root-key"]

    def put(self, table: str, service: str, replica: Any, **fields: Any) -> None:
        namespace, _, name = service.partition(".")
        known: dict[str, Any] = {
            "names": [f"{namespace}/{name}"],
            "attempts": [f"{service}-0"],
            "namespace": namespace,
            "urls": {f"{service}-0": replica.url},
        }
        self.store.put(table, 1.0, ModelEntry(service=service, desired=1, **known | fields))

    def replica(self, service: str, phase: Phase = Phase.OWN, **options: Any) -> dict[str, Any]:
        """Options of a replica that has what the pods of its namespace have."""
        given = self.keys.of(service.partition(".")[0], phase)
        url = self.url(service.partition(".")[0]) if phase is Phase.OWN else self.server.url
        return {
            "redis_url": url, "service": service, "replica_id": f"{service}-0",
            "models": ["llama"], "secret": given["cluster-secret"].encode(),
            "internal_key": given["internal-key"],
        } | options  # fmt: skip


@pytest.fixture
def installation(redis_server: RedisServer) -> Iterator[Installation]:
    settings = CONFIG.redis.model_copy(update={"url": redis_server.url})
    keys = Keys(MemoryKube(), CONFIG.model_copy(update={"redis": settings}))
    with connect(redis_server.url, 5.0) as client:
        users = RedisUsers(client, keys, settings)
        users.keep(SERVICES)
        yield Installation(redis_server, keys, RedisStore(client, PREFIX), users, SERVICES)


async def shared_router(made: Installation, make_router: MakeRouter, **settings: Any) -> Router:
    return await make_router(
        redis_url=made.url(ROUTER), root_key=made.root_key, model_table=SHARED,
        internal_key=made.keys.ensure()["internal-key"],
        cluster_secret=made.keys.ensure()["cluster-secret"], **settings,
    )  # fmt: skip


async def answered_by(router: Router, model: str) -> str:
    answer = await router.post("/v1/completions", completion(prompt(1), model=model))
    return answer.replica if answer.status == 200 else str(answer.status)


def take_over(client: redis.Redis, target: str) -> None:
    """What a pod of team-b tries: routers are to send it what is meant for team-a."""
    attacker = ModelEntry(
        service=ATTACKER, names=["team-a/llama"], attempts=[f"{ATTACKER}-0"], desired=1,
        namespace="team-b", urls={f"{ATTACKER}-0": target},
    )  # fmt: skip
    client.set(table_key(PREFIX, SHARED), ModelTable(entries=[attacker]).encode())


async def test_a_pod_that_has_all_of_redis_answers_for_another_namespace(
    installation: Installation, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """The positive control of the next test: the attack works where nothing is separated."""
    victim = await make_replica(**installation.replica(VICTIM))
    attacker = await make_replica(**installation.replica(ATTACKER))
    installation.put(SHARED, VICTIM, victim)
    router = await shared_router(installation, make_router)
    assert await answered_by(router, "team-a/llama") == f"{VICTIM}-0"
    with connect(installation.server.url, 5.0) as everything:
        take_over(everything, attacker.url)

    async def taken() -> bool:
        return await answered_by(router, "team-a/llama") == f"{ATTACKER}-0"

    await eventually(taken, what="the attacker answers")


async def test_a_pod_with_the_user_of_its_namespace_can_do_nothing_to_another(
    installation: Installation, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    victim = await make_replica(**installation.replica(VICTIM))
    attacker = await make_replica(**installation.replica(ATTACKER))
    installation.put(SHARED, VICTIM, victim)
    installation.put(SHARED, ATTACKER, attacker)
    router = await shared_router(installation, make_router)
    for model, replica in (("team-a/llama", VICTIM), ("team-b/llama", ATTACKER)):
        assert await answered_by(router, model) == f"{replica}-0"
    theirs, own = ServiceKeys(PREFIX, VICTIM), ServiceKeys(PREFIX, ATTACKER)
    with connect(installation.url("team-b"), 5.0) as client:
        client.hset(own.replicas, "control", "x")  # its own keys are its own
        client.hdel(own.replicas, "control")
        own_script = "return redis.call('HSET', KEYS[1], 'x', 'y')"
        sha = client.script_load("return redis.call('HSET', 'PREFIX', 'x', 'y')".replace(
            "PREFIX", theirs.replicas
        ))  # fmt: skip
        assert client.evalsha(client.script_load(own_script), 1, own.demand) == 1
        for attempt in (
            lambda: client.set(table_key(PREFIX, SHARED), b"{}"),
            lambda: client.get(table_key(PREFIX, SHARED)),
            lambda: client.hset(theirs.replicas, "x", "y"),
            lambda: client.hgetall(theirs.replicas),
            lambda: client.unlink(theirs.leases),
            lambda: client.rename(own.replicas, theirs.replicas),
            lambda: client.sadd(services_key(PREFIX), "x"),
            lambda: client.evalsha(sha, 0),
            lambda: client.keys("*"),
            lambda: client.scan(),
            lambda: client.flushall(),
            lambda: client.config_get("*"),
            lambda: client.acl_list(),
            lambda: client.client_list(),
            lambda: client.script_flush(),
        ):
            with pytest.raises(
                redis.ResponseError, match=r"(?i)no permissions|NOPERM|can't access"
            ):
                attempt()
    for _ in range(3):
        assert await answered_by(router, "team-a/llama") == f"{VICTIM}-0"


async def test_a_replica_that_registers_elsewhere_than_at_its_pod_is_sent_nothing(
    installation: Installation, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    victim = await make_replica(**installation.replica(VICTIM))
    installation.put(SHARED, VICTIM, victim, urls={f"{VICTIM}-0": "http://10.0.0.1:8100"})
    router = await shared_router(installation, make_router, ready=False, queue_timeout=0.2)
    await eventually(lambda: "another address than its pod" in router.log.read_text())
    assert await answered_by(router, "team-a/llama") == "503"
    installation.put(SHARED, VICTIM, victim)

    async def serves() -> bool:
        return await answered_by(router, "team-a/llama") == f"{VICTIM}-0"

    await eventually(serves, what="it is used at its address")


async def test_a_router_of_a_services_own_does_with_the_user_of_its_namespace(
    installation: Installation, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica(**installation.replica(VICTIM))
    installation.put(VICTIM, VICTIM, replica, names=["llama"])
    own = installation.keys.of("team-a", Phase.OWN)
    router = await make_router(
        redis_url=installation.url("team-a"), model_table=VICTIM,
        internal_key=own["internal-key"], cluster_secret=own["cluster-secret"],
    )  # fmt: skip
    first, second = [
        await router.post("/v1/completions", completion(prompt(1, 2, 3), model="llama"))
        for _ in range(2)
    ]
    assert first.status == second.status == 200
    assert (await router.status())["redis"] == "up"
    await replica.stop()
    await eventually(lambda: not installation.server.client.hlen(
        ServiceKeys(PREFIX, VICTIM).leases
    ), what="its janitor takes what the replica left")  # fmt: skip
    log = router.log.read_text()
    assert "NOPERM" not in log
    assert "permissions" not in log


async def test_replicas_of_before_serve_beside_new_ones_while_a_namespace_is_changed_over(
    installation: Installation, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    old = await make_replica(**installation.replica(VICTIM, Phase.COMMON))
    new = await make_replica(**installation.replica(VICTIM, replica_id=f"{VICTIM}-1"))
    attempts = {f"{VICTIM}-0": old.url, f"{VICTIM}-1": new.url}
    for table in (SHARED, VICTIM):
        installation.put(table, VICTIM, old, attempts=list(attempts), urls=attempts)
        settings: dict[str, Any] = {"policy": "round-robin"}
        if table == SHARED:
            router = await shared_router(installation, make_router, **settings)
        else:
            own = installation.keys.of("team-a", Phase.CHANGING)
            common = installation.keys.ensure()
            router = await make_router(
                redis_url=installation.url("team-a"), model_table=VICTIM,
                internal_key=own["internal-key"], cluster_secret=own["cluster-secret"],
                previous_internal_key=common["internal-key"],
                previous_cluster_secret=common["cluster-secret"], **settings,
            )  # fmt: skip
        await eventually(lambda: _all_ready(router, 2), what="both are there")  # noqa: B023
        assert {await answered_by(router, "team-a/llama") for _ in range(4)} == set(attempts)


async def _all_ready(router: Router, count: int) -> bool:
    replicas = (await router.status())["replicas"]
    return [replica["state"] for replica in replicas] == ["ready"] * count


def test_users_that_redis_lost_or_has_too_many_come_right_again(
    installation: Installation,
) -> None:
    client = installation.server.client
    names = {user_name(PREFIX, who) for who in ("team-a", "team-b", "_router", "_operator")}
    ours = lambda: {n for n in client.acl_users() if n.startswith(PREFIX)}  # noqa: E731
    assert ours() == names
    client.acl_deluser(user_name(PREFIX, "team-a"))
    installation.users.keep(SERVICES)
    assert ours() == names
    client.acl_setuser("radixgrove.x.team-z")  # of an installation with the prefix radixgrove.x
    installation.users.keep({"team-a": {VICTIM}})
    assert ours() == names - {user_name(PREFIX, "team-b")} | {"radixgrove.x.team-z"}
    with connect(installation.url("team-a"), 5.0) as team:
        with pytest.raises(redis.ResponseError):
            team.hgetall(ServiceKeys(PREFIX, "team-a.new").replicas)
        installation.users.ensure({"team-a": {VICTIM, "team-a.new"}})
        assert team.hgetall(ServiceKeys(PREFIX, "team-a.new").replicas) == {}


def test_the_charts_redis_starts_with_the_users_it_had(
    installation: Installation, redis_server: RedisServer, tmp_path: Any
) -> None:
    settings = CONFIG.redis.model_copy(update={"url": redis_server.url, "own": True})
    users = RedisUsers(redis_server.client, installation.keys, settings)
    acl = tmp_path / "users.acl"
    users.keep(SERVICES)
    acl.write_text(installation.keys.ensure()["users.acl"].replace("%R~", "~"))  # of Redis 7
    redis_server.kill()
    redis_server.options = ("--aclfile", str(acl))
    redis_server.start()
    with connect(installation.url("team-a"), 5.0) as team:
        assert team.hgetall(ServiceKeys(PREFIX, VICTIM).replicas) == {}
    with connect(redis_server.url, 5.0) as nobody, pytest.raises(redis.AuthenticationError):
        nobody.get("x")


def test_a_redis_that_allows_no_users_is_named(installation: Installation) -> None:
    limited = "limited"
    installation.server.client.acl_setuser(
        limited, enabled=True, nopass=True, keys=["*"], categories=["+@all"], commands=["-acl"]
    )
    settings = CONFIG.redis
    with connect(with_user(installation.server.url, limited, "x"), 5.0) as client:
        users = RedisUsers(client, installation.keys, settings)
        with pytest.raises(UsersRefused, match=r"redis\.users to false"):
            users.keep(SERVICES)


def test_keys_of_namespaces_tell_nothing_of_each_other() -> None:
    one, other = (NamespaceKeys.of("root", namespace) for namespace in ("team-a", "team-b"))
    values = [*vars(one).values(), *vars(other).values()]
    assert len(set(values)) == 6
    assert NamespaceKeys.of("root", "team-a") == one
    assert NamespaceKeys.of("another root", "team-a") != one

"""The worker's side of the index against a real Redis that goes, returns and forgets."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.protocol import index
from radixgrove.protocol.blocks import HASH_BYTES, MEMBER_BYTES, members
from radixgrove.protocol.registry import Lease, LeaseState, Registration, RegistrationRefused
from radixgrove.worker.agent import index_feed, publisher
from radixgrove.worker.messages import Admitted, Tier
from tests.conftest import RedisServer, examples
from tests.router.harness import eventually
from tests.router.publishing import HASHER, KEYS, Engine, chain, running


@pytest.fixture
def client(redis_server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(redis_server.url)


def lease(client: redis.Redis, engine: Engine) -> Lease:
    return Lease.unpack(client.hget(KEYS.leases, engine.publisher.status().generation))


async def test_registers_with_a_lease_and_follows_events(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with running(redis_server.url) as engine:
        assert lease(client, engine).state is LeaseState.READY
        engine.change(True, Tier.GPU, chain(1, 500))
        engine.change(True, Tier.HOST, chain(2, 3))
        engine.change(False, Tier.GPU, chain(1, 500)[-HASH_BYTES * 200 :])
        await eventually(lambda: engine.in_step(client), what="the index to follow")
        engine.pulse(running=3, waiting=2, waiting_tokens=77)
        await eventually(lambda: lease(client, engine).report.waiting_tokens == 77)
    assert client.hlen(KEYS.replicas) == 0
    assert all(
        Lease.unpack(value).expires_ms == 0 for value in client.hgetall(KEYS.leases).values()
    )


async def test_batches_stay_small(redis_server: RedisServer, client: redis.Redis) -> None:
    async with running(redis_server.url) as engine:
        await eventually(lambda: engine.publisher.status().synchronised)
        before = int(client.hget(KEYS.sequences, engine.publisher.status().generation))
        engine.change(True, Tier.GPU, chain(1, 1000))
        await eventually(lambda: engine.in_step(client))
        after = int(client.hget(KEYS.sequences, engine.publisher.status().generation))
        assert after - before >= 1000 / index.BATCH_MEMBERS


async def test_a_block_that_changes_tiers_is_never_out_of_the_index(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """And the GPU's set is a prefix of the path at every moment: placement bisects it."""
    path = chain(1, 5000)
    packed = members(path, HASHER.domain64("local"))
    blocks = [packed[i : i + MEMBER_BYTES] for i in range(0, len(packed), MEMBER_BYTES)]
    moved = threading.Event()

    def watch(generation: str) -> int:
        looks = 0
        while not moved.is_set():
            with client.pipeline(transaction=True) as pipeline:
                for tier in Tier:
                    pipeline.smembers(KEYS.tree(tier.value, generation))
                gpu, host = pipeline.execute()
            assert gpu | host == set(blocks)
            assert gpu == set(blocks[: len(gpu)])
            looks += 1
        return looks

    async with running(redis_server.url) as engine:
        engine.change(True, Tier.GPU, path)
        await eventually(lambda: engine.in_step(client))
        watching = asyncio.create_task(
            asyncio.to_thread(watch, engine.publisher.status().generation)
        )
        try:
            for origin, goal in ((Tier.GPU, Tier.HOST), (Tier.HOST, Tier.GPU)):
                engine.move(path, origin, goal)
                await eventually(lambda: engine.in_step(client))
        finally:
            moved.set()
        assert await watching > 2


async def test_gap_in_the_engines_events_leads_to_a_snapshot(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with running(redis_server.url) as engine:
        await eventually(lambda: engine.publisher.status().synchronised)
        engine.change(True, Tier.GPU, chain(1, 5))
        engine.change(True, Tier.GPU, chain(2, 5), lose=True)
        engine.change(True, Tier.GPU, chain(3, 5))
        await eventually(lambda: engine.in_step(client))
        assert engine.publisher.status().resyncs == 1
        assert engine.snapshots == 2  # at registration, and for the gap


async def test_redis_refuses_a_batch_that_does_not_follow(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with running(redis_server.url) as engine:
        await eventually(lambda: engine.publisher.status().synchronised)
        client.hset(KEYS.sequences, engine.publisher.status().generation, "12345")
        engine.change(True, Tier.GPU, chain(1, 5))
        await eventually(lambda: engine.in_step(client))
        assert engine.snapshots == 2


async def test_full_buffer_drops_events_and_heals_by_snapshot(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_feed, "MAX_BUFFERED_MEMBERS", 100)
    async with running(redis_server.url) as engine:
        await eventually(lambda: engine.publisher.status().synchronised)
        for seed in range(1, 30):
            engine.change(True, Tier.GPU, chain(seed, 10))
        status = engine.publisher.status()
        assert status.dropped_members > 0
        assert status.buffered_members <= 110
        await eventually(lambda: engine.in_step(client))


async def test_events_during_a_snapshot_are_neither_lost_nor_undone(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    engine = Engine(redis_server.url)
    engine.answers_snapshots = False
    engine.pulse()
    await engine.publisher.start()
    try:
        engine.change(True, Tier.GPU, chain(1, 5))
        await eventually(lambda: engine.snapshots == 1)
        engine.send_snapshot()  # has chain 1
        engine.change(False, Tier.GPU, chain(1, 5)[-HASH_BYTES:])
        engine.change(True, Tier.GPU, chain(2, 4))
        await eventually(lambda: engine.in_step(client))
    finally:
        await engine.publisher.close()


async def test_redis_that_returns_empty_gets_everything_again(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with running(redis_server.url) as engine:
        engine.change(True, Tier.GPU, chain(1, 50))
        await eventually(lambda: engine.in_step(client))
        old = engine.publisher.status().generation
        redis_server.kill()
        engine.change(True, Tier.GPU, chain(2, 50))
        engine.pulse()
        await eventually(lambda: not engine.publisher.status().connected)
        redis_server.start()
        await eventually(lambda: engine.publisher.status().synchronised)
        await eventually(lambda: engine.in_step(client))
        assert engine.publisher.status().generation != old
        assert b"default" in client.smembers("radixgrove:services")


async def test_what_was_taken_out_of_a_key_that_lived_on_comes_back(
    redis_server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease alone is of no use: routers do not find the replica."""
    monkeypatch.setattr(publisher, "JOIN_SECONDS", 0.0)
    async with running(redis_server.url) as engine:
        await eventually(lambda: engine.publisher.status().synchronised)
        for wrong in (None, b"{", b"[]", b'{"generation": 5}'):
            client.delete(KEYS.replicas, "radixgrove:services")
            if wrong is not None:
                client.hset(KEYS.replicas, "r0", wrong)
            await eventually(lambda: _is_registered(client, engine), what="the registration")
            await eventually(lambda: client.smembers("radixgrove:services") == {b"default"})


def _is_registered(client: redis.Redis, engine: Engine) -> bool:
    try:
        found = Registration.decode(client.hget(KEYS.replicas, "r0") or b"")
    except ValueError:
        return False
    return found.generation == engine.publisher.status().generation


async def test_an_entry_of_another_that_makes_no_sense_keeps_no_replica_out(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    client.set(KEYS.identity, "another")
    client.hset(KEYS.replicas, mapping={"r8": b"{", "r9": b'{"generation": "short"}'})
    client.hset(KEYS.leases, "short", b"lease")
    async with running(redis_server.url) as engine:
        await eventually(lambda: engine.publisher.status().registered)


async def test_starts_before_redis_does(redis_server: RedisServer, client: redis.Redis) -> None:
    redis_server.kill()
    async with running(redis_server.url) as engine:
        engine.change(True, Tier.GPU, chain(1, 5))
        assert not engine.publisher.status().registered
        redis_server.start()
        await eventually(lambda: engine.publisher.status().synchronised)
        await eventually(lambda: engine.in_step(client))


async def is_refused(redis_server: RedisServer, words: str, **fields: Any) -> None:
    engine = Engine(redis_server.url, **fields)
    with pytest.raises(RegistrationRefused, match=words):
        await engine.publisher.start()
    await engine.publisher.close()


async def test_mismatch_is_refused_by_name(redis_server: RedisServer) -> None:
    async with running(redis_server.url):
        other: dict[str, Any] = {"replica_id": "r1", "index_block": 32, "tokenizer_digest": "e"}
        await is_refused(redis_server, r"index_block is 32 here and 16 there", **other)
    # No replica is left to disagree with.
    async with running(redis_server.url, replica_id="r1", index_block=32):
        pass


OTHERS: dict[str, Any] = {
    "index_block": 32,
    "tokenizer_digest": "e",
    "models": ["renamed"],
    "sharing": "shared",
}


async def test_a_rollout_may_change_what_replicas_agree_on(redis_server: RedisServer) -> None:
    """Those of one weight version agree with each other, whichever registered last."""
    async with (
        running(redis_server.url, replica_id="old-0", weight_version="a"),
        running(redis_server.url, replica_id="new-0", weight_version="b", **OTHERS),
        running(redis_server.url, replica_id="old-1", weight_version="a"),
        running(redis_server.url, replica_id="new-1", weight_version="b", **OTHERS),
    ):
        for version, others, words in (
            ("a", OTHERS, r"tokenizer_digest is 'e' here and 'd' there"),
            ("b", {}, r"model is 'm' here and 'renamed' there"),
        ):
            stray = {"replica_id": "stray", "weight_version": version, **others}
            await is_refused(redis_server, words, **stray)


async def test_a_replica_of_release_0_1_holds_up_no_rollout(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """It does not tell its weight version."""
    async with running(redis_server.url) as old:
        registered = msgspec.json.decode(client.hget(KEYS.replicas, "r0"))
        del registered["weight_version"]
        client.hset(KEYS.replicas, "r0", msgspec.json.encode(registered))
        async with running(redis_server.url, replica_id="r1", weight_version="b", **OTHERS):
            assert old.publisher.status().registered


async def test_evicting_redis_is_refused(redis_server: RedisServer, client: redis.Redis) -> None:
    client.config_set("maxmemory-policy", "allkeys-lru")
    await is_refused(redis_server, "noeviction")


async def test_restart_under_the_same_name_hides_the_old_generation_at_once(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with running(redis_server.url) as old:
        async with running(redis_server.url) as new:
            assert lease(client, old).expires_ms == 0
            assert lease(client, new).state is LeaseState.READY
            old.pulse()
            await eventually(lambda: old.publisher.status().problem == "superseded")
            current = Registration.decode(client.hget(KEYS.replicas, "r0"))
            assert current.generation == new.publisher.status().generation

        # The newer one left: the older one, still alive, takes its place again.
        await eventually(lambda: lease(client, old).state is LeaseState.READY)


async def test_drain_is_visible_before_it_returns_and_survives_heartbeats(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with running(redis_server.url) as engine:
        assert await engine.publisher.drain()
        assert lease(client, engine).state is LeaseState.DRAINING
        engine.pulse(running=5)
        await eventually(lambda: lease(client, engine).report.running == 5)
        assert lease(client, engine).state is LeaseState.DRAINING


async def test_the_lease_follows_the_engines_readiness(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with running(redis_server.url) as engine:
        engine.ready = False
        await eventually(lambda: lease(client, engine).state is LeaseState.NOT_READY)
        engine.ready = True
        await eventually(lambda: lease(client, engine).state is LeaseState.READY)


async def test_admitted_request_stops_counting_as_queued(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    async with running(redis_server.url) as engine:
        generation = engine.publisher.status().generation
        client.hset(KEYS.reserved, "res", f"router 160 {generation} 1 0")
        client.hset(KEYS.load(generation), "router", "1 160")
        engine.publisher.apply(Admitted(["res:0", "res:1", "unknown:0"]))
        await eventually(lambda: client.hget(KEYS.load(generation), "router") == b"1 0")
        assert not client.hexists(KEYS.reserved, "res")
        seconds, micros = client.time()
        left = float(client.hget(KEYS.load(generation), "@busy")) - seconds * 1000 - micros / 1000
        assert left <= 11  # 160 tokens at 16 a millisecond


async def test_what_keeps_a_replica_busy_is_what_it_last_said_and_never_adds_up(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """Registered at 16 tokens a second, it computes 1,600: every admission books too much."""

    def busy_seconds() -> float:
        seconds, micros = client.time()
        return float(client.hget(load, "@busy") or 0) / 1000 - seconds - micros / 1e6

    async with running(redis_server.url, prefill_tokens_per_second=16.0) as engine:
        generation = engine.publisher.status().generation
        load = KEYS.load(generation)
        for number in range(5):
            client.hset(KEYS.reserved, f"res{number}", f"router 160 {generation} 1 0")
            engine.publisher.apply(Admitted([f"res{number}:0"]))
            engine.pulse(running=1, prefill_backlog=160)  # which has the request already
            gone = f"res{number}"
            await eventually(lambda gone=gone: not client.hexists(KEYS.reserved, gone))
            await eventually(lambda: 9 < busy_seconds() <= 10)
        engine.pulse(running=1, prefill_backlog=160, prefill_rate=1600.0)
        await eventually(lambda: busy_seconds() <= 0.1)
        assert float(client.hget(load, "@ms")) == 0.625
        engine.pulse(running=1)  # its request goes on without prefill
        await eventually(lambda: not client.hexists(load, "@busy"))
        assert client.ttl(load) > 0


async def test_a_drained_replica_that_registers_anew_is_still_drained_until_it_is_undrained(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    def tell(script: str, generation: str) -> None:
        client.register_script(index.script(script).text)([KEYS.leases], [generation])

    async with running(redis_server.url) as engine:
        status = engine.publisher.status
        first = status().generation
        tell("drain", first)
        await eventually(lambda: status().draining)
        client.flushall()
        await eventually(lambda: status().generation != first and status().registered)
        assert lease(client, engine).state is LeaseState.DRAINING
        tell("undrain", status().generation)
        assert lease(client, engine).state is LeaseState.READY
        await eventually(lambda: not status().draining)


@examples(15)
@given(
    steps=st.lists(
        st.tuples(
            st.booleans(), st.sampled_from(list(Tier)), st.integers(1, 6), st.integers(1, 300)
        ),
        max_size=20,
    ),
    lost=st.sets(st.integers(0, 19)),
)
async def test_index_equals_the_cache_after_any_history(
    steps: list[tuple[bool, Tier, int, int]], lost: set[int], history_server: RedisServer
) -> None:
    client = redis.Redis.from_url(history_server.url)
    client.flushall()
    async with running(history_server.url) as engine:
        for number, (stored, tier, seed, blocks) in enumerate(steps):
            engine.change(stored, tier, chain(seed, blocks), lose=number in lost)
        engine.change(True, Tier.GPU, chain(99, 1))  # a gap shows with the next batch
        await eventually(lambda: engine.in_step(client), what="the index to equal the cache")


@pytest.fixture(scope="module")
def history_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server

"""Processes of this release beside those of release 0.1, during an upgrade."""

from __future__ import annotations

import random
import secrets
from typing import Any

import msgspec
import numpy as np
import redis

from benchmarks import simulated
from radixgrove.protocol.blocks import BlockHasher, members
from radixgrove.protocol.registry import root_fingerprint
from radixgrove.worker.messages import Admitted, Tier
from tests.conftest import RedisServer
from tests.release_0_1 import definitions as old
from tests.router import publishing
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import SimulatedReplica, eventually, prompt

BLOCK = simulated.BLOCK_TOKENS
LEASE_MS = 100_000  # beyond two minutes it is none
CACHED = tuple(range(100, 140))


class OldWorker:
    """A replica that serves by itself, and registers as a worker of 0.1 does."""

    def __init__(self, server: RedisServer, replica: SimulatedReplica) -> None:
        self._redis: redis.Redis = server.client
        self._keys = old.Keys("radixgrove", "default")
        self._replica = replica
        self._hasher = BlockHasher(b"", simulated.NAMESPACE, BLOCK)
        self._generation = secrets.token_hex(8)
        self._id = "old"

    def _call(self, name: str, keys: list[str], *arguments: Any) -> Any:
        return self._redis.register_script(old.script(name))(keys, list(arguments))

    def _lease(self) -> bytes:
        return old.LEASE.pack(0, 0, 0, 0, 0, 1000, 1000, 0, 0, 0)[9:]

    def register(self) -> None:
        registration = old.Registration(
            replica_id=self._id,
            service="default",
            url=self._replica.url,
            models=[simulated.MODEL],
            namespace=simulated.NAMESPACE,
            root=root_fingerprint(self._hasher),
            index_block=BLOCK,
            page_size=BLOCK,
            tokenizer_digest=simulated.tokenizer_files().digest,
            max_model_len=1 << 20,
            vocab_size=20_000,
            prefill_tokens_per_second=16_000.0,
            generation=self._generation,
        )
        keys = self._keys
        answer = self._call(
            "register",
            [keys.identity, keys.replicas, keys.leases],
            self._id,
            self._generation,
            msgspec.json.encode(registration),
            msgspec.json.encode(registration.identity(), order="deterministic"),
            LEASE_MS,
            self._lease(),
            old.READY,
        )
        assert answer == [b"OK"]
        self._redis.sadd(keys.services, "default")
        self._redis.hset(keys.sequences, self._generation, 0)

    def publish(self, text: str) -> None:
        """All blocks of a text are in its GPU's pool."""
        ids = np.array(simulated.TOKENIZER.encode(text).ids, dtype="<i4")
        packed = members(self._hasher.chain(ids.tobytes()), self._hasher.domain64("local"))
        keys, name = self._keys, self._generation
        trees = [keys.tree("gpu", name), keys.tree("host", name)]
        answer = self._call(
            "events", [keys.leases, keys.sequences, *trees], name, 0, 1, "+gpu", packed
        )
        assert answer == b"OK"

    def heartbeat(self, state: int) -> bytes:
        keys = self._keys
        answer: bytes = self._call(
            "heartbeat",
            [keys.replicas, keys.leases, keys.load(self._generation)],
            self._id,
            self._generation,
            LEASE_MS,
            state,
            self._lease(),
            "1",
        )
        return answer


async def test_an_old_worker_serves_behind_a_new_router_beside_a_new_worker(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica()
    worker = OldWorker(redis_server, replica)
    worker.register()
    worker.publish(prompt(*CACHED))
    await make_replica(redis_url=redis_server.url, replica_id="new")
    router = await make_router(redis_server)

    async def both() -> bool:
        replicas = (await router.status())["replicas"]
        return [(one["replica"], one["state"]) for one in replicas] == [
            ("new", "ready"),
            ("old", "ready"),
        ]

    await eventually(both, what="both replicas are ready")
    cached = await router.complete(prompt(*CACHED, 1))
    assert (cached.status, cached.replica) == (200, "old")
    assert cached.matched_tokens == len(CACHED) * BLOCK
    assert replica.counters.requests == 1
    assert worker.heartbeat(old.DRAINING) == b"DRAINING"
    for tail in range(2, 6):
        answer = await router.complete(prompt(*CACHED, tail))
        assert (answer.status, answer.replica) == (200, "new")


async def test_an_old_router_reads_and_places_on_a_new_worker(redis_server: RedisServer) -> None:
    client, keys = redis_server.client, old.Keys("radixgrove", "default")
    chain = publishing.chain(1, 40)
    async with publishing.running(redis_server.url, index_block=16, max_running=64) as engine:
        engine.change(True, Tier.GPU, chain)
        engine.pulse(running=3, pages_free=10, pages_total=100)
        await eventually(lambda: engine.in_step(client), what="the index follows")
        generation = engine.publisher.status().generation

        read = msgspec.json.decode(client.hget(keys.replicas, "r0"), type=old.Registration)
        assert (read.generation, read.page_size, read.max_model_len) == (generation, 16, 1000)
        assert (read.max_running, read.prefill_tokens_per_second) == (64, 16_000.0)
        assert msgspec.json.decode(client.get(keys.identity)) == read.identity()
        assert client.sismember(keys.services, "default")

        def running() -> int:
            _, state, count, *_ = old.LEASE.unpack(client.hget(keys.leases, generation))
            assert state == old.READY
            return count

        await eventually(lambda: running() == 3, what="the load is reported")
        packed = members(chain, publishing.HASHER.domain64("local"))
        names = [keys.leases, keys.reserved, *keys.pending, keys.routers]
        trees = [keys.tree(tier, generation) for tier in ("gpu", "host")]
        candidates = [(generation, 1000 / read.prefill_tokens_per_second, 0.0, 64, 1)]
        chosen, matched, host, booked, *_ = client.register_script(old.script("place"))(
            [*names, *trees, keys.load(generation)],
            [
                msgspec.msgpack.encode(candidates), packed, "old-router", "old-router-1", 41 * 16,
                16, 1, random.getrandbits(31), 1e15, 5000,
            ],
        )  # fmt: skip
        assert (chosen, matched, host, booked) == (1, 40, 0, 16)
        assert client.hget(keys.load(generation), "old-router") == b"1 16"
        engine.publisher.apply(Admitted(["old-router-1:0"]))
        await eventually(
            lambda: client.hget(keys.load(generation), "old-router") == b"1 0",
            what="the reservation ends",
        )
        assert client.hlen(keys.reserved) == 0

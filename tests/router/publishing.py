"""An engine's cache as an agent would publish it, for tests of the index and of placement."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import redis

from radixgrove.protocol import index
from radixgrove.protocol.blocks import HASH_BYTES, MEMBER_BYTES, BlockHasher, members
from radixgrove.protocol.keys import ServiceKeys, services_key
from radixgrove.protocol.registry import EngineInfo, LoadReport, Registration, root_fingerprint
from radixgrove.worker.agent.publisher import Publisher
from radixgrove.worker.messages import (
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
    EngineState,
    Stats,
    Tier,
)
from tests.conftest import RedisServer

HASHER = BlockHasher(b"secret", "model", 16)
KEYS = ServiceKeys("radixgrove", "default")


def registration(**fields: Any) -> Registration:
    values: dict[str, Any] = {
        "replica_id": "r0",
        "service": "default",
        "url": "http://127.0.0.1:1",
        "models": ["m"],
        "namespace": "model",
        "root": root_fingerprint(HASHER),
        "index_block": 16,
        "tokenizer_digest": "d",
    }
    facts = {"page_size": 16, "max_model_len": 1000, "prefill_tokens_per_second": 16_000.0}
    facts |= {name: fields.pop(name) for name in [*fields] if name in EngineInfo.__struct_fields__}
    return Registration(**values | fields, engine=EngineInfo(**facts))


def chain(seed: int, blocks: int) -> bytes:
    return HASHER.chain(seed.to_bytes(4, "little") * 16 * blocks)


def split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]


def backwards(hashes: bytes) -> bytes:
    """Children first, as blocks leave."""
    return b"".join(reversed(split(hashes)))


def register(server: RedisServer, service: str, lease_ms: int) -> tuple[ServiceKeys, Registration]:
    """All that a replica, and a router that placed on it, leave in Redis."""
    keys = ServiceKeys("radixgrove", service)
    entry = registration(service=service, generation=os.urandom(8).hex())
    identity = msgspec.json.encode(entry.identity())
    arguments = ["r0", entry.generation, entry.encode(), identity, lease_ms]
    with server.client.pipeline(transaction=False) as pipeline:
        pipeline.eval(
            index.script("register").text,
            *(3, keys.identity, keys.replicas, keys.leases),
            *(*arguments, LoadReport().pack(), 1),
        )
        pipeline.sadd(services_key("radixgrove"), service)
        pipeline.sadd(keys.tree("gpu", entry.generation), *range(20))
        pipeline.sadd(keys.tree("host", entry.generation), *range(20))
        pipeline.hset(keys.sequences, entry.generation, "3")
        pipeline.zadd(keys.routers, {"router": 1.0})
        pipeline.hset(keys.load(entry.generation), "router", "1 20")
        pipeline.hset(keys.reserved, "res", f"router 20 {entry.generation} 1 0")
        pipeline.execute()
    return keys, entry


class Engine:
    """An engine's cache and its event stream, as the agent would pass it on."""

    def __init__(self, redis_url: str, **fields: Any) -> None:
        self.publisher = Publisher(
            redis_url,
            "radixgrove",
            registration(**fields),
            HASHER,
            self.snapshot,
            lambda: self.ready,
        )
        self.cached: dict[Tier, set[bytes]] = {Tier.GPU: set(), Tier.HOST: set()}
        self.sequence = 0
        self.snapshots = 0
        self.answers_snapshots = True
        self.ready = True

    def snapshot(self) -> None:
        self.snapshots += 1
        if self.answers_snapshots:
            self.send_snapshot()

    def send_snapshot(self) -> None:
        tiers = [
            CacheEvent(True, tier, "local", b"".join(hashes))
            for tier, hashes in self.cached.items()
        ]
        self.publisher.apply(CacheSnapshot(self.sequence, tiers[:1], last=False))
        self.publisher.apply(CacheSnapshot(self.sequence, tiers[1:], last=True))

    def change(self, stored: bool, tier: Tier, hashes: bytes, *, lose: bool = False) -> None:
        self._publish([CacheEvent(stored, tier, "local", hashes)], lose=lose)

    def move(self, hashes: bytes, origin: Tier, goal: Tier) -> None:
        """As the engine tells it: in the other tier before it is gone from the first."""
        events = [
            CacheEvent(True, goal, "local", hashes),
            CacheEvent(False, origin, "local", backwards(hashes)),
        ]
        self._publish(events)

    def _publish(self, events: list[CacheEvent], *, lose: bool = False) -> None:
        self.sequence += 1
        for event in events:
            if event.stored:
                self.cached[event.tier] |= set(split(event.hashes))
            else:
                self.cached[event.tier] -= set(split(event.hashes))
        if not lose:
            self.publisher.apply(CacheEvents(self.sequence, events))

    def pulse(self, **fields: Any) -> None:
        values: dict[str, Any] = {
            "state": EngineState.READY,
            "ticks": 1,
            "steps": 1,
            "step_remaining": None,
            "running": 1,
        }
        self.publisher.apply(Stats(**values | fields))

    def expected(self, tier: Tier) -> set[bytes]:
        packed = members(b"".join(self.cached[tier]), HASHER.domain64("local"))
        return {packed[i : i + MEMBER_BYTES] for i in range(0, len(packed), MEMBER_BYTES)}

    def in_step(self, client: redis.Redis) -> bool:
        generation = self.publisher.status().generation
        return all(
            client.smembers(KEYS.tree(tier.value, generation)) == self.expected(tier)
            for tier in Tier
        )


@contextlib.asynccontextmanager
async def running(redis_url: str, **fields: Any) -> AsyncIterator[Engine]:
    engine = Engine(redis_url, **fields)
    engine.pulse()
    await engine.publisher.start()
    try:
        yield engine
    finally:
        await engine.publisher.close()

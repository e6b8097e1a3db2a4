"""The prefix index in Redis: bytes a placement, and the time of a placement call.

Prompts of 24, 1,024 and 6,250 blocks over 4 and 64 replicas, with matched depths that are spread
evenly; with and without 64 replicas publishing 1,000 blocks a second each. Server time is Redis's
own (`commandstats`), of a placement and its release together; latency is that of a placement
through the router's own client, one call after the other.

    python -m benchmarks.load.redis_index [--calls 500] [--resident 60000] [--rate 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time

import msgspec
import redis
import uvloop

from benchmarks import results
from benchmarks.load.http_load import percentile
from benchmarks.load.subjects import process, redis_server, table
from benchmarks.simulated import MODEL
from radixgrove.protocol import index
from radixgrove.protocol.blocks import HASH_BYTES, MEMBER_BYTES, BlockHasher
from radixgrove.protocol.keys import ServiceKeys, router_key
from radixgrove.protocol.registry import (
    EngineInfo,
    LoadReport,
    Registration,
    root_fingerprint,
)
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router.placement import PlacementRequest, Placer
from radixgrove.router.replicas import Breaker, Replica, Service
from radixgrove.service.redis_link import RedisLink
from radixgrove.worker.agent.publisher import Publisher
from radixgrove.worker.messages import (
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
    EngineState,
    Stats,
    Tier,
)

BLOCKS = (24, 1024, 6250)
REPLICAS = (4, 64)
BLOCK_TOKENS = 16
LEASE_MS = 3_600_000
EVENTS_A_SECOND = 10  # of one publisher
PREFIX = "radixgrove"
KEYS = ServiceKeys(PREFIX, "default")
HASHER = BlockHasher(b"", "index", BLOCK_TOKENS)


def registration(name: str, generation: str = "") -> Registration:
    return Registration(
        replica_id=name,
        service="default",
        url="http://127.0.0.1:1",
        models=[MODEL],
        namespace="index",
        root=root_fingerprint(HASHER),
        index_block=BLOCK_TOKENS,
        tokenizer_digest="none",
        engine=EngineInfo(
            page_size=BLOCK_TOKENS,
            max_model_len=1 << 24,
            prefill_tokens_per_second=20_000.0,
        ),
        generation=generation,
    )


def register(client: redis.Redis, name: str) -> Registration:
    entry = registration(name, os.urandom(8).hex())
    identity = msgspec.json.encode(entry.identity(), order="deterministic")
    script = client.register_script(index.script("register").text)
    arguments = [name, entry.generation, entry.encode(), identity, LEASE_MS]
    script([KEYS.identity, KEYS.replicas, KEYS.leases], [*arguments, LoadReport().pack(), 1])
    return entry


def fill(client: redis.Redis, generation: str, packed: bytes) -> None:
    key = KEYS.tree("gpu", generation)
    parts = [packed[i : i + MEMBER_BYTES] for i in range(0, len(packed), MEMBER_BYTES)]
    for start in range(0, len(parts), 5000):
        client.sadd(key, *parts[start : start + 5000])


def bytes_per_placement(client: redis.Redis, entries: list[Registration], resident: int) -> float:
    """Fills every replica with `resident` members; returns what one of them costs Redis."""
    before = client.info("memory")["used_memory"]
    for entry in entries:
        fill(client, entry.generation, os.urandom(MEMBER_BYTES * resident))
    after = client.info("memory")["used_memory"]
    return float(after - before) / (len(entries) * resident)


async def placements(
    url: str, client: redis.Redis, entries: list[Registration], blocks: int, calls: int
) -> tuple[list[float], float]:
    """Milliseconds of each placement, and Redis's own mean of placement and release."""
    link = RedisLink(url, router_key(PREFIX, "benchmark"), "nothing is measured")
    connection = asyncio.create_task(link.run())
    await link.wait_until_up(10)
    placer = Placer(RouterSettings(), "benchmark", link)
    service = Service("default", [MODEL])
    service.set_replicas(
        {
            entry.replica_id: Replica(
                id=entry.replica_id,
                url=entry.url,
                breaker=Breaker(5, 10),
                registration=entry,
                ready=True,
            )
            for entry in entries
        }
    )
    paths = [os.urandom(MEMBER_BYTES * blocks) for _ in range(8)]
    order = list(range(len(entries)))
    for path in paths:
        random.shuffle(order)
        for entry, rank in zip(entries, order, strict=True):
            fill(client, entry.generation, path[: MEMBER_BYTES * (rank * blocks // len(entries))])
    times = []
    server = client.info("commandstats").get("cmdstat_evalsha", {"usec": 0})
    for number in range(calls):
        ask = PlacementRequest(blocks * BLOCK_TOKENS + 1, paths[number % len(paths)], BLOCK_TOKENS)
        started = time.perf_counter()
        decision = await placer.place(service, ask)
        times.append(1000 * (time.perf_counter() - started))
        assert decision is not None
        placer.release(decision)
        client.delete(*KEYS.pending)  # they would answer the next call before any lookup
    connection.cancel()
    await asyncio.gather(connection, return_exceptions=True)
    after = client.info("commandstats")["cmdstat_evalsha"]
    return times, float(after["usec"] - server["usec"]) / calls / 1000


async def publish(url: str, count: int, rate: float) -> None:
    """`count` real publishers, each with `rate` blocks a second coming and as many going."""

    async def one(number: int) -> None:
        def snapshot() -> None:
            publisher.apply(CacheSnapshot(sequence, [], last=True))

        sequence = 0
        publisher = Publisher(
            url, PREFIX, registration(f"pub-{number}"), HASHER, snapshot, lambda: True
        )
        publisher.apply(Stats(state=EngineState.READY, ticks=0, steps=0, step_remaining=None))
        await publisher.start()
        size = HASH_BYTES * int(rate / EVENTS_A_SECOND)
        old = b""
        await asyncio.sleep(random.random() / EVENTS_A_SECOND)
        while True:
            started = time.monotonic()
            sequence += 1
            new = os.urandom(size)
            events = [CacheEvent(True, Tier.GPU, "local", new)]
            if old:
                events.append(CacheEvent(False, Tier.GPU, "local", old))
            publisher.apply(CacheEvents(sequence, events))
            publisher.apply(Stats(state=EngineState.READY, ticks=0, steps=0, step_remaining=None))
            old = new
            await asyncio.sleep(max(0.0, started + 1 / EVENTS_A_SECOND - time.monotonic()))

    await asyncio.gather(*(one(number) for number in range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--resident", type=int, default=60_000, help="members of a replica's set")
    parser.add_argument("--rate", type=float, default=1000.0, help="blocks a second of a publisher")
    parser.add_argument("--publish", nargs=2, metavar=("URL", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        uvloop.run(publish(options.publish[0], int(options.publish[1]), options.rate))
        return
    rows: list[list[object]] = []

    def add(workload: str, metric: str, value: float, unit: str) -> None:
        entry = {"benchmark": "redis_index", "workload": workload, "model": "none"}
        entry |= {"subject": "radixgrove", "metric": metric, "value": round(value, 4)}
        results.record({**entry, "unit": unit, "device": "cpu"})
        rows.append([workload, metric, f"{value:.3f}", unit])
        print(*rows[-1], flush=True)

    for count in REPLICAS:
        with redis_server() as url:
            client = redis.Redis.from_url(url)
            entries = [register(client, f"r{number}") for number in range(count)]
            size = bytes_per_placement(client, entries, options.resident)
            add(f"{count} replicas", "memory", size, "bytes/placement")
            for publishers in (0, 64):
                with contextlib.ExitStack() as stack:
                    if publishers:
                        command = [sys.executable, "-m", "benchmarks.load.redis_index", "--rate"]
                        command += [str(options.rate), "--publish", url, str(publishers)]
                        stack.enter_context(process(command))
                        time.sleep(4)
                    for blocks in BLOCKS:
                        times, server = uvloop.run(
                            placements(url, client, entries, blocks, options.calls)
                        )
                        name = f"{blocks} blocks, {count} replicas, {publishers} publishers"
                        add(name, "latency p50", percentile(times, 0.5), "ms")
                        add(name, "latency p99", percentile(times, 0.99), "ms")
                        if not publishers:  # with them the mean is mostly their calls'
                            add(name, "server mean", server, "ms")
    print(table(rows, ["workload", "metric", "value", "unit"]))


if __name__ == "__main__":
    main()

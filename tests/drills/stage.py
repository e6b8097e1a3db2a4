"""What a drill plays on: routers, replicas and Redis as processes of their own, beside a load."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks import simulated
from benchmarks.results import record
from benchmarks.simulated import MODEL
from tests.conftest import RedisServer, find_free_port
from tests.drills.load import End, Load
from tests.forks import Fork
from tests.redis_faults import RedisRoute, route
from tests.router.harness import Router, eventually, prompt

REPLICAS = 3
MODEL_LENGTH = 8192  # tokens
RATE = 20.0  # requests a second
ENOUGH = 20  # answers before the fault, and after its end
_HEALTHY_WITHIN = 300.0  # seconds: a limit for what hangs
MEMORY = 128.0  # MiB that a process may hold more at the end: allocators keep what they had


@dataclass
class Replica:
    """A simulated replica in a process."""

    name: str
    redis_url: str
    log: Path
    port: int = field(default_factory=find_free_port)
    process: Fork | None = None

    def start(self) -> None:
        arguments = ["--port", str(self.port), "--redis", self.redis_url]
        arguments += ["--replica-id", self.name, "--block-ms", "1"]
        arguments += ["--max-model-len", str(MODEL_LENGTH)]
        self.process = Fork(simulated.main, arguments, self.log)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@dataclass
class Stage:
    redis: RedisServer
    second_redis: RedisServer  # empty, for a failover
    redis_route: RedisRoute  # how all reach Redis
    routers: list[Router]
    replicas: list[Replica]
    load: Load

    async def healthy(self) -> bool:
        """Every router is ready, places by Redis, and sees every replica ready."""
        return all([await self._places_by_redis(router) for router in self.routers])

    async def _places_by_redis(self, router: Router) -> bool:
        if not await router.answers("/readyz"):
            return False
        if await router.metric("radixgrove_router_redis_up") != 1:
            return False
        ready = await router.metric(f'radixgrove_router_replicas{{model="{MODEL}",state="ready"}}')
        before = await _placed_by_redis(router)
        return ready == REPLICAS and await _grows(router, before)

    def memory(self) -> dict[int, float]:
        """MiB of each router, by its process."""
        pids = [router.process.pid for router in self.routers if router.process is not None]
        return {pid: psutil.Process(pid).memory_info().rss / 2**20 for pid in pids}


async def _placed_by_redis(router: Router) -> float:
    name = 'radixgrove_router_placements_total{{decided="redis",replica="r{}"}}'
    return sum([await router.metric(name.format(i)) for i in range(REPLICAS)])


async def _grows(router: Router, before: float) -> bool:
    end = time.monotonic() + 1
    while time.monotonic() < end:
        if await _placed_by_redis(router) > before:
            return True
        await asyncio.sleep(0.05)
    return False


@contextlib.asynccontextmanager
async def staged(directory: Path) -> AsyncIterator[Stage]:
    """Two routers, three replicas and two Redis, up and healthy beside a load."""
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for name in ("redis", "second"):
            (directory / name).mkdir()
            servers.append(stack.enter_context(RedisServer(directory / name)))
        redis_route = await stack.enter_async_context(route(servers[0].port))
        replicas = [
            Replica(f"r{i}", redis_route.url, directory / f"replica-{i}.log")
            for i in range(REPLICAS)
        ]
        for replica in replicas:
            replica.start()
            stack.callback(lambda replica=replica: replica.kill())
        routers = []
        for _ in range(2):
            router = Router(
                directory, find_free_port(), find_free_port(), {"redis_url": redis_route.url}
            )
            stack.push_async_callback(router.close)
            await router.start()
            routers.append(router)
        load = Load([router.url for router in routers], _request, RATE)
        await stack.enter_async_context(load)
        stage = Stage(servers[0], servers[1], redis_route, routers, replicas, load)
        await eventually(stage.healthy, deadline=60, what="the stage")
        yield stage


def _request(number: int) -> dict[str, object]:
    """Eight conversations that grow, and a new prompt now and then."""
    blocks = [number] if number % 5 == 0 else [*range(1000 * (number % 8), 1000 * (number % 8) + 6)]
    return {"model": MODEL, "prompt": prompt(*blocks), "max_tokens": 2}


@contextlib.asynccontextmanager
async def drill(
    directory: Path, name: str, *, cuts: bool = False, losses: bool = False
) -> AsyncIterator[Stage]:
    """A fault on a stage of its own, from its begin to its end, in the body."""
    async with staged(directory) as stage:
        subject = f"two routers, {REPLICAS} simulated replicas"
        async with watched(
            stage.load, stage.healthy, stage.memory, name, subject, cuts=cuts, losses=losses
        ):
            yield stage


@contextlib.asynccontextmanager
async def watched(
    load: Load,
    healthy: Callable[[], Awaitable[bool]],
    memory: Callable[[], dict[int, float]],
    name: str,
    subject: str,
    *,
    cuts: bool = False,
    losses: bool = False,
) -> AsyncIterator[None]:
    """Checks and records what the fault in the body costs.

    No request may fail that another replica, or router, could answer; a stream that had begun may
    be cut where the fault takes its replica (`cuts`), and what was under way is lost where it takes
    its router (`losses`), but nothing ever ends as if it were whole. All must be healthy again,
    with the memory that they had: processes that live on, `memory` has the MiB of each.
    """
    await _answered(load, ENOUGH)
    before, first = memory(), len(load.samples)
    yield
    ended = time.monotonic()
    await eventually(healthy, deadline=_HEALTHY_WITHIN, what="health after the fault")
    healthy_after = time.monotonic() - ended
    await _answered(load, ENOUGH)
    await load.stop()
    after = memory()
    grown = max(after[process] - before[process] for process in before.keys() & after.keys())
    samples = load.samples[first:]
    ends = (End.WHOLE, End.CUT, End.LOST)
    failures = [sample.seen for sample in samples if sample.end not in ends]
    cut = [sample.seen for sample in samples if sample.end is End.CUT]
    lost = [sample.seen for sample in samples if sample.end is End.LOST]
    record(
        {
            "benchmark": "drills",
            "workload": name,
            "model": None,
            "subject": subject,
            "metric": "failed_requests",
            "value": len(failures),
            "unit": "requests",
            "requests": len(samples),
            "cut_streams": len(cut),
            "lost": len(lost),
            "healthy_after_s": round(healthy_after, 1),
            "slowest_s": round(max(sample.ended - sample.began for sample in samples), 1),
            "memory_grown_mib": round(grown, 1),
        }
    )
    assert not failures, failures[:5]
    assert cuts or not cut, cut[:5]
    assert losses or not lost, lost[:5]
    assert grown < MEMORY


async def _answered(load: Load, count: int) -> None:
    target = load.count(End.WHOLE) + count
    await eventually(
        lambda: load.count(End.WHOLE) >= target, deadline=_HEALTHY_WITHIN, what=f"{count} answers"
    )

"""The product's own processes for drills: routers, workers of a small random model, and Redis.

A part that ends is started anew, as Kubernetes would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.load.worker_process import synthetic_tokenizer
from radixgrove.protocol.keys import ServiceKeys, router_key
from tests.conftest import RedisServer, find_free_port
from tests.drills.load import End, ask, judge
from tests.redis_faults import RedisRoute, route
from tests.router.harness import eventually
from tests.worker.execution import tiny

MODEL = "tiny"
WORKERS = 3
HEALTHY_WITHIN = 600.0  # seconds; a worker starts meanwhile
KEYS = ServiceKeys("radixgrove", "default")
ROUTER = router_key("radixgrove", "")
# What is cached of prompts, and of products prepared for a count of tokens, has its most within
# minutes: what grows from then on is another thing.
TINY_CACHE = ("--prompt-cache-bytes", str(1 << 19))
FEW_PRODUCTS = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
TINY_POOL = ("--kv-tokens", "1024", "--max-running", "8", "--host-cache-gib", "0.004")
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}\n{% endfor %}a:"
)


def write_model(directory: Path) -> None:
    """256 tokens long, one a byte; its prompts' every token decides what comes."""
    tiny.save("llama", directory)
    (directory / "tokenizer.json").write_text(json.dumps(synthetic_tokenizer(tiny.VOCAB)))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


@dataclass
class Part:
    """A process of the product, started anew when it ends unless it is `held`."""

    name: str
    arguments: list[str]
    directory: Path
    port: int = field(default_factory=find_free_port)
    management_port: int = field(default_factory=find_free_port)
    process: psutil.Popen | None = None
    held: bool = False
    starts: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    read: bool = True  # its output goes to a log; else into a pipe that nothing reads

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        ports = ["--port", self.port, "--management-port", self.management_port]
        command = [sys.executable, "-m", "radixgrove.cli", *self.arguments, *map(str, ports)]
        with (self.directory / f"{self.name}.log").open("ab") as log:
            output = log if self.read else subprocess.PIPE
            environment = _environment() | self.environment
            self.process = psutil.Popen(command, stdout=output, stderr=output, env=environment)
        self.starts += 1

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> dict[str, psutil.Process]:
        """By what they are: the part itself, `engine`, `frontend`."""
        found = {}
        with contextlib.suppress(psutil.Error):
            if self.alive:
                found[""] = self.process
                for child in self.process.children(recursive=True):
                    engine = "radixgrove.worker.engine.loop" in child.cmdline()
                    found["engine" if engine else "frontend"] = child
        return found

    def signal(self, number: int, *which: str) -> None:
        """To the processes of these names; to all by default."""
        for name, process in self.processes().items():
            if not which or name in which:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)

    def memory(self) -> dict[int, float]:
        """MiB by process."""
        found = {}
        for process in self.processes().values():
            with contextlib.suppress(psutil.Error):
                found[process.pid] = process.memory_info().rss / 2**20
        return found

    async def end(self) -> None:
        """SIGTERM, and wait until it is gone."""
        self.held = True
        if self.alive:
            self.process.terminate()
            await eventually(lambda: not self.alive, deadline=90, what=f"the end of {self.name}")


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RADIXGROVE")}
    own = {"RADIXGROVE_INTERNAL_KEY": "drill", "OMP_WAIT_POLICY": "passive"}
    return environment | own | FEW_PRODUCTS


def worker(directory: Path, name: str, redis_url: str, *options: str) -> Part:
    arguments = ["worker", "--model", str(directory / "model"), "--served-model-name", MODEL]
    arguments += ["--device", "cpu", "--cpu-threads", "1", "--log-level", "warning"]
    arguments += ["--replica-id", name] if redis_url else []
    arguments += ["--redis-url", redis_url] if redis_url else []
    return Part(name, [*arguments, *options], directory)


def router(directory: Path, name: str, redis_url: str, *options: str) -> Part:
    arguments = ["router", "--redis-url", redis_url, "--log-level", "warning"]
    return Part(name, [*arguments, *options], directory)


@dataclass(frozen=True)
class Pages:
    """Of a worker's pool, and those of its host tier that hold KV."""

    total: int
    free: int
    cached: int
    host_used: int


@dataclass
class Grove:
    redis: RedisServer
    second_redis: RedisServer
    redis_route: RedisRoute
    routers: list[Part]
    workers: list[Part]
    session: aiohttp.ClientSession

    @property
    def parts(self) -> list[Part]:
        return [*self.routers, *self.workers]

    def memory(self) -> dict[int, float]:
        """MiB of every process."""
        return {pid: mib for part in self.parts for pid, mib in part.memory().items()}

    async def keep(self) -> None:
        """Start what has ended, until cancelled."""
        while True:
            await asyncio.sleep(1)
            for part in self.parts:
                if not part.held and not part.alive:
                    part.start()

    async def get(self, url: str) -> tuple[int, str]:
        """Status 0 where nothing answers."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=5)
            async with self.session.get(url, timeout=timeout) as response:
                return response.status, await response.text()
        return 0, ""

    async def metrics(self, part: Part) -> dict[str, float]:
        text = (await self.get(f"{part.url}/metrics"))[1]
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    async def healthy(self) -> bool:
        """Every router is ready, can use Redis and sees all workers ready."""
        for part in self.routers:
            if (await self.get(f"{part.url}/readyz"))[0] != 200:
                return False
            metrics = await self.metrics(part)
            ready = f'radixgrove_router_replicas{{model="{MODEL}",state="ready"}}'
            if metrics.get("radixgrove_router_redis_up") != 1 or metrics.get(ready) != WORKERS:
                return False
        return True

    async def idle(self) -> bool:
        """Nothing runs, waits or is held anywhere."""
        busy = 0.0
        for part in self.routers:
            busy += (await self.metrics(part))["radixgrove_router_requests_in_flight"]
        for part in self.workers:
            metrics = await self.metrics(part)
            busy += (
                metrics["radixgrove_engine_running_requests"]
                + metrics["radixgrove_engine_waiting_requests"]
            )
        return busy == 0

    async def pages(self, part: Part) -> Pages:
        metrics = await self.metrics(part)
        kept = ("kv_pages", "kv_free_pages", "kv_evictable_pages", "host_used_pages")
        return Pages(*(int(metrics[f"radixgrove_engine_{name}"]) for name in kept))

    def keys(self) -> Counter[str]:
        """How many things the keys in Redis hold, whatever generation they are of."""
        client = self.redis.client
        generations = [field.decode() for field in client.hkeys(KEYS.leases)]
        counts: Counter[str] = Counter()
        for key in client.scan_iter(count=1000):
            name = key.decode()
            for generation in generations:
                name = name.replace(generation, "GENERATION")
            if name.startswith(ROUTER):  # whose name has a part of its own at each start
                name = ROUTER
            counts[name] += 1
        counts[KEYS.leases] = len(generations)
        for hash_key in (KEYS.replicas, KEYS.sequences, KEYS.reserved):
            counts[hash_key] = client.hlen(hash_key)
        for pending in KEYS.pending:  # they end by themselves
            del counts[pending]
        return +counts


@contextlib.asynccontextmanager
async def growing(directory: Path) -> AsyncIterator[Grove]:
    """The parts, of which Redis alone runs; the workers' model is in `directory / "model"`."""
    async with contextlib.AsyncExitStack() as stack:
        servers = []
        for name in ("redis", "second"):
            (directory / name).mkdir()
            servers.append(stack.enter_context(RedisServer(directory / name)))
        redis_route = await stack.enter_async_context(route(servers[0].port))
        url = redis_route.url
        session = await stack.enter_async_context(aiohttp.ClientSession())
        routers = [router(directory, f"router-{i}", url, *TINY_CACHE) for i in range(2)]
        workers = [worker(directory, f"w{i}", url, *TINY_POOL, *TINY_CACHE) for i in range(WORKERS)]
        grove = Grove(*servers, redis_route, routers, workers, session)
        for part in grove.parts:
            stack.callback(part.signal, signal.SIGKILL)
        yield grove


async def undisturbed(
    directory: Path, bodies: Sequence[dict[str, Any]], session: aiohttp.ClientSession
) -> list[tuple[str, ...]]:
    """The texts of a worker that does one request after the other and keeps nothing."""
    part = worker(directory, "undisturbed", "", "--no-prefix-cache")
    part.start()

    async def ready() -> bool:
        assert part.alive, f"the undisturbed worker ended: see {directory}"
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(f"{part.url}/readyz") as response:
                return response.status == 200
        return False

    try:
        await eventually(ready, deadline=HEALTHY_WITHIN, what="the undisturbed worker")
        texts = []
        for body in bodies:
            answer = await ask(session, part.url, body)
            end, said = judge(answer, None, stream=False)
            assert end is End.WHOLE, (body, answer)
            texts.append(said)
        return texts
    finally:
        await part.end()

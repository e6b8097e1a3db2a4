"""Routers as real processes before simulated replicas on real sockets."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.simulated import INTERNAL_KEY, MODEL, SimulatedReplica, block_text
from tests.forks import Fork, Main
from tests.router.mains import busy_main

__all__ = [
    "INTERNAL_KEY",
    "MODEL",
    "Router",
    "SimulatedReplica",
    "completion",
    "eventually",
    "prompt",
]


async def eventually(
    condition: Callable[[], Any], *, deadline: float = 30.0, what: str = "the condition"
) -> Any:
    """Polls a plain or async condition until it holds; returns what it returned."""
    end = time.monotonic() + deadline
    while True:
        result = condition()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return result
        assert time.monotonic() < end, f"{what} did not come within {deadline} s"
        await asyncio.sleep(0.02)


def prompt(*blocks: int) -> str:
    """A text of so many 16-token blocks."""
    return "".join(map(block_text, blocks))


def completion(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": text, "max_tokens": 2, **fields}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    cut: bool = False  # the connection broke before the answer's end

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def replica(self) -> str:
        return self.headers["x-radixgrove-replica"]

    @property
    def matched_tokens(self) -> int:
        return int(self.headers["x-radixgrove-matched-tokens"])

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])


@dataclass
class Router:
    """One router process of a test's own."""

    directory: Path
    port: int
    management_port: int
    settings: dict[str, Any]
    main: Main = busy_main
    process: subprocess.Popen[bytes] | Fork | None = None
    session: aiohttp.ClientSession | None = None
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.directory / f"router-{self.port}.log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> aiohttp.ClientSession:
        assert self.session is not None
        return self.session

    async def start(self, *, ready: bool = True) -> None:
        file = self.directory / f"router-{self.port}.json"
        common = {
            "port": self.port,
            "management_port": self.management_port,
            "internal_key": INTERNAL_KEY,
            "reveal_replica": True,
        }
        file.write_text(json.dumps(common | self.settings))
        self.process = self._spawn([str(file)])
        if self.session is None:
            self.session = aiohttp.ClientSession(headers={"x-radixgrove-debug": "1"})
        path = "/readyz" if ready else "/livez"
        await eventually(lambda: self.answers(path), deadline=60, what=f"{path} of the router")
        # With several processes it is another one that has the management port.
        managed = lambda: self.answers("/livez", management=True)  # noqa: E731
        await eventually(managed, deadline=60, what="the router's management port")

    def _spawn(self, arguments: list[str]) -> subprocess.Popen[bytes] | Fork:
        if self.settings.get("processes", 1) == 1:
            return Fork(self.main, arguments, self.log)
        command = [sys.executable, "-m", "radixgrove.router", *arguments]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    async def answers(self, path: str, status: int = 200, *, management: bool = False) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        try:
            return (await self.get(path, management=management)).status == status
        except aiohttp.ClientError:
            return False

    async def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        assert self.process is not None
        self.process.terminate()
        code = await asyncio.to_thread(self.process.wait, 60)
        if self.session is not None:
            await self.session.close()
            self.session = None
        return code

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def close(self) -> None:
        """However far it came, it is gone."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        if self.session is not None:
            await self.session.close()

    async def get(self, path: str, *, management: bool = False, **headers: str) -> Answer:
        port = self.management_port if management else self.port
        url = f"http://127.0.0.1:{port}{path}"
        async with self.client.get(url, headers=headers) as response:
            return Answer(response.status, _lower(response.headers), await response.read())

    async def post(
        self,
        path: str,
        body: dict[str, Any] | bytes,
        *,
        management: bool = False,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        port = self.management_port if management else self.port
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json"} | (headers or {})
        url = f"http://127.0.0.1:{port}{path}"
        async with self.client.post(url, data=data, headers=given) as response:
            chunks, cut = [], False
            try:
                async for chunk in response.content.iter_any():
                    chunks.append(chunk)
            except aiohttp.ClientPayloadError:
                cut = True
            return Answer(response.status, _lower(response.headers), b"".join(chunks), cut)

    async def complete(self, text: str, **fields: Any) -> Answer:
        return await self.post("/v1/completions", completion(text, **fields))

    async def metric(self, sample: str) -> float:
        """The value of one sample line, named as Prometheus prints it; 0 when absent."""
        text = (await self.get("/metrics")).body.decode()
        for line in text.splitlines():
            if line.startswith(sample + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    async def status(self) -> dict[str, Any]:
        return dict((await self.get("/status", management=True)).json)


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}

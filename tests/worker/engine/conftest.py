"""An engine process on the fake executor, seen from the sockets of its peers."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import zmq
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.messages import (
    EngineInfo,
    Outputs,
    Refused,
    Stats,
    ToAgent,
    ToEngine,
    ToFrontend,
    Tokens,
)
from radixgrove.worker.runtime import Runtime
from tests.conftest import wait_until
from tests.forks import Fork
from tests.worker.engine import on_fake_executor

PATIENCE = 20.0

Message = TypeVar("Message")


class EngineProcess:
    """Everything a test does to one engine, with a deadline on every wait."""

    def __init__(self, directory: Path, options: dict[str, Any], settings: dict[str, Any]) -> None:
        settings = {"served_model_name": ["fake"], "page_size": 4, "max_step_tokens": 64} | settings
        self.runtime = Runtime(directory, WorkerSettings(**settings), directory)
        self.runtime.write()
        self.context = zmq.Context()
        # Frontend 0 and the agent take everything, what others do not read piles up at the engine.
        self.agent = self._bind(self.runtime.agent_socket(), queue=0)
        self.frontends = [
            self._bind(self.runtime.frontend_socket(index), queue=min(4, index * 4))
            for index in range(self.runtime.settings.frontends)
        ]
        self.inbox = self.context.socket(zmq.PUSH)
        self.inbox.setsockopt(zmq.LINGER, 0)
        self.inbox.connect(self.runtime.engine_socket())
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Tokens | Refused] = {}
        self.stats: Stats | None = None
        self.info: EngineInfo | None = None
        self.metrics = directory / "metrics"
        self.metrics.mkdir()
        self._log = directory / "log"
        self.process = Fork(
            on_fake_executor.main,
            [str(directory), json.dumps(options)],
            self._log,
            {"PROMETHEUS_MULTIPROC_DIR": str(self.metrics)},
        )

    def _bind(self, address: str, queue: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.PULL)
        socket.set_hwm(queue)  # 0: no limit
        socket.bind(address)
        return socket

    def send(self, message: ToEngine) -> None:
        self.inbox.send(msgspec.msgpack.encode(message))

    def from_agent_socket(self, wanted: type[Message]) -> Message:
        """The next message of this type to the agent; others are passed over."""
        return self._next(self.agent, ToAgent, wanted)

    def from_frontend_socket(self, wanted: type[Message], frontend: int = 0) -> Message:
        """The next message of this type to a frontend; others are passed over."""
        return self._next(self.frontends[frontend], ToFrontend, wanted)

    def next_stats(self, frontend: int = 0) -> Stats:
        return self.from_frontend_socket(Stats, frontend)

    def _next(self, socket: zmq.Socket[bytes], union: Any, wanted: type[Message]) -> Message:
        deadline = time.monotonic() + PATIENCE
        while (left := deadline - time.monotonic()) > 0:
            if socket.poll(int(left * 1000)):
                message = msgspec.msgpack.decode(socket.recv(), type=union)
                if isinstance(message, wanted):
                    return message
        raise AssertionError(f"no {wanted.__name__} within {PATIENCE} s")

    def until(self, condition: Callable[[], bool], frontend: int = 0) -> None:
        """Take what the engine sends to a frontend until the condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"not within {PATIENCE} s"
            self._take_next(frontend)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """It does not run meanwhile, and what it has sent is known."""
        process = psutil.Process(self.process.pid)
        process.suspend()
        try:
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED, what="the stop")
            while self._take_next(frontend=0):
                pass
            yield
        finally:
            process.resume()

    def _take_next(self, frontend: int) -> bool:
        """What the engine sends to a frontend next; False: nothing in 50 ms."""
        socket = self.frontends[frontend]
        if not socket.poll(50):
            return False
        message = msgspec.msgpack.decode(socket.recv(), type=ToFrontend)
        if isinstance(message, Stats):
            self.stats = message
        elif isinstance(message, Outputs):
            self._take(message)
        return True

    def _take(self, outputs: Outputs) -> None:
        for item in outputs.items:
            assert item.request_id not in self.ends, "output after the end"
            if isinstance(item, Tokens):
                self.tokens.setdefault(item.request_id, []).extend(item.token_ids)
            if isinstance(item, Refused) or item.finish is not None:
                self.ends[item.request_id] = item

    def until_ended(self, *request_ids: str, frontend: int = 0) -> None:
        self.until(lambda: all(name in self.ends for name in request_ids), frontend)

    def wait(self) -> tuple[int, str]:
        """Exit status and what it wrote."""
        return self.process.wait(PATIENCE), self._log.read_text()

    def terminate(self) -> tuple[int, str]:
        self.process.terminate()
        return self.wait()

    def metrics_text(self) -> str:
        """What a frontend would serve."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(self.metrics))  # type: ignore[no-untyped-call]
        return generate_latest(registry).decode()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.context.destroy(linger=0)


StartEngine = Callable[..., EngineProcess]


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """`start_engine(settings={...}, **options of the fake executor)`."""
    engines: list[EngineProcess] = []
    # Unix socket paths are short: pytest's own temporary directories may be too deep.
    with tempfile.TemporaryDirectory(prefix="rg-engine-") as base:

        def start(settings: dict[str, Any] | None = None, **options: Any) -> EngineProcess:
            directory = Path(base) / str(len(engines))
            directory.mkdir(mode=0o700)
            engines.append(EngineProcess(directory, options, settings or {}))
            return engines[-1]

        yield start
        for engine in engines:
            engine.close()

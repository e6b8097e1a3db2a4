"""The agent: the process behind `radixgrove worker`, which owns all others of one worker.

It makes the runtime directory, starts the engine's ranks and the HTTP frontends, watches them,
publishes to Redis, and serves the management port. It never imports torch. A worker lives and dies
whole: when one child is gone or stuck, the agent ends the others and exits with a message that
names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.registry import Registration, root_fingerprint
from radixgrove.protocol.settings import LoadFormat, LogLevel, WorkerSettings
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.service import logs
from radixgrove.service.children import Child, describe_exit
from radixgrove.service.directories import private_directory
from radixgrove.service.listening import BindingError, bound_socket, check_management
from radixgrove.worker.agent import demo_model, management, model_files
from radixgrove.worker.agent.progress import StartReport, memory_arithmetic
from radixgrove.worker.agent.publisher import Publisher
from radixgrove.worker.cache.identity import block_hasher, cache_namespace, index_block
from radixgrove.worker.liveness import Liveness, is_stopped
from radixgrove.worker.messages import (
    Admitted,
    CacheEvents,
    CacheSnapshot,
    EngineInfo,
    FlushCache,
    PhaseReport,
    PublishSnapshot,
    Stats,
    ToAgent,
    ToEngine,
)
from radixgrove.worker.runtime import Runtime

_log = logging.getLogger(__name__)

EXIT_FAILED = 1  # a child died, or the start failed
EXIT_STUCK = 4  # a rank was stuck and has been killed

_WATCH_SECONDS = 0.5
_FRONTEND_DEADLINE = 60.0  # from the engine's readiness to the frontends' first answer
_FRONTEND_GRACE = 5.0  # beyond the drain timeout
_ENGINE_PATIENCE = 5.0
_FAILURE_PATIENCE = 3.0  # frontends end their clients' requests with an error
_PUBLISHER_DEADLINE = 5.0


class AgentError(Exception):
    """The worker cannot start or go on; the text says what to do, `code` is the exit code."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.code = code


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    NOT_READY = "not-ready"  # was ready; the engine's pulse is late
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True)
class Modules:
    """What the agent starts as `python -m MODULE RUNTIME_DIR INDEX`."""

    engine: str = "radixgrove.worker.engine.loop"
    frontend: str = "radixgrove.worker.frontend"


def run(settings: WorkerSettings, modules: Modules = Modules()) -> int:
    """Run a worker until SIGTERM or SIGINT has drained it; returns the exit code."""
    logs.configure(settings.log_level, json=settings.log_json)
    # Until the event loop takes over, SIGTERM must still unwind: a conversion may be running.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        check_ranks(settings, os.environ)
        check_management(settings)
        model_dir = resolve_model(settings.model)
        model_files.check(model_dir, weights=settings.load_format is LoadFormat.SAFETENSORS)
        with reserved_port(settings) as port, private_directory("radixgrove-worker-") as directory:
            runtime = Runtime(directory, resolve_settings(settings, model_dir, port), model_dir)
            runtime.metrics_dir.mkdir()
            runtime.write()
            return asyncio.run(Agent(runtime, modules).run())
    except (
        AgentError,
        demo_model.DemoModelError,
        ModelError,
        BindingError,
    ) as error:
        _log.error("%s", error)
        return getattr(error, "code", EXIT_FAILED)


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def check_ranks(settings: WorkerSettings, environ: Mapping[str, str]) -> None:
    """Refuse a group of which this worker would leave ranks idle, or make two replicas of one.

    The operator says in the environment how many ranks a group has.

    Raises:
        AgentError: they are not the `tp` ranks of one node.
    """
    ranks = environ.get("WORLD_SIZE", "")
    if "GROUP_MARKER" in environ and ranks != str(settings.tp):
        raise AgentError(
            f"the group has {ranks or 'no'} ranks on {environ.get('NNODES', '?')} nodes, and this "
            f"worker runs the tp={settings.tp} ranks of one node: it has no pipeline or data "
            "parallelism yet"
        )


def resolve_model(model: str) -> Path:
    """The local Hugging Face directory that `model` means.

    Raises:
        AgentError: there is no such directory, or it is none of a model.
        DemoModelError: the demo model cannot be made.
    """
    if model == "demo":
        return demo_model.ensure()
    path = Path(model).expanduser()
    if not path.is_dir():
        raise AgentError(
            f"model {model!r} is not a directory: pass a local Hugging Face directory, or `demo`"
        )
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise AgentError(f"model directory {model!r} has no {name}")
    return path.resolve()


def resolve_settings(settings: WorkerSettings, model_dir: Path, port: int) -> WorkerSettings:
    """Fill in what the other processes rely on: port, names, and the URL routers use."""
    host = settings.host
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return settings.model_copy(
        update={
            "port": port,
            "served_model_name": settings.served_model_name or [model_dir.name],
            "replica_id": settings.replica_id or f"{host}:{port}",
            "advertise_url": settings.advertise_url or f"http://{name}:{port}",
        }
    )


@contextlib.contextmanager
def reserved_port(settings: WorkerSettings) -> Iterator[int]:
    """Hold the API port for the frontends, which share it by SO_REUSEPORT.

    The socket never listens, so the kernel hands it no connection. A first bind without
    SO_REUSEPORT finds a stranger on the port that a shared bind would silently join.

    Raises:
        AgentError: the port is taken or the address not ours.
    """
    try:
        if settings.port:
            bound_socket(settings.host, settings.port).close()
        holder = bound_socket(settings.host, settings.port, shared=True)
    except OSError as error:
        raise AgentError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; "
            "choose another with --port (0: any free one)"
        ) from error
    with holder:
        yield holder.getsockname()[1]


class Agent:
    """One worker's processes, from start to end. `run` is called once."""

    def __init__(self, runtime: Runtime, modules: Modules = Modules()) -> None:
        self.runtime = runtime
        self.settings = runtime.settings
        self.state = WorkerState.STARTING
        self.info: EngineInfo | None = None
        self.liveness = Liveness(time.time())
        self.publisher: Publisher | None = None
        self.started = time.time()
        self.phase: PhaseReport | None = None
        self._modules = modules
        self._engines: list[Child] = []
        self._frontends: list[Child] = []
        self._stuck: AgentError | None = None
        self._report = StartReport(_log)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._engine_ready = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._inbox: zmq.asyncio.Socket = self._context.socket(zmq.PULL)
        self._to_engine: zmq.Socket[bytes] = zmq.Context(self._context).socket(zmq.PUSH)
        self._encoder = msgspec.msgpack.Encoder()

    # ---- what the management port uses ---------------------------------------------------------

    def send(self, message: ToEngine) -> bool:
        """Hand a message to the engine; False when its queue is full or it is not there yet."""
        try:
            self._to_engine.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def flush_cache(self) -> bool:
        return self.send(FlushCache())

    def _request_snapshot(self) -> None:
        if not self.send(PublishSnapshot()):
            _log.warning("the engine takes no messages: no snapshot of its cache")

    async def drain(self) -> None:
        """Make routers pass this worker by; it ends what it has and stays up until SIGTERM."""
        if self.state is not WorkerState.DRAINING:
            _log.info("draining: routers send no new requests")
            self.state = WorkerState.DRAINING
        if self.publisher is not None and not await self.publisher.drain():
            _log.warning("Redis has not confirmed the drain; routers learn it from the next lease")

    def set_log_level(self, level: LogLevel) -> None:
        """For the agent at once, for engine and frontends within a second."""
        logging.getLogger().setLevel(level.upper())
        self.runtime.write_log_level(level)
        _log.warning("log level is now %s", level)

    # ---- life ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Start everything, serve until a signal, drain; or fail with the name of what failed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._inbox.bind(self.runtime.agent_socket)
        self._to_engine.connect(self.runtime.engine_socket)
        tasks = [asyncio.create_task(self._receive(), name="inbox")]
        try:
            async with management.serving(self):
                await self._start_children()
                tasks.append(asyncio.create_task(self._watch(), name="watch"))
                tasks.append(asyncio.create_task(self._become_ready(), name="readiness"))
                await self._until_stop(tasks)
                await self._drain_and_stop()
            return 0
        except AgentError as error:
            self.state = WorkerState.FAILED
            _log.error("%s", error)
            return error.code
        finally:
            await self._end(tasks)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            _log.warning("second signal: ending without draining")
            self._hurry.set()
        self._stop.set()

    async def _start_children(self) -> None:
        environ = {
            **os.environ,
            "PROMETHEUS_MULTIPROC_DIR": str(self.runtime.metrics_dir),
            "PYTHONUNBUFFERED": "1",
        }
        directory = str(self.runtime.directory)
        for rank in range(self.settings.tp):
            command = [sys.executable, "-m", self._modules.engine, directory, str(rank)]
            self._engines.append(
                await Child.start(f"engine rank {rank}", command, environ, _to_stderr)
            )
        for index in range(self.settings.frontends):
            command = [sys.executable, "-m", self._modules.frontend, directory, str(index)]
            self._frontends.append(
                await Child.start(f"frontend {index}", command, environ, _to_stderr)
            )

    async def _receive(self) -> None:
        decoder: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
        while True:
            message = decoder.decode(await self._inbox.recv())
            now = time.time()
            self.liveness.hear(now)
            match message:
                case Stats():
                    self.liveness.take(message, now)
                    if self.liveness.ready(now) and self.info is not None:
                        self._engine_ready.set()
                case PhaseReport():
                    self.phase = message
                    self._report.phase(message)
                case EngineInfo():
                    self.info = message
                    for line in memory_arithmetic(message):
                        _log.info("%s", line)
                case _:
                    pass
            if self.publisher is not None and isinstance(
                message, CacheEvents | CacheSnapshot | Admitted | Stats
            ):
                self.publisher.apply(message)

    async def _watch(self) -> None:
        """Ends with an AgentError when a rank is stuck, after killing it."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            now = time.time()
            held = [child for child in self._engines if child.running and is_stopped(child.pid)]
            problem = self.liveness.problem(now, stopped=bool(held))
            if problem is not None:
                culprit = held[0] if held else self._engines[0]
                # Kept first: the death that we cause must not pass for the reason.
                self._stuck = AgentError(
                    f"{culprit.name} (process {culprit.pid}) is stuck: {problem}; killed it",
                    EXIT_STUCK,
                )
                await asyncio.gather(*(child.kill() for child in self._engines))
                raise self._stuck
            if self.state in (WorkerState.READY, WorkerState.NOT_READY):
                self._set_readiness(self.liveness.ready(now))

    def _set_readiness(self, ready: bool) -> None:
        state = WorkerState.READY if ready else WorkerState.NOT_READY
        if state is not self.state:
            _log.warning("the engine's pulse is %s", "back" if ready else "late: not ready")
            self.state = state

    async def _become_ready(self) -> None:
        """Announce the worker once the engine and every frontend answer."""
        await self._engine_ready.wait()
        assert self.info is not None
        await self._await_frontends()
        if self.settings.redis_url is not None:
            await self._publish(self.info)
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.READY
        self._report.ready(self.settings, time.time() - self.started)
        await asyncio.Event().wait()  # this task ends only with the agent

    async def _await_frontends(self) -> None:
        deadline = time.monotonic() + _FRONTEND_DEADLINE
        while not await _answers_ready(self.settings.host, self.settings.port):
            if time.monotonic() > deadline:
                raise AgentError(
                    f"the frontends were not ready {_FRONTEND_DEADLINE:.0f} s after the engine"
                )
            await asyncio.sleep(0.1)

    async def _publish(self, info: EngineInfo) -> None:
        assert self.settings.redis_url is not None
        try:
            registration = describe(self.runtime, info)
            publisher = Publisher(
                self.settings.redis_url,
                self.settings.redis_prefix,
                registration,
                block_hasher(
                    self.settings, cache_namespace(self.settings, info.dtype, info.kv_dtype)
                ),
                self._request_snapshot,
            )
            await publisher.start()
        except Exception as error:
            raise AgentError(f"cannot register with the routers: {error}") from error
        self.publisher = publisher

    async def _until_stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """Return on a signal; raise when a child or one of our own tasks ended."""
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        children = [*self._engines, *self._frontends]
        try:
            await asyncio.wait(
                [stop, *tasks, *(child.exited for child in children)],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            stop.cancel()
        if self._stuck is not None:
            raise self._stuck
        for task in tasks:
            if task.done():
                task.result()
        # Engines first: a frontend that follows its engine into death is not the cause.
        for child in children:
            if not child.running and not self._stop.is_set():
                raise AgentError(_obituary(child))

    async def _drain_and_stop(self) -> None:
        """Lease, frontends, engine, in this order, so that nobody is sent to a closed door."""
        await self.drain()
        patience = self.settings.drain_timeout + _FRONTEND_GRACE
        if self.info is None:  # still starting: there is nothing to finish
            patience = _FAILURE_PATIENCE
        stopping = asyncio.gather(*(child.stop(patience) for child in self._frontends))
        hurry = asyncio.create_task(self._hurry.wait())
        ends: list[asyncio.Future[Any]] = [stopping, hurry]
        ends += [child.exited for child in self._engines]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        dead = [child for child in self._engines if not child.running]
        if not stopping.done():
            patience = 0.0 if self._hurry.is_set() else _FAILURE_PATIENCE
            await asyncio.gather(*(child.stop(patience) for child in self._frontends))
            await stopping
        if dead:
            raise self._stuck or AgentError(f"{_obituary(dead[0])}, while draining")

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """The one way out: whatever still runs is ended, in any state."""
        await asyncio.gather(*(child.stop(_FAILURE_PATIENCE) for child in self._frontends))
        await asyncio.gather(*(child.stop(_ENGINE_PATIENCE) for child in self._engines))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.publisher is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.publisher.close(), _PUBLISHER_DEADLINE)
        self._to_engine.close(linger=0)
        self._inbox.close(linger=0)
        self._context.term()
        _log.info("worker ended")


def describe(runtime: Runtime, info: EngineInfo) -> Registration:
    """What routers learn of this worker.

    Raises:
        TokenizerError: the model's tokenizer files are unusable.
    """
    settings = runtime.settings
    assert settings.replica_id is not None
    assert settings.advertise_url is not None
    namespace = cache_namespace(settings, info.dtype, info.kv_dtype)
    return Registration(
        replica_id=settings.replica_id,
        service=settings.service,
        url=settings.advertise_url,
        models=settings.served_model_name,
        namespace=namespace,
        root=root_fingerprint(block_hasher(settings, namespace)),
        index_block=index_block(settings),
        tokenizer_digest=TokenizerFiles.load(runtime.model_dir).digest,
        engine=info,
        sharing=settings.sharing,
    )


def _to_stderr(line: bytes) -> None:
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()


def _obituary(child: Child) -> str:
    """Names the dead and, when it left one, its last error: the cause first, not a trace."""
    code = child.process.returncode
    text = f"{child.name} (process {child.pid}) {describe_exit(code if code is not None else 0)}"
    error = child.last_error()
    return f"{text}: {error}" if error and code != 0 else text


async def _answers_ready(host: str, port: int) -> bool:
    """Whether a frontend answers `GET /readyz` with 200."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(target, port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")
                await writer.drain()
                status = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return status.split(b" ")[1:2] == [b"200"]

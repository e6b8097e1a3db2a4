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
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.settings import LoadFormat, LogLevel, WorkerSettings
from radixgrove.service import exit_codes, logs
from radixgrove.service.directories import private_directory
from radixgrove.service.listening import BindingError, check_management
from radixgrove.service.liveness import tick
from radixgrove.service.probing import is_ready
from radixgrove.service.supervisor import ChildFailed, Supervised
from radixgrove.worker.agent import demo_model, management, model_files
from radixgrove.worker.agent.machine import Machine, wait_to_be_replaced
from radixgrove.worker.agent.preparation import (
    AgentError,
    check_group,
    reserved_port,
    resolve_model,
    resolve_settings,
    with_group,
    worker_part,
)
from radixgrove.worker.agent.probes import Marker
from radixgrove.worker.agent.progress import StartReport, memory_arithmetic
from radixgrove.worker.agent.publisher import Publisher
from radixgrove.worker.agent.registration import describe
from radixgrove.worker.cache.identity import block_hasher, cache_namespace
from radixgrove.worker.liveness import DEADLINE_GRACE, GROUP_GRACE, Liveness, is_stopped
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
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.runtime import Runtime

_log = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5
_FRONTEND_DEADLINE = 60.0  # from the engine's readiness to the frontends' first answer
_FRONTEND_GRACE = 5.0  # beyond the drain timeout
_ENGINE_PATIENCE = 5.0
_FAILURE_PATIENCE = 3.0  # frontends end their clients' requests with an error
_PUBLISHER_DEADLINE = 5.0


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
        settings = with_group(settings, os.environ)
        check_group(settings, os.environ)
        check_management(settings)
        marker = Marker(settings)
        if marker.is_set:
            return asyncio.run(wait_to_be_replaced(settings))
        model_dir = resolve_model(settings.model)
        model_files.check(model_dir, weights=settings.load_format is LoadFormat.SAFETENSORS)
        with private_directory("radixgrove-worker-") as directory:
            if settings.node_rank > 0:
                runtime = _runtime(directory, settings, model_dir)
                return asyncio.run(Machine(runtime, marker, modules.engine).run())
            with reserved_port(settings) as port:
                settings = resolve_settings(settings, model_dir, port)
                runtime = _runtime(directory, settings, model_dir)
                return asyncio.run(Agent(runtime, modules, marker).run())
    except ModelError as error:
        _log.error("%s", error)
        return exit_codes.MODEL
    except (AgentError, demo_model.DemoModelError, BindingError) as error:
        _log.error("%s", error)
        return getattr(error, "code", exit_codes.FAILED)


def _runtime(directory: Path, settings: WorkerSettings, model_dir: Path) -> Runtime:
    runtime = Runtime(directory, settings, model_dir)
    runtime.metrics_dir.mkdir()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(runtime.metrics_dir)
    logs.count_drops()
    runtime.write()
    return runtime


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Agent:
    """One worker's processes, from start to end. `run` is called once."""

    def __init__(
        self, runtime: Runtime, modules: Modules = Modules(), marker: Marker | None = None
    ) -> None:
        """
        Args:
            marker: set once the group serves.
        """
        self.runtime = runtime
        self.settings = runtime.settings
        self.state = WorkerState.STARTING
        self.info: EngineInfo | None = None
        grace = GROUP_GRACE if Layout.of(self.settings).size > 1 else DEADLINE_GRACE
        self.liveness = Liveness(grace=grace)
        self.publisher: Publisher | None = None
        self.started = time.monotonic()  # seconds of this process's clock
        self.phase: PhaseReport | None = None
        self._modules = modules
        self._marker = marker or Marker(self.settings)
        self._engines: list[Supervised] = []
        self._frontends: list[Supervised] = []
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
        logs.LevelFile(self.runtime.directory).write(level)
        _log.warning("log level is now %s", level)

    # ---- life ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Start everything, serve until a signal, drain; or fail with the name of what failed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._inbox.bind(self.runtime.agent_socket)
        self._to_engine.connect(self.runtime.engine_socket)
        tasks = [
            asyncio.create_task(self._receive(), name="inbox"),
            asyncio.create_task(tick(), name="ticks"),
        ]
        try:
            async with management.serving(self):
                await self._start_children()
                tasks.append(asyncio.create_task(self._watch(), name="watch"))
                tasks.append(asyncio.create_task(self._become_ready(), name="readiness"))
                await self._until_stop(tasks)
                await self._drain_and_stop()
            return 0
        except (AgentError, ChildFailed) as error:
            self.state = WorkerState.FAILED
            _log.error("%s", error)
            return _exit_code(error)
        finally:
            await self._end(tasks)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            _log.warning("second signal: ending without draining")
            self._hurry.set()
        self._stop.set()

    async def _start_children(self) -> None:
        directory = self.runtime.directory
        for rank in Layout.of(self.settings).ranks_of(self.settings.node_rank):
            name = f"engine rank {rank}"
            self._engines.append(worker_part(name, self._modules.engine, directory, rank))
        for index in range(self.settings.frontends):
            name = f"frontend {index}"
            self._frontends.append(worker_part(name, self._modules.frontend, directory, index))
        for service in (*self._engines, *self._frontends):
            await service.start()

    async def _receive(self) -> None:
        decoder: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
        while True:
            message = decoder.decode(await self._inbox.recv())
            self.liveness.hear()
            match message:
                case Stats():
                    self.liveness.take(message)
                    if self.liveness.ready() and self.info is not None:
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
            ranks = [service.child for service in self._engines]
            held = [child for child in ranks if child.running and is_stopped(child.pid)]
            problem = self.liveness.problem(stopped=bool(held))
            if problem is not None:
                culprit = held[0] if held else ranks[0]
                # Kept first: the death that we cause must not pass for the reason.
                self._stuck = AgentError(
                    f"{culprit.name} (process {culprit.pid}) is stuck: {problem}; killed it",
                    exit_codes.STUCK,
                )
                await asyncio.gather(*(child.kill() for child in ranks))
                raise self._stuck
            if self.state in (WorkerState.READY, WorkerState.NOT_READY):
                self._set_readiness(self.liveness.ready())

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
        self._marker.set()
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.READY
        self._report.ready(self.settings, time.monotonic() - self.started)
        if self.publisher is None:
            await asyncio.Event().wait()  # this task ends only with the agent
        else:  # without it, no router would hear of this worker any more
            await self.publisher.until_it_ends()

    async def _await_frontends(self) -> None:
        deadline = time.monotonic() + _FRONTEND_DEADLINE
        while not await asyncio.to_thread(is_ready, self.settings.host, self.settings.port):
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
                self.liveness.ready,
            )
            await publisher.start()
        except Exception as error:
            raise AgentError(f"cannot register with the routers: {error}") from error
        self.publisher = publisher

    async def _until_stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """Return on a signal; raise when a child or one of our own tasks ended."""
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        # Engines first: a frontend that follows its engine into death is not the cause.
        children = [*self._engines, *self._frontends]
        try:
            await asyncio.wait(
                [stop, *tasks, *(child.failed for child in children)],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            stop.cancel()
        if self._stuck is not None:
            raise self._stuck
        for task in tasks:
            if task.done():
                raise _end_of(task)
        for child in children:
            if child.failed.done() and not self._stop.is_set():
                child.failed.result()

    async def _drain_and_stop(self) -> None:
        """Lease, frontends, engine, in this order: routers stop sending before anything ends."""
        await self.drain()
        patience = self.settings.drain_timeout + _FRONTEND_GRACE
        if self.info is None:  # still starting: there is nothing to finish
            patience = _FAILURE_PATIENCE
        stopping = asyncio.gather(*(service.stop(patience) for service in self._frontends))
        hurry = asyncio.create_task(self._hurry.wait())
        ends: list[asyncio.Future[Any]] = [stopping, hurry]
        ends += [service.child.exited for service in self._engines]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        dead = [service.child for service in self._engines if not service.child.running]
        if not stopping.done():
            patience = 0.0 if self._hurry.is_set() else _FAILURE_PATIENCE
            await asyncio.gather(*(service.stop(patience) for service in self._frontends))
            await stopping
        if dead:
            raise self._stuck or AgentError(f"{dead[0].obituary()}, while draining")

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        """The one way out: whatever still runs is ended, in any state."""
        await asyncio.gather(*(service.stop(_FAILURE_PATIENCE) for service in self._frontends))
        await asyncio.gather(*(service.stop(_ENGINE_PATIENCE) for service in self._engines))
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


def _end_of(task: asyncio.Task[None]) -> AgentError:
    """What the agent ends with when one of its tasks has: without it, it would be half blind."""
    error = task.exception()
    if isinstance(error, AgentError):
        return error
    if error is not None:
        _log.error("the worker's %s task failed", task.get_name(), exc_info=error)
    return AgentError(f"the worker ends because its {task.get_name()} task did")


def _exit_code(error: AgentError | ChildFailed) -> int:
    if isinstance(error, AgentError):
        return error.code
    return exit_codes.STUCK if error.hung else exit_codes.FAILED

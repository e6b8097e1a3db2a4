"""The agent: the process behind `radixgrove worker`, which owns all others of one worker.

It makes the runtime directory, starts the engine's ranks and the HTTP frontends, watches them,
publishes to Redis, and serves the management port. It never imports torch. A worker lives and dies
whole: when one child is gone or stuck, the agent ends the others and exits with a message that
names it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import zmq.asyncio

from radixgrove.protocol.errors import StartFailed
from radixgrove.protocol.model.config import ModelError
from radixgrove.protocol.settings import LogLevel, WorkerSettings
from radixgrove.service import exit_codes, logs
from radixgrove.service.children import Child
from radixgrove.service.directories import private_directory
from radixgrove.service.listening import reserve
from radixgrove.service.liveness import tick
from radixgrove.service.probing import is_ready
from radixgrove.service.processes import on_end, take_descriptors
from radixgrove.service.settings_check import check_settings
from radixgrove.service.supervisor import ChildFailed, Supervised
from radixgrove.worker.agent import management, model_files
from radixgrove.worker.agent.engines import Engine, total
from radixgrove.worker.agent.halted import Halted
from radixgrove.worker.agent.machine import Machine, wait_to_be_replaced
from radixgrove.worker.agent.machines import Machines
from radixgrove.worker.agent.preparation import (
    AgentError,
    check_group,
    engine_part,
    frontend_part,
    resolve_model,
    resolve_settings,
    with_group,
)
from radixgrove.worker.agent.probes import Marker
from radixgrove.worker.agent.progress import ready_line
from radixgrove.worker.messages import FlushCache, Stats
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.runtime import Runtime

_log = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5
_FRONTEND_DEADLINE = 60.0  # from the engine's readiness to the frontends' first answer
_FRONTEND_GRACE = 5.0  # beyond the drain timeout
_ENGINE_PATIENCE = 5.0
_FAILURE_PATIENCE = 3.0  # frontends end their clients' requests with an error


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
    """Run a worker until a signal has drained it; returns the exit code."""
    logs.configure(settings.log_level, json=settings.log_json)
    take_descriptors()
    # Until the event loop takes over, SIGTERM must still unwind: a conversion may be running.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        settings = with_group(settings, os.environ)
        check_group(settings, os.environ)
        marker = Marker(settings)
        if marker.is_set:
            return asyncio.run(wait_to_be_replaced(settings))
        if settings.node_rank == 0:  # the others have no frontends, nor need the files of these
            check_settings(settings)
        model_dir = resolve_model(settings.model)
        model = model_files.check_for(settings, model_dir)
        for remark in model_files.remarks(model, settings):
            _log.log(logging.WARNING if remark.warns else logging.INFO, "%s", remark.text)
        with private_directory("radixgrove-worker-") as directory:
            if settings.node_rank > 0:
                settings = resolve_settings(settings, model_dir, settings.port)
                runtime = _runtime(directory, settings, model_dir)
                return asyncio.run(Machine(runtime, marker, modules.engine).run())
            with reserve(settings.host, settings.port) as reserved:
                port = reserved.getsockname()[1]
                settings = resolve_settings(settings, model_dir, port)
                runtime = _runtime(directory, settings, model_dir)
                return asyncio.run(Agent(runtime, modules, marker).run())
    except ModelError as error:
        _log.error("%s", error)
        return exit_codes.MODEL
    except StartFailed as error:
        _log.error("%s", error)
        return exit_codes.of(error)


def _runtime(directory: Path, settings: WorkerSettings, model_dir: Path) -> Runtime:
    runtime = Runtime(directory, settings, model_dir)
    runtime.metrics_dir.mkdir()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(runtime.metrics_dir)
    from radixgrove.service.metric_files import reserve_room

    reserve_room()
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
        self.started = time.monotonic()  # seconds of this process's clock
        self._modules = modules
        self._marker = marker or Marker(self.settings)
        self._ranks: list[Supervised] = []
        self._frontends: list[Supervised] = []
        self._stuck: AgentError | None = None
        self.failure = ""  # why the worker ends, if not in order
        self._machines: Machines | None = None  # the others of a group of several members
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self.engines = [
            Engine(runtime, dp_rank, self._context) for dp_rank in range(self.settings.dp)
        ]

    # ---- what the management port uses ---------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the step counters of all engines move."""
        return all(engine.liveness.ready() for engine in self.engines)

    @property
    def stats(self) -> Stats | None:
        """The latest pulses of all engines, together."""
        pulses = [engine.liveness.stats for engine in self.engines]
        return total([stats for stats in pulses if stats is not None])

    def flush_cache(self) -> bool:
        """False when an engine takes no messages."""
        taken = [engine.send(FlushCache()) for engine in self.engines]
        return all(taken)

    async def drain(self) -> None:
        """Make routers pass this worker by; it ends what it has and stays up until SIGTERM."""
        if self.state is not WorkerState.DRAINING:
            _log.info("draining: routers send no new requests")
            self.state = WorkerState.DRAINING
        if not all(await asyncio.gather(*(engine.drain() for engine in self.engines))):
            _log.warning("Redis has not confirmed the drain; routers learn it from the next lease")

    def set_log_level(self, level: LogLevel) -> None:
        """For the agent at once, for engine and frontends within a second."""
        logs.LevelFile(self.runtime.directory).write(level)
        _log.warning("log level is now %s", level)

    # ---- life ----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Start everything, serve until a signal, drain; or fail with the name of what failed."""
        on_end(self._on_signal)
        tasks = [asyncio.create_task(tick(), name="ticks")]
        for engine in self.engines:
            engine.open()
            tasks.append(asyncio.create_task(engine.receive(), name=f"inbox {engine.dp_rank}"))
        if self.settings.dp > 1 and self.settings.nodes > 1:
            self._machines = Machines(self.runtime)
            tasks.append(asyncio.create_task(self._machines.run(), name="machines"))
        try:
            async with management.serving(self):  # which says to the end why it ends
                return await self._serve(tasks)
        finally:
            await self._close(tasks)
            if self.failure:  # again, last: only the end of a container's log is kept
                _log.error("worker ended: %s", self.failure)
            else:
                _log.info("worker ended")

    async def _serve(self, tasks: list[asyncio.Task[None]]) -> int:
        """Until a signal, or a failure; the exit code. No child is left behind."""
        error: AgentError | ChildFailed | None = None
        try:
            await self._start_children()
            tasks.append(asyncio.create_task(self._watch(), name="watch"))
            tasks.append(asyncio.create_task(self._become_ready(), name="readiness"))
            await self._until_stop(tasks)
            await self._drain_and_stop(tasks)
        except (AgentError, ChildFailed) as failure:
            error = failure
            self._fail(error)
        finally:
            await self._end_children()
        if error is None and (error := self._rank_that_failed()):
            self._fail(error)
        return 0 if error is None else _exit_code(error)

    def _fail(self, error: AgentError | ChildFailed) -> None:
        self.state = WorkerState.FAILED
        self.failure = str(error)
        _log.error("%s", error)

    def _rank_that_failed(self) -> AgentError | None:
        """One that was ending by itself when it was ended: its requests were answered with errors,
        so that nothing was left to drain before its death was seen."""
        for child in (service.child for service in self._ranks):
            if (child.process.returncode or 0) > 0:  # below 0: by our signal
                return _death_in_drain(child)
        return None

    def _on_signal(self) -> None:
        if self._stop.is_set():
            _log.warning("second signal: ending without draining")
            self._hurry.set()
        self._stop.set()

    async def _start_children(self) -> None:
        layout = Layout.of(self.settings)
        for rank in layout.ranks_of(self.settings.node_rank):
            part = engine_part(self._modules.engine, self.runtime, rank)
            self._ranks.append(part)
            self.engines[layout.place(rank).member].ranks.append(part)
        for index in range(self.settings.frontends):
            part = frontend_part(self._modules.frontend, self.runtime, index)
            self._frontends.append(part)
        for service in (*self._ranks, *self._frontends):
            await service.start()

    async def _watch(self) -> None:
        """Ends with an AgentError when a rank is stuck, after killing it."""
        halted = Halted()
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self._stuck = halted.find(part.child for part in self._ranks)
            for engine in self.engines:
                self._stuck = self._stuck or _verdict(engine)
            if self._stuck is not None:
                # It is kept: the deaths that we cause must not pass for the reason.
                await asyncio.gather(*(part.child.kill() for part in self._ranks))
                raise self._stuck
            if self.state in (WorkerState.READY, WorkerState.NOT_READY):
                self._set_readiness(self.alive)

    def _set_readiness(self, ready: bool) -> None:
        state = WorkerState.READY if ready else WorkerState.NOT_READY
        if state is not self.state:
            _log.warning("the engine's pulse is %s", "back" if ready else "late: not ready")
            self.state = state

    async def _become_ready(self) -> None:
        """Announce the worker once all engines and every frontend answer."""
        await asyncio.gather(*(engine.ready.wait() for engine in self.engines))
        await self._await_frontends()
        if self.settings.redis_url is not None:
            await asyncio.gather(*(engine.publish() for engine in self.engines))
        self._marker.set()
        if self.state is WorkerState.STARTING:
            self.state = WorkerState.READY
        _log.info("%s", ready_line(self.settings, time.monotonic() - self.started))
        publishers = [engine.publisher for engine in self.engines if engine.publisher is not None]
        if not publishers:
            await asyncio.Event().wait()  # this task ends only with the agent
        # Without its publisher, no router would hear of a member any more.
        waiting = [asyncio.ensure_future(publisher.until_it_ends()) for publisher in publishers]
        ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    async def _await_frontends(self) -> None:
        deadline = time.monotonic() + _FRONTEND_DEADLINE
        while not await asyncio.to_thread(is_ready, self.settings.host, self.settings.port):
            if time.monotonic() > deadline:
                raise AgentError(
                    f"the frontends were not ready {_FRONTEND_DEADLINE:.0f} s after the engine"
                )
            await asyncio.sleep(0.1)

    async def _until_stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """Return on a signal; raise when a child or one of our own tasks ended."""
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        # Ranks first: a frontend that follows its engine into death is not the cause.
        children = [*self._ranks, *self._frontends]
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

    async def _drain_and_stop(self, tasks: list[asyncio.Task[None]]) -> None:
        """Lease, frontends, engine, in this order: routers stop sending before anything ends."""
        await self.drain()
        patience = self.settings.drain_timeout + _FRONTEND_GRACE
        if any(engine.info is None for engine in self.engines):  # there is nothing to finish yet
            patience = _FAILURE_PATIENCE
        stopping = asyncio.gather(*(service.stop(patience) for service in self._frontends))
        hurry = asyncio.create_task(self._hurry.wait())
        ends: list[asyncio.Future[Any]] = [stopping, hurry, *tasks]
        ends += [service.child.exited for service in self._ranks]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        dead = [service.child for service in self._ranks if not service.child.running]
        if not stopping.done():
            patience = 0.0 if self._hurry.is_set() else _FAILURE_PATIENCE
            await asyncio.gather(*(service.stop(patience) for service in self._frontends))
            await stopping
        if dead:
            raise self._stuck or _death_in_drain(dead[0])
        for task in tasks:
            if task.done():
                raise _end_of(task)

    async def _end_children(self) -> None:
        """The one way out: whatever still runs is ended, in any state."""
        await asyncio.gather(*(service.stop(_FAILURE_PATIENCE) for service in self._frontends))
        ending = [service.stop(_ENGINE_PATIENCE) for service in self._ranks]
        if self._machines is not None:
            ending.append(self._machines.close(self.failure))
        await asyncio.gather(*ending)

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self.engines))
        self._context.term()


def _death_in_drain(rank: Child) -> AgentError:
    return AgentError(f"{rank.obituary()}, while draining")


def _end_of(task: asyncio.Task[None]) -> AgentError:
    """What the agent ends with when one of its tasks has: without it, it would be half blind."""
    error = task.exception()
    if isinstance(error, AgentError):
        return error
    if error is not None:
        _log.error("the worker's %s task failed", task.get_name(), exc_info=error)
    return AgentError(f"the worker ends because its {task.get_name()} task did")


def _verdict(engine: Engine) -> AgentError | None:
    """Which rank of a member is stuck, if one is."""
    problem = engine.liveness.problem()
    if problem is None:
        return None
    if not engine.ranks:
        place = engine.leader
        text = f"engine rank {place.rank} (machine {place.node}) is stuck: {problem}"
        return AgentError(text, exit_codes.STUCK)
    culprit = engine.ranks[0].child
    text = f"{culprit.name} (process {culprit.pid}) is stuck: {problem}; killed it"
    return AgentError(text, exit_codes.STUCK)


def _exit_code(error: AgentError | ChildFailed) -> int:
    if isinstance(error, AgentError):
        return error.code
    return exit_codes.STUCK if error.hung else exit_codes.FAILED

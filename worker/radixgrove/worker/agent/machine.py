"""The agent of a machine of a group other than the first: it runs ranks, and ends with them.

Frontends and publishers are machine 0's. The ranks of a pipeline hear from rank 0 when the group
ends, and end by themselves when they lose it. Members of their own are tied to machine 0 by the two
agents (`machines`), which also say when the group ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from radixgrove.protocol.settings import LogLevel, WorkerSettings, reveal
from radixgrove.service import exit_codes, logs
from radixgrove.service.listening import listen_for_management
from radixgrove.service.liveness import tick
from radixgrove.service.management import ManagementApi
from radixgrove.service.processes import on_end
from radixgrove.service.server import Server
from radixgrove.service.supervisor import ChildFailed, Supervised
from radixgrove.worker.agent import probes
from radixgrove.worker.agent.halted import Halted
from radixgrove.worker.agent.machines import join_machine_0
from radixgrove.worker.agent.preparation import AgentError, engine_part
from radixgrove.worker.agent.relay import Relay
from radixgrove.worker.messages import EngineState, PhaseReport, ToAgent
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.runtime import Runtime

_log = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5
_RANK_PATIENCE = 5.0
_END_GRACE = 15.0  # beyond the drain timeout, for machine 0 to say that the group ends


class MachineStatus(msgspec.Struct, kw_only=True):
    """A machine that runs ranks only; the group's status is machine 0's."""

    node_rank: int
    nodes: int
    master: str | None
    state: str
    ranks: list[int]
    pid: int
    uptime_seconds: float


class Machine:
    """One machine's ranks, from start to end. `run` is called once."""

    def __init__(self, runtime: Runtime, marker: probes.Marker, engine: str) -> None:
        """
        Args:
            engine: the module that runs a rank.
        """
        self.runtime = runtime
        self.settings = runtime.settings
        self._marker = marker
        self._engine = engine
        self._started = time.monotonic()
        self._ranks = Layout.of(self.settings).ranks_of(self.settings.node_rank)
        self._children: list[Supervised] = []
        self._joined = 0
        self._stuck: AgentError | None = None
        self._stop = asyncio.Event()
        self._relay: Relay | None = None  # to machine 0, in a group of several members
        self._over: asyncio.Future[str]  # why it said that the group is over
        self._context = zmq.asyncio.Context()
        self._inbox: zmq.asyncio.Socket = self._context.socket(zmq.PULL)

    @property
    def role(self) -> str:
        """What `/readyz` says."""
        return "joined" if self._joined == len(self._ranks) else ""

    async def run(self) -> int:
        """Run the ranks until the group ends; or fail with the name of what failed."""
        loop = asyncio.get_running_loop()
        on_end(self._stop.set)
        self._inbox.bind(self.runtime.machine_socket)
        self._over = loop.create_future()
        why = ""
        tasks = [
            asyncio.create_task(self._receive(), name="inbox"),
            asyncio.create_task(tick(), name="ticks"),
        ]
        try:
            async with self._management(), probes.serving(self.settings, lambda: self.role):
                if self.settings.dp > 1:
                    await self._join(tasks)
                for rank in self._ranks:
                    self._children.append(engine_part(self._engine, self.runtime, rank))
                    await self._children[-1].start()
                tasks.append(asyncio.create_task(self._watch(), name="watch"))
                await self._until_end(tasks)
            return 0
        except (AgentError, ChildFailed) as error:
            why = str(error)
            _log.error("%s", error)
            return exit_codes.of(error)
        finally:
            if self._relay is not None:
                await asyncio.to_thread(self._relay.close, why)
            await asyncio.gather(*(child.stop(_RANK_PATIENCE) for child in self._children))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._inbox.close(linger=0)
            self._context.term()
            _log.info("machine %d of the group ended", self.settings.node_rank)

    async def _join(self, tasks: list[asyncio.Task[None]]) -> None:
        """Raises AgentError: machine 0 does not take this one, or a signal came first."""
        joining = asyncio.create_task(join_machine_0(self.runtime, self._over))
        stop = asyncio.create_task(self._stop.wait())
        try:
            ends: list[asyncio.Future[Any]] = [joining, stop, *tasks]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                self._raise_failure(tasks)
                raise AgentError("ended before machine 0 was met")
            self._relay = joining.result()
        finally:
            stop.cancel()
            joining.cancel()

    async def _receive(self) -> None:
        decoder: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
        while True:
            message = decoder.decode(await self._inbox.recv())
            if isinstance(message, PhaseReport) and message.state is EngineState.READY:
                self._joined += 1
                if self.role:
                    _log.info("all ranks of machine %d have joined", self.settings.node_rank)
                    self._marker.set()

    async def _watch(self) -> None:
        """Ends with an AgentError when a rank is held by the kernel."""
        halted = Halted()
        children = [supervised.child for supervised in self._children]
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            # Kept first: the death that we cause must not pass for the reason.
            self._stuck = halted.find(children)
            if self._stuck is not None:
                await asyncio.gather(*(child.kill() for child in children))
                raise self._stuck

    async def _until_end(self, tasks: list[asyncio.Task[None]]) -> None:
        """Return when every rank has ended in order; raise when one has not."""
        stop = asyncio.create_task(self._stop.wait())
        deadline: float | None = None
        exits = [supervised.child.exited for supervised in self._children]
        try:
            while not all(end.done() for end in exits):
                waiting: list[asyncio.Future[Any]] = [*tasks, self._over]
                waiting += [end for end in exits if not end.done()]
                if deadline is None:
                    waiting.append(stop)
                seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
                done, _ = await asyncio.wait(
                    waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise AgentError("machine 0 did not end the group in time")
                if stop in done:  # machine 0 says when all is answered
                    deadline = time.monotonic() + self.settings.drain_timeout + _END_GRACE
                self._raise_failure(tasks)
                if self._over.done():
                    if why := self._over.result():
                        raise AgentError(f"machine 0 ended the group: {why}")
                    break
        finally:
            stop.cancel()
        self._raise_failure(tasks)

    def _raise_failure(self, tasks: list[asyncio.Task[None]]) -> None:
        if self._stuck is not None:
            raise self._stuck
        for task in tasks:
            if task.done():
                task.result()
        for child in (supervised.child for supervised in self._children):
            if child.exited.done() and child.process.returncode != 0:
                raise AgentError(f"{child.obituary()}, on machine {self.settings.node_rank}")

    @contextlib.asynccontextmanager
    async def _management(self) -> AsyncIterator[None]:
        listener = listen_for_management(self.settings)
        _log.info("management port: %s", "{}:{}".format(*listener.getsockname()[:2]))

        async def set_log_level(level: LogLevel) -> None:
            logs.LevelFile(self.runtime.directory).write(level)

        api = ManagementApi(
            "Radixgrove worker: management of a machine",
            key=reveal(self.settings.management_key),
            trouble=lambda: "" if self.role else "joining",
            status=self._status,
            status_type=MachineStatus,
            set_log_level=set_log_level,
        )
        async with Server(api.guarded(), listener).running("management port"):
            yield

    def _status(self) -> MachineStatus:
        return MachineStatus(
            node_rank=self.settings.node_rank,
            nodes=self.settings.nodes,
            master=self.settings.master,
            state=self.role or "joining",
            ranks=list(self._ranks),
            pid=os.getpid(),
            uptime_seconds=round(time.monotonic() - self._started, 1),
        )


async def wait_to_be_replaced(settings: WorkerSettings) -> int:
    """A machine that was restarted in place: its group goes without it, until all of it is new."""
    _log.warning("restarted in place: waiting to be replaced with the group")
    stop = asyncio.Event()
    on_end(stop.set)
    async with probes.serving(settings, lambda: ""):
        await stop.wait()
    return 0

"""An object per data-parallel member of the agent: its engine's messages, pulse and publisher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import msgspec
import zmq
import zmq.asyncio

from radixgrove.protocol.registry import member_id
from radixgrove.service.supervisor import Supervised
from radixgrove.worker.agent.preparation import AgentError
from radixgrove.worker.agent.progress import StartReport, memory_arithmetic
from radixgrove.worker.agent.publisher import Publisher
from radixgrove.worker.agent.registration import describe
from radixgrove.worker.cache.identity import block_hasher, cache_namespace
from radixgrove.worker.liveness import (
    DEADLINE_GRACE,
    FAR_SILENCE,
    GROUP_GRACE,
    SILENCE,
    Liveness,
)
from radixgrove.worker.messages import (
    Admitted,
    CacheEvents,
    CacheSnapshot,
    EngineInfo,
    EngineState,
    PhaseReport,
    PublishSnapshot,
    Stats,
    ToAgent,
    ToEngine,
)
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.runtime import Runtime

_log = logging.getLogger(__name__)

_PUBLISHER_DEADLINE = 5.0


class Engine:
    """One member's. `receive` runs beside everything else."""

    def __init__(self, runtime: Runtime, dp_rank: int, context: zmq.asyncio.Context) -> None:
        settings, layout = runtime.settings, Layout.of(runtime.settings)
        self.dp_rank = dp_rank
        self.leader = layout.place(layout.leader(dp_rank))
        self.info: EngineInfo | None = None
        self.phase: PhaseReport | None = None
        here = self.leader.node == settings.node_rank
        grace = DEADLINE_GRACE if here and layout.ranks_per_member == 1 else GROUP_GRACE
        self.liveness = Liveness(grace=grace, silence=SILENCE if here else FAR_SILENCE)
        self.publisher: Publisher | None = None
        self.ranks: list[Supervised] = []  # on this machine
        self.ready = asyncio.Event()  # once it takes requests
        self._runtime = runtime
        self._name = f"member {dp_rank}: " if layout.dp > 1 else ""
        self._report = StartReport(_log, self._name)
        self._inbox: zmq.asyncio.Socket = context.socket(zmq.PULL)
        self._outbox: zmq.Socket[bytes] = zmq.Context(context).socket(zmq.PUSH)
        self._encoder = msgspec.msgpack.Encoder()
        self.replica_id = member_id(settings.replica_id or "", dp_rank, layout.dp)

    def open(self) -> None:
        self._inbox.bind(self._runtime.agent_socket(self.dp_rank))
        self._outbox.connect(self._runtime.engine_socket(self.dp_rank))

    async def close(self) -> None:
        """End its lease, as far as Redis can be reached, and the sockets."""
        if self.publisher is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.publisher.close(), _PUBLISHER_DEADLINE)
        self._outbox.close(linger=0)
        self._inbox.close(linger=0)

    def send(self, message: ToEngine) -> bool:
        """Hand it a message; False when its queue is full or it is not there yet."""
        try:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def receive(self) -> None:
        """Take what it says, until cancelled."""
        decoder: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
        while True:
            self._take(decoder.decode(await self._inbox.recv()))

    def _take(self, message: ToAgent) -> None:
        self.liveness.hear()
        match message:
            case Stats():
                self.liveness.take(message)
                if self.liveness.ready() and self.info is not None:
                    self.ready.set()
            case PhaseReport():
                self.phase = message
                self._report.phase(message)
            case EngineInfo():
                self.info = message
                for line in memory_arithmetic(message):
                    _log.info("%s%s", self._name, line)
            case _:
                pass
        if self.publisher is not None and isinstance(
            message, CacheEvents | CacheSnapshot | Admitted | Stats
        ):
            self.publisher.apply(message)

    async def publish(self) -> None:
        """Register with the routers, and keep them informed from now on.

        Raises:
            AgentError: they refuse it.
        """
        settings, info = self._runtime.settings, self.info
        assert settings.redis_url is not None
        assert info is not None
        try:
            publisher = Publisher(
                settings.redis_url,
                settings.redis_prefix,
                describe(self._runtime, info, self.dp_rank),
                block_hasher(settings, cache_namespace(settings, info.dtype, info.kv_dtype)),
                self._request_snapshot,
                self.liveness.ready,
            )
            await publisher.start()
        except Exception as error:
            raise AgentError(f"cannot register with the routers: {error}") from error
        self.publisher = publisher

    async def drain(self) -> bool:
        """Make routers pass it by; False where they are yet to hear of it."""
        return self.publisher is None or await self.publisher.drain()

    def _request_snapshot(self) -> None:
        if not self.send(PublishSnapshot()):
            _log.warning("%sthe engine takes no messages: no snapshot of its cache", self._name)


def least_advanced(engines: Sequence[Engine]) -> PhaseReport | None:
    """How far the start is: as far as the last of them."""
    order = list(EngineState)
    phases = [engine.phase for engine in engines if engine.phase is not None]
    return min(phases, key=lambda phase: order.index(phase.state), default=None)


def total(pulses: Sequence[Stats]) -> Stats | None:
    """What engines say together; None where none has said anything."""
    if not pulses:
        return None
    order = list(EngineState)
    remaining = [s.step_remaining for s in pulses if s.step_remaining is not None]
    sums = {
        name: sum(getattr(stats, name) for stats in pulses)
        for name in Stats.__struct_fields__
        if name not in ("state", "step_remaining")
    }
    state = min((stats.state for stats in pulses), key=order.index)
    return Stats(state=state, step_remaining=max(remaining, default=None), **sums)

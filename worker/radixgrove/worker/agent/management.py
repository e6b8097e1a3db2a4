"""The worker's management port, served by the agent.

It has the endpoints of every management port (`service.management`), `POST /drain` and
`POST /flush-cache`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
from fastapi import Response

from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.settings import LogLevel, reveal
from radixgrove.service.api import reply
from radixgrove.service.asgi import App
from radixgrove.service.listening import listen_for_management
from radixgrove.service.management import ManagementApi
from radixgrove.service.server import Server
from radixgrove.worker.agent.engines import Engine, least_advanced
from radixgrove.worker.agent.publisher import PublisherStatus
from radixgrove.worker.messages import EngineInfo, PhaseReport, Stats

if TYPE_CHECKING:
    from radixgrove.worker.agent.agent import Agent

_log = logging.getLogger(__name__)


class MemberStatus(msgspec.Struct, kw_only=True):
    """One data-parallel member; a group without has one."""

    dp_rank: int
    replica_id: str  # as routers know it
    ready: bool
    engine: EngineInfo | None
    stats: Stats | None  # its last pulse
    publisher: PublisherStatus | None


class WorkerStatus(msgspec.Struct, kw_only=True):
    replica_id: str | None
    service: str
    models: list[str]
    url: str | None
    state: str
    failure: str  # why a failed worker ends: which rank is lost, and on which machine
    phase: PhaseReport | None  # of a long start: the least advanced member's
    pid: int
    uptime_seconds: float
    engine: EngineInfo | None  # the first member's
    stats: Stats | None  # of the last pulses, the sum over all members
    members: list[MemberStatus]


class Draining(msgspec.Struct, kw_only=True):
    """What a draining worker still has to do."""

    state: str
    running: int
    waiting: int


class Flushing(msgspec.Struct):
    status: str = "flushing"


@contextlib.asynccontextmanager
async def serving(agent: Agent) -> AsyncIterator[None]:
    """Serve the management port while the block runs.

    Raises:
        BindingError: the port is taken, or would be reachable from elsewhere without a key.
    """
    listener = listen_for_management(agent.settings)
    _log.info("management port: %s", "{}:{}".format(*listener.getsockname()[:2]))
    async with Server(make_app(agent), listener).running("management port"):
        yield


def make_app(agent: Agent) -> App:
    async def set_log_level(level: LogLevel) -> None:
        agent.set_log_level(level)

    def trouble() -> str:
        """Whether the engines' step counters move and routers know this worker."""
        ready = agent.state == "ready" and agent.alive
        return "" if ready else str(agent.state)

    api = ManagementApi(
        "Radixgrove worker: management",
        key=reveal(agent.settings.management_key),
        trouble=trouble,
        status=lambda: _status(agent),
        status_type=WorkerStatus,
        set_log_level=set_log_level,
    )

    @api.act("/drain", Draining)
    async def drain() -> Response:
        """Routers pass the worker by; it ends what it has and stays up until SIGTERM."""
        await agent.drain()
        stats = agent.stats
        return reply(
            Draining(
                state=agent.state,
                running=stats.running if stats else 0,
                waiting=stats.waiting if stats else 0,
            )
        )

    @api.act("/flush-cache", Flushing, status=202)
    async def flush_cache() -> Response:
        """Drops every cached page that no running request holds."""
        if not agent.flush_cache():
            raise ApiError(503, "The engine takes no messages at the moment.", type="server_error")
        return reply(Flushing(), 202)

    return api.guarded()


def _status(agent: Agent) -> WorkerStatus:
    settings = agent.settings
    return WorkerStatus(
        replica_id=settings.replica_id,
        service=settings.service,
        models=settings.served_model_name,
        url=settings.advertise_url,
        state=agent.state,
        failure=agent.failure,
        phase=least_advanced(agent.engines),
        pid=os.getpid(),
        uptime_seconds=round(time.monotonic() - agent.started, 1),
        engine=agent.engines[0].info,
        stats=agent.stats,
        members=[_member(engine) for engine in agent.engines],
    )


def _member(engine: Engine) -> MemberStatus:
    return MemberStatus(
        dp_rank=engine.dp_rank,
        replica_id=engine.replica_id,
        ready=engine.liveness.ready(),
        engine=engine.info,
        stats=engine.liveness.stats,
        publisher=engine.publisher.status() if engine.publisher is not None else None,
    )

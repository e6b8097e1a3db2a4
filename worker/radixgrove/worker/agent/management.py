"""The management port of a worker: its own address and key, never the API's.

`GET /livez`, `GET /readyz` need no key (probes). With one, as `Authorization: Bearer KEY`:
`GET /status`, `POST /drain`, `POST /flush-cache`, `POST /log-level` with `{"level": "debug"}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn

from radixgrove.protocol.openai import errors
from radixgrove.protocol.settings import LogLevel, WorkerSettings, reveal
from radixgrove.service import asgi, auth
from radixgrove.service.asgi import Receive, Scope, Send
from radixgrove.service.listening import bound_socket

if TYPE_CHECKING:
    from radixgrove.worker.agent.agent import Agent

_log = logging.getLogger(__name__)

_MAX_BODY = 4096
_STOP_DEADLINE = 3.0

Handler = Callable[["Agent", bytes], Awaitable[tuple[int, dict[str, Any]]]]


class BindingError(Exception):
    """The management port cannot be opened as configured; the text says what to change."""


class _LevelChange(msgspec.Struct, forbid_unknown_fields=True):
    level: LogLevel


def check_binding(settings: WorkerSettings) -> None:
    """
    Raises:
        BindingError: the port would be reachable from elsewhere without a key.
    """
    if settings.management_key is None and not _is_loopback(settings.management_host):
        raise BindingError(
            f"management_host {settings.management_host} is not loopback: set management_key "
            "(RADIXGROVE_MANAGEMENT_KEY), or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextlib.asynccontextmanager
async def serving(agent: Agent) -> AsyncIterator[None]:
    """Serve the management port while the block runs.

    Raises:
        BindingError: the port is taken.
    """
    settings = agent.settings
    listener = _listen(settings)
    app = asgi.build(ManagementApp(agent), max_body_bytes=_MAX_BODY)
    server = _Server(
        uvicorn.Config(
            app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1
        )
    )
    task = asyncio.create_task(server.serve(sockets=[listener]), name="management port")
    _log.info("management port: %s", "{}:{}".format(*listener.getsockname()[:2]))
    try:
        yield
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(task, _STOP_DEADLINE)
        listener.close()


def _listen(settings: WorkerSettings) -> socket.socket:
    host, port = settings.management_host, settings.management_port
    try:
        listener = bound_socket(host, port)
        listener.listen()
    except OSError as error:
        raise BindingError(
            f"cannot listen on management port {port} of {host}: {error.strerror}; "
            "choose another with --management-port (0: any free one)"
        ) from error
    return listener


class _Server(uvicorn.Server):
    """Leaves signals to the agent."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ManagementApp:
    """A small ASGI application over one agent."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._key = reveal(agent.settings.management_key)
        self._routes: dict[str, dict[str, Handler]] = {
            "/livez": {"GET": _livez},
            "/readyz": {"GET": _readyz},
            "/status": {"GET": _status},
            "/drain": {"POST": _drain},
            "/flush-cache": {"POST": _flush_cache},
            "/log-level": {"POST": _log_level},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path not in asgi.QUIET_PATHS:
            self._authenticate(asgi.header(scope, "authorization"))
        methods = self._routes.get(path)
        if methods is None:
            raise errors.not_found(method, path)
        handler = methods.get(method)
        if handler is None:
            raise errors.method_not_allowed(method, ", ".join(methods))
        status, answer = await handler(self._agent, await asgi.read_body(receive))
        await asgi.respond(send, status, msgspec.json.encode(answer))

    def _authenticate(self, authorization: str | None) -> None:
        if self._key is None:
            return
        if not auth.same_secret(auth.bearer_key(authorization), self._key):
            raise errors.unauthorized(given=bool(authorization))


async def _livez(_agent: Agent, _body: bytes) -> tuple[int, dict[str, Any]]:
    return 200, {"status": "alive"}


async def _readyz(agent: Agent, _body: bytes) -> tuple[int, dict[str, Any]]:
    ready = agent.state == "ready" and agent.liveness.ready(time.time())
    return (200 if ready else 503), {"status": "ready" if ready else str(agent.state)}


async def _status(agent: Agent, _body: bytes) -> tuple[int, dict[str, Any]]:
    settings = agent.settings
    publisher = agent.publisher.status() if agent.publisher is not None else None
    return 200, {
        "replica_id": settings.replica_id,
        "service": settings.service,
        "models": settings.served_model_name,
        "url": settings.advertise_url,
        "state": agent.state,
        "phase": agent.phase,
        "pid": os.getpid(),
        "uptime_seconds": round(time.time() - agent.started, 1),
        "engine": agent.info,
        "stats": agent.liveness.stats,
        "publisher": publisher,
    }


async def _drain(agent: Agent, _body: bytes) -> tuple[int, dict[str, Any]]:
    await agent.drain()
    stats = agent.liveness.stats
    return 200, {
        "state": agent.state,
        "running": stats.running if stats else 0,
        "waiting": stats.waiting if stats else 0,
    }


async def _flush_cache(agent: Agent, _body: bytes) -> tuple[int, dict[str, Any]]:
    if not agent.flush_cache():
        raise errors.ApiError(
            503, "The engine takes no messages at the moment.", type="server_error"
        )
    return 202, {"status": "flushing"}


async def _log_level(agent: Agent, body: bytes) -> tuple[int, dict[str, Any]]:
    try:
        change = msgspec.json.decode(body, type=_LevelChange)
    except (msgspec.DecodeError, UnicodeDecodeError):
        levels = ", ".join(LogLevel)
        raise errors.invalid(f"'level' must be one of {levels}.", param="level") from None
    agent.set_log_level(change.level)
    return 200, {"level": change.level}

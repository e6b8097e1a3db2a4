"""One frontend process: uvicorn on the shared port, signals, graceful drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixgrove.service import logs
from radixgrove.service.auth import ApiKeys
from radixgrove.service.http import BoundedHttp
from radixgrove.service.listening import bound_socket
from radixgrove.worker.frontend.app import Frontend
from radixgrove.worker.frontend.engine_client import EngineClient
from radixgrove.worker.frontend.generation import Signal
from radixgrove.worker.frontend.model import ServedModel
from radixgrove.worker.runtime import Runtime

_log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048
_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 2.0  # for error answers after the drain's deadline
_ENGINE_WORDS_SECONDS = 0.5  # for aborts to be confirmed


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling: a drain must keep answering new requests (503)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Http(BoundedHttp, HttpToolsProtocol):
    """uvicorn's HTTP with bounds on requests under way."""


def run(directory: Path, index: int) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the drain at once."""
    runtime = Runtime.load(directory)
    settings = runtime.settings
    logs.configure(settings.log_level, json=settings.log_json)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its notes on starting and stopping
    runtime.follow_log_level()
    _Http.request_seconds = settings.request_timeout
    frontend = Frontend(
        settings,
        ServedModel.load(runtime.model_dir, settings),
        EngineClient(runtime.engine_socket, runtime.frontend_socket(index), index),
        ApiKeys.load(settings.api_keys_file),
    )
    # What exists now lives as long as the process: the collector need not walk it again.
    gc.collect()
    gc.freeze()
    config = uvicorn.Config(
        frontend.app,
        loop="uvloop",
        http=_Http,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=2,
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(frontend, _Server(config), _shared_socket(settings.host, settings.port)))


async def _serve(frontend: Frontend, server: _Server, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    frontend.engine.start()
    housekeeping = asyncio.create_task(frontend.housekeeping(), name="housekeeping")
    serving = asyncio.create_task(server.serve([listener]), name="server")
    stopping = asyncio.create_task(stop.wait(), name="signals")
    try:
        await asyncio.wait([housekeeping, serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done() and not housekeeping.done():
            await _drain(frontend, hurry)
        server.should_exit = True
        await serving
        if housekeeping.done():
            housekeeping.result()
    finally:
        for task in (housekeeping, stopping):
            task.cancel()
        await _until(lambda: frontend.engine.active == 0, _ENGINE_WORDS_SECONDS)
        frontend.engine.close()


async def _drain(frontend: Frontend, hurry: asyncio.Event) -> None:
    """Refuse new requests, wait for running ones, fail those that outlive `drain_timeout`."""
    timeout = frontend.settings.drain_timeout
    frontend.draining = True
    _log.info("draining %d requests for up to %.0f s", frontend.in_flight, timeout)
    ended = await _until(lambda: frontend.in_flight == 0 or hurry.is_set(), timeout)
    if ended and not hurry.is_set():
        return
    _log.warning("ending %d requests that are still running", frontend.in_flight)
    frontend.signal_all(Signal.SHUTDOWN)
    await _until(lambda: frontend.in_flight == 0, _LAST_WORDS_SECONDS)


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true within that time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True


def _shared_socket(host: str, port: int) -> socket.socket:
    """A listener on the port that all frontends of the worker share (SO_REUSEPORT)."""
    listener = bound_socket(host, port, shared=True)
    # Streams are many small writes: Nagle's algorithm would hold tokens back.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener

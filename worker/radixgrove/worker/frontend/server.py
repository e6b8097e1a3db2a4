"""One frontend process: its server on the shared port, signals, graceful drain."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from pathlib import Path

import uvloop

from radixgrove.service import logs
from radixgrove.service.auth import ApiKeys
from radixgrove.service.listening import listen
from radixgrove.service.liveness import tick
from radixgrove.service.metric_files import reserve_room
from radixgrove.service.processes import give_large_blocks_back, on_end
from radixgrove.service.server import Server
from radixgrove.worker.frontend.app import Frontend
from radixgrove.worker.frontend.generation import Signal
from radixgrove.worker.frontend.members import Members
from radixgrove.worker.frontend.model import ServedModel
from radixgrove.worker.runtime import Runtime

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_LAST_WORDS_SECONDS = 2.0  # for error answers after the drain's deadline
_ENGINE_WORDS_SECONDS = 0.5  # for aborts to be confirmed


def run(directory: Path, index: int) -> None:
    """Serve until a signal ends it, then drain; a second signal ends the drain at once."""
    runtime = Runtime.load(directory)
    settings = runtime.settings
    logs.configure(settings.log_level, json=settings.log_json)
    reserve_room()
    logs.count_drops()
    logs.LevelFile(directory).follow()
    give_large_blocks_back()
    frontend = Frontend(
        settings,
        ServedModel.load(runtime.model_dir, settings),
        Members(runtime, index),
        ApiKeys.load(settings.api_keys_file),
    )
    # What exists now lives as long as the process: the collector need not walk it again.
    gc.collect()
    gc.freeze()
    server = Server(
        frontend.app,
        listen(settings.host, settings.port, shared=True),
        request_timeout=settings.request_timeout,
        drain_timeout=_LAST_WORDS_SECONDS,  # `_drain` has waited for the requests
    )
    uvloop.run(_serve(frontend, server))


async def _serve(frontend: Frontend, server: Server) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    on_end(on_signal)
    frontend.members.start()
    housekeeping = asyncio.create_task(frontend.housekeeping(), name="housekeeping")
    ticking = asyncio.create_task(tick(), name="ticks")
    serving = asyncio.create_task(server.run(), name="server")
    stopping = asyncio.create_task(stop.wait(), name="signals")
    try:
        await asyncio.wait([housekeeping, serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done() and not housekeeping.done():
            await _drain(frontend, hurry)
        server.stop()
        await serving
        if housekeeping.done():
            housekeeping.result()
    finally:
        for task in (housekeeping, stopping, ticking):
            task.cancel()
        await _until(lambda: frontend.members.active == 0, _ENGINE_WORDS_SECONDS)
        frontend.members.close()


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

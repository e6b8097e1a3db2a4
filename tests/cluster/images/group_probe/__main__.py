"""A worker without a model that spans nodes, for tests of groups of several pods.

`python -m tests.cluster.images.group_probe --config worker.yaml`, with the environment of a worker.
Every rank serves `/livez` and `/readyz` on the API port; rank 0 answers chat completions with a
canned text and registers with routers as a worker does. A rank that loses a peer ends with status
1. One that was restarted in place joins no group: it waits until its pod is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from radixgrove.cli.configuration import load_environment, load_file, resolve
from radixgrove.protocol.settings import WorkerSettings
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.service import logs
from radixgrove.worker.agent.publisher import Publisher
from radixgrove.worker.agent.registration import describe
from radixgrove.worker.cache.identity import block_hasher
from radixgrove.worker.messages import CacheSnapshot, EngineInfo, EngineState, Stats
from radixgrove.worker.runtime import Runtime
from tests.cluster.images.group_probe.answers import Answers
from tests.cluster.images.group_probe.rendezvous import PeerLost, Place, Rendezvous

_log = logging.getLogger("group_probe")

_REPORT_EVERY = 0.2
_INFO = EngineInfo(
    num_pages=1024, page_size=16, max_model_len=4096, max_running=64, vocab_size=1 << 16,
    dtype="float32", device="cpu", weights_bytes=0, kv_bytes_per_token=1, attention_backend="none",
    prefill_tokens_per_second=10_000.0,
)  # fmt: skip


class Probe:
    """One rank, from start to end. `run` is called once."""

    def __init__(self, settings: WorkerSettings, place: Place, name: str, marker: Path) -> None:
        model = Path(settings.model)
        self._settings = settings
        self._place = place
        self._rendezvous = Rendezvous(place)
        self._marker = marker  # outlives the container but not the pod
        self._restarted = marker.exists()
        self._role = ""  # what `/readyz` says; empty while not ready
        key = settings.internal_key.get_secret_value() if settings.internal_key else ""
        self._answers = Answers(name, TokenizerFiles.load(model), key)
        self._runtime = Runtime(Path("/run/radixgrove"), settings, model)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Raises PeerLost."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        # Served whatever the role: a request that comes to the wrong rank shows in its answer.
        app = web.Application()
        app.add_routes([web.get("/livez", self._livez), web.get("/readyz", self._readyz)])
        app.add_routes(self._answers.routes())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, self._settings.host, self._settings.port).start()
        try:
            if self._restarted:
                _log.warning("restarted in place: waiting to be replaced with the group")
                await self._stop.wait()
                return
            await self._take_part()
        finally:
            await runner.cleanup()

    def _join(self) -> None:
        self._rendezvous.join()
        self._marker.touch()
        _log.info("all %d ranks are there", self._place.nodes)

    async def _take_part(self) -> None:
        joined = _in_thread(self._join)
        ends: list[asyncio.Future[Any]] = [joined, asyncio.create_task(self._stop.wait())]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not joined.done():
            return
        joined.result()
        pulse = _in_thread(self._rendezvous.pulse)
        if self._place.rank > 0:
            self._role = "joined"
            await pulse  # also after SIGTERM: it is rank 0 that says when all is answered
            return
        serving = asyncio.create_task(self._serve())
        ends = [pulse, serving]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        (failure,) = await asyncio.gather(serving, return_exceptions=True)
        self._rendezvous.finish()
        await pulse
        if isinstance(failure, Exception):
            raise failure

    async def _serve(self) -> None:
        """Registers, and answers until SIGTERM has come and no request is left."""
        settings = self._settings
        assert settings.redis_url is not None
        registration = describe(self._runtime, _INFO)
        publisher = Publisher(
            settings.redis_url, settings.redis_prefix, registration,
            block_hasher(settings, registration.namespace),
            lambda: publisher.apply(CacheSnapshot(0, [], last=True)),
            lambda: True,
        )  # fmt: skip
        publisher.apply(self._pulse())
        await publisher.start()
        try:
            self._role = "serving"
            await self._report_until(self._stop.is_set, publisher)
            await publisher.drain()
            deadline = time.monotonic() + settings.drain_timeout
            await self._report_until(
                lambda: not self._answers.running or time.monotonic() > deadline, publisher
            )
        finally:
            await publisher.close()

    async def _report_until(self, condition: Callable[[], bool], publisher: Publisher) -> None:
        while not condition():
            publisher.apply(self._pulse())
            await asyncio.sleep(_REPORT_EVERY)

    def _pulse(self) -> Stats:
        return Stats(
            state=EngineState.READY, ticks=0, steps=0, step_remaining=None,
            running=self._answers.running, pages_total=_INFO.num_pages, pages_free=_INFO.num_pages,
        )  # fmt: skip

    async def _livez(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _readyz(self, _request: web.Request) -> web.Response:
        return web.Response(text=self._role or "waits", status=200 if self._role else 503)


def _in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Runs `work` in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        failure: BaseException | None = None
        try:
            work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, failure)

    def settle(failure: BaseException | None) -> None:
        if future.cancelled():
            return
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    return future


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    arguments = parser.parse_args()
    environment = load_environment(os.environ)
    resolved = resolve("worker", {}, environment, load_file(arguments.config))
    settings: WorkerSettings = resolved.settings
    logs.configure(settings.log_level, json=settings.log_json)
    place, marker = Place.read(os.environ), Path(os.environ["GROUP_MARKER"])
    probe = Probe(settings, place, os.environ["POD_NAME"], marker)
    try:
        asyncio.run(probe.run())
    except PeerLost as error:
        _log.error("lost a peer: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    # A thread may still wait for a rank that is gone.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)

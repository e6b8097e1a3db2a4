"""One router process: its parts, wired and run until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import aiohttp

from radixgrove.protocol.errors import StartFailed
from radixgrove.protocol.keys import ServiceKeys, router_key
from radixgrove.protocol.model_table import SHARED
from radixgrove.protocol.settings import LogLevel, RouterSettings
from radixgrove.router import metrics
from radixgrove.router.app import make_app, make_management_app
from radixgrove.router.encoding import Encoders
from radixgrove.router.fleet import Fleet
from radixgrove.router.http_client import KEEPALIVE_SECONDS
from radixgrove.router.janitor import Janitor
from radixgrove.router.placement import HEARTBEAT_SECONDS, Placer
from radixgrove.router.proxy import Proxy
from radixgrove.router.status import RouterStatus, router_status
from radixgrove.router.upstream import Upstream
from radixgrove.service import logs
from radixgrove.service.asgi import App
from radixgrove.service.auth import ApiKeys
from radixgrove.service.listening import listen, listen_for_management
from radixgrove.service.liveness import tick
from radixgrove.service.processes import on_end
from radixgrove.service.redis_link import RedisLink
from radixgrove.service.redis_rules import RedisUnavailable
from radixgrove.service.server import Server

logger = logging.getLogger(__name__)

LINGER_SECONDS = 1.0  # for clients with an open connection to ask once more, and be sent away


class TaskEnded(StartFailed):
    """A task without which the router would be half blind is over."""


class RouterProcess:
    """Everything one process owns. `run` returns after a drained shutdown."""

    def __init__(self, settings: RouterSettings, index: int, shared: Path | None) -> None:
        """`shared` is the directory of processes that share the port; None when alone.

        Raises:
            ValueError: a setting makes no sense; the text says which.
        """
        self._settings = settings
        self._index = index
        self._shared = shared
        name = settings.router_id or f"{settings.host}:{settings.port}"
        # A restarted router must not inherit what its predecessor had booked.
        self.router_id = f"{''.join(name.split())}-{index}-{secrets.token_hex(4)}"
        self._keys = ApiKeys.load(settings.api_keys_file)
        self._link: RedisLink | None = None
        if settings.redis_url:
            self._link = RedisLink(
                settings.redis_url,
                self._heartbeat_key(),
                "placing by least load and prefix-hash affinity",
                self._redis_changed,
            )
        self._stop = asyncio.Event()
        if shared is not None:
            logs.LevelFile(shared).follow()

    @property
    def _own_service(self) -> str | None:
        """The only service of this router, where it has a model table of that name."""
        table = self._settings.model_table
        return None if table in (None, SHARED) else table

    def _heartbeat_key(self) -> str:
        """A router of one service's own may write that service's keys alone."""
        prefix, service = self._settings.redis_prefix, self._own_service
        if service is None:
            return router_key(prefix, self.router_id)
        return ServiceKeys(prefix, service).heartbeat(self.router_id)

    async def run(self) -> None:
        """Serves until a signal ends it, then drains within `drain_timeout`.

        Raises:
            TaskEnded: it was no signal that ended it; it drained all the same.
        """
        settings, link = self._settings, self._link
        on_end(self._stop.set)
        session = _make_session(settings)
        upstream = Upstream(settings)
        fleet = Fleet(settings, self.router_id, link, lambda: session)
        placer = Placer(settings, self.router_id, link)
        encoders = Encoders(fleet, lambda: session, settings.prompt_cache_bytes)
        proxy = Proxy(settings, fleet, encoders, placer, upstream)

        def status() -> RouterStatus:
            return router_status(
                self.router_id, settings.policy.value, fleet, link, proxy.in_flight
            )

        listener = listen(settings.host, settings.port, shared=self._shared is not None)
        servers = [self._server(make_app(settings, self._keys, fleet, proxy, encoders), listener)]
        if self._index == 0:
            app = make_management_app(settings, fleet, proxy, status, self._set_log_level)
            servers.append(self._server(app, listen_for_management(settings)))
        tasks = [
            self._task(fleet.run(), "fleet"),
            self._task(fleet.probe(), "probe"),
            self._task(encoders.prepare(), "tokenizers"),
            self._task(self._heartbeat(placer, fleet), "heartbeat"),
            self._task(tick(), "ticks"),
        ]
        if link is not None:
            janitor = Janitor(link, settings.redis_prefix, fleet.listed, self._own_service)
            tasks += [self._task(link.run(), "redis"), self._task(janitor.run(), "janitor")]
        metrics.REDIS_UP.set(0)
        serving = [asyncio.create_task(server.run()) for server in servers]
        # What exists now lives as long as the process: the collector need not walk it again.
        gc.collect()
        gc.freeze()
        logger.info("router %s on %s", self.router_id, _address(listener))
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([stopped, *serving, *tasks], return_when=asyncio.FIRST_COMPLETED)
        failed = not stopped.done()
        proxy.draining = True
        await servers[0].linger(LINGER_SECONDS)
        for server in servers:
            server.stop()
        await asyncio.gather(*serving, return_exceptions=True)
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)
        await encoders.close()
        await session.close()
        upstream.close()
        if failed:
            raise TaskEnded("the router ends because one of its tasks did")

    def _server(self, app: App, listener: socket.socket) -> Server:
        settings = self._settings
        return Server(
            app,
            listener,
            request_timeout=settings.request_timeout,
            drain_timeout=settings.drain_timeout,
        )

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that ends the process when it fails: a router without it would be half blind."""

        async def guarded() -> None:
            try:
                await work
            except Exception:
                logger.exception("the router's %s task failed", name)
                raise

        return asyncio.create_task(guarded(), name=name)

    async def _heartbeat(self, placer: Placer, fleet: Fleet) -> None:
        while True:
            if self._link is not None and self._link.up:
                with contextlib.suppress(RedisUnavailable):  # the link says it
                    await placer.heartbeat(fleet.services)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    @staticmethod
    def _redis_changed(up: bool) -> None:
        metrics.REDIS_UP.set(int(up))
        if up:
            logger.info("Redis is there: placing with the shared index")

    # ---- log level -------------------------------------------------------------------------

    async def _set_log_level(self, level: LogLevel) -> None:
        """The management port is one process's; the others read what is set there."""
        if self._shared is not None:
            logs.LevelFile(self._shared).write(level)
        else:
            logging.getLogger().setLevel(level.value.upper())


def _make_session(settings: RouterSettings) -> aiohttp.ClientSession:
    """For probes and tokenizer files. Must be made in the event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout, connect=settings.connect_timeout
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent",),
    )


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

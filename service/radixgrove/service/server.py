"""The HTTP server of every process: uvicorn on a bound socket, its signals left alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial

import uvicorn

from radixgrove.service.asgi import App
from radixgrove.service.http import HttpProtocol

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
_POLL_SECONDS = 0.05
_STOP_SECONDS = 2.0  # beyond the drain, for connections to close


class Server:
    """One application on one socket, in the running event loop.

    Signals are the process's own: a drain goes on answering requests, and two servers may share a
    process. Use `run` and `stop`, or `running`.
    """

    def __init__(
        self,
        app: App,
        listener: socket.socket,
        *,
        request_timeout: float = 60.0,
        drain_timeout: float = 1.0,
    ) -> None:
        """
        Args:
            listener: bound; the server listens on it from `run` on, and closes it.
            request_timeout: seconds in which a request must arrive whole.
            drain_timeout: seconds that requests under way get once the server stops.
        """
        _quieten()
        self._listener = listener
        self._drain_timeout = max(1, math.ceil(drain_timeout))
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=partial(HttpProtocol, request_timeout=request_timeout),  # type: ignore[arg-type]
                ws="none",
                loop="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=self._drain_timeout,
                backlog=BACKLOG,
            )
        )

    @property
    def port(self) -> int:
        """The port that the socket is bound to."""
        return int(self._listener.getsockname()[1])

    def listen(self) -> None:
        """Lets clients connect from now on, and wait for `run`."""
        self._listener.listen(BACKLOG)

    async def run(self) -> None:
        """Serves until `stop`, then lets requests under way end within `drain_timeout`."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        self._server.should_exit = True

    def abort(self) -> None:
        """Stops and cuts every connection, as the end of a process would."""
        self._server.should_exit = self._server.force_exit = True
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def linger(self, seconds: float) -> None:
        """Ends when no connection is open, or after so many seconds.

        A stopping server cuts idle connections: a request that is on its way there would be lost.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while self._server.server_state.connections:
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(_POLL_SECONDS)

    @contextlib.asynccontextmanager
    async def running(self, name: str) -> AsyncIterator[None]:
        """Serves while the block runs, as a task of that name."""
        self.listen()
        task = asyncio.create_task(self.run(), name=name)
        try:
            yield
        finally:
            self.stop()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(task, self._drain_timeout + _STOP_SECONDS)
            self._listener.close()


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _quieten() -> None:
    """uvicorn's notes on starting and stopping are none; its warnings are."""
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.WARNING)
    logger.addFilter(_is_no_broken_stream)


def _is_no_broken_stream(record: logging.LogRecord) -> bool:
    """A broken stream is left unfinished on purpose: uvicorn need not say so."""
    return "without completing response" not in record.getMessage()

"""Liveness, readiness and metrics of the operator, on a port of their own.

Readiness means healthy, not leading: a standby that never becomes ready would block its own
upgrade.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from radixgrove.operator.api.metrics import REGISTRY
from radixgrove.service import asgi
from radixgrove.service.api import Api
from radixgrove.service.listening import bound_socket
from radixgrove.service.server import Server

_MAX_BODY_BYTES = 4096
_JOIN_SECONDS = 5.0


class HealthServer:
    """A context manager; it serves in a thread of its own, so that a stuck event loop shows.

    `trouble()` says what is wrong, or nothing.
    """

    def __init__(self, port: int, trouble: Callable[[], str]) -> None:
        api = Api("Radixgrove operator: health", needs_key=False)
        api.probe("/livez", "/health", "/readyz")(trouble)

        @api.read("/metrics", CONTENT_TYPE_LATEST)
        async def metrics() -> Response:
            """Metrics of this operator."""
            return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)

        app = asgi.build(api, max_body_bytes=_MAX_BODY_BYTES)
        self._server = Server(app, bound_socket("::", port))
        self.port = self._server.port
        self._thread = threading.Thread(target=self._serve, name="health", daemon=True)

    def _serve(self) -> None:
        asyncio.run(self._server.run())

    def __enter__(self) -> HealthServer:
        self._server.listen()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()
        self._thread.join(_JOIN_SECONDS)

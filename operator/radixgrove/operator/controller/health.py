"""Liveness, readiness and metrics of the operator, on a port of their own.

Readiness means healthy, not leading: a standby that never becomes ready would block its own
upgrade.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from radixgrove.operator.api.metrics import REGISTRY
from radixgrove.service.listening import bound_socket


class _Server(ThreadingHTTPServer):
    """Serves on a bound socket, which it closes in the end."""

    daemon_threads = True

    def __init__(self, bound: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(bound.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.server_activate()


class HealthServer:
    """A context manager. `trouble()` says what is wrong, or nothing."""

    def __init__(self, port: int, trouble: Callable[[], str]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self._answer(200, generate_latest(REGISTRY), CONTENT_TYPE_LATEST)
                elif self.path in ("/livez", "/readyz"):
                    found = trouble()
                    body = json.dumps({"status": found or "ok"}).encode()
                    self._answer(503 if found else 200, body, "application/json")
                else:
                    self._answer(404, b'{"status": "not found"}', "application/json")

            def _answer(self, status: int, body: bytes, content_type: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Probes are no news."""

        self._server = _Server(bound_socket("::", port), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="health", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> HealthServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

"""A frontend without an API, for the agent's tests: `/readyz`, and a drain that takes its time."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from radixgrove.service.liveness import tick


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> None:
    directory = Path(sys.argv[1])
    notes = directory.parent
    # Not by `Runtime`, which would be nine tenths of what this imports.
    settings = json.loads((directory / "worker.json").read_bytes())["settings"]
    server = HTTPServer(("", 0), Handler, bind_and_activate=False)
    server.socket = socket.socket()
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.socket.bind((settings["host"], settings["port"]))
    server.server_activate()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=asyncio.run, args=(tick(),), daemon=True).start()
    signal.sigwait([signal.SIGTERM])
    (notes / "draining").touch()
    while (notes / "busy").exists():
        time.sleep(0.02)
    (notes / "drained").touch()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    main()

"""A small server that speaks the Hugging Face hub's file API, and cuts or corrupts on demand."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.conftest import STOP_SECONDS

COMMIT = "c0ffee" * 6 + "beef"


class Hub:
    """Serves the repository `org/model`, as a context manager; `requests` are (path, range).

    Faults concern the largest file: its first transfer is cut, so many transfers are wrong.
    """

    def __init__(self, files: Mapping[str, bytes], host: str = "127.0.0.1") -> None:
        self.token = ""
        self.cut_after: int | None = None  # bytes
        self.corrupt = 0  # transfers
        self.files = dict(files)
        self.requests: list[tuple[str, str]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[STOP_SECONDS], daemon=True
        )

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            request.send_error(401)
        elif path == "/api/models/org/model/revision/main":
            self._json(request, {"sha": COMMIT})
        elif path == f"/api/models/org/model/tree/{COMMIT}":
            self._tree(request)
        elif path.startswith(f"/org/model/resolve/{COMMIT}/"):
            self._file(request, path.split("/", 5)[5])
        else:
            request.send_error(404)

    def _tree(self, request: BaseHTTPRequestHandler) -> None:
        """Two pages, as of a large repository."""
        entries: list[dict[str, Any]] = [{"type": "directory", "path": "tokenizer", "oid": "x"}]
        for name, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entry = {"type": "file", "path": name, "size": len(content), "oid": blob}
            if len(content) > 1000:
                sha = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha, "size": len(content)}
            entries.append(entry)
        if "page=2" in request.path:
            self._json(request, entries[3:])
        else:
            link = f'<{self.url}{request.path}&page=2>; rel="next"'
            self._json(request, entries[:3], {"Link": link})

    def _file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        content = self.files[name]
        largest = max(self.files, key=lambda file: len(self.files[file]))
        wanted = request.headers.get("Range", "")
        self.requests.append((name, wanted))
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        body = content[start:]
        if name == largest and self.corrupt:
            self.corrupt -= 1
            body = b"\xff" * len(body)
        request.send_response(206 if wanted else 200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if name == largest and self.cut_after is not None:
            body, self.cut_after = body[: self.cut_after], None
            request.close_connection = True
        request.wfile.write(body)

    def _json(
        self, request: BaseHTTPRequestHandler, value: Any, headers: dict[str, str] | None = None
    ) -> None:
        body = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        for name, text in (headers or {}).items():
            request.send_header(name, text)
        request.end_headers()
        request.wfile.write(body)

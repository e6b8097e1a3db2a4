"""A small HTTP/1.1 client for load: one request at a time per connection, first byte timed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import cast

import httptools

TIMEOUT = 120.0


@dataclass(slots=True)
class Reply:
    status: int
    first_byte: float  # seconds from sending to the first byte of the body
    total: float  # seconds from sending to the end
    body: bytes


class Connection(asyncio.Protocol):
    """One keep-alive connection. `post` raises ConnectionError when it breaks."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._future: asyncio.Future[Reply] | None = None
        self._chunks: list[bytes] = []
        self._sent = self._first = 0.0

    async def post(self, path: str, body: bytes) -> Reply:
        loop = asyncio.get_running_loop()
        if self._transport is None:
            await loop.create_connection(lambda: self, "127.0.0.1", self._port)
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._future = loop.create_future()
        self._chunks, self._first = [], 0.0
        head = (
            f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._sent = time.perf_counter()
        self._transport.write(head.encode() + body)
        async with asyncio.timeout(TIMEOUT):
            return await self._future

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio and httptools call these ------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._future is not None and not self._future.done():
            self._future.set_exception(ConnectionError("the connection was lost"))

    def on_body(self, body: bytes) -> None:
        if not self._first:
            self._first = time.perf_counter()
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        now = time.perf_counter()
        if self._future is not None and not self._future.done():
            first = (self._first or now) - self._sent
            status = self._parser.get_status_code()
            self._future.set_result(Reply(status, first, now - self._sent, b"".join(self._chunks)))


class Pool:
    """Connections that are reused by any sender."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[Connection] = []

    async def post(self, path: str, body: bytes) -> Reply:
        connection = self._idle.pop() if self._idle else Connection(self._port)
        reply = await connection.post(path, body)
        self._idle.append(connection)
        return reply

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def percentile(values: list[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

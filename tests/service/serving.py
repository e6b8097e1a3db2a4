"""An application on a real server, and what a client on a bare socket gets from it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from radixgrove.service import asgi
from radixgrove.service.asgi import App
from radixgrove.service.listening import listen
from radixgrove.service.server import Server


@contextlib.asynccontextmanager
async def serving(app: App, **options: Any) -> AsyncIterator[Server]:
    server = Server(asgi.build(app, max_body_bytes=1 << 20), listen("127.0.0.1", 0), **options)
    async with server.running("a test's server"):
        yield server


async def exchange(server: Server, *parts: bytes, closing: bool = True) -> bytes:
    """Everything that comes back for these bytes, sent one part after another.

    With `closing` the last request must ask for the connection's end.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await asyncio.wait_for(reader.read() if closing else reader.read(1 << 16), 20)
    finally:
        writer.close()

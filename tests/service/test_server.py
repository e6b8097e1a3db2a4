"""A server's life: on its socket, without signals, to a drained end."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest

from radixgrove.service import asgi, http
from radixgrove.service.asgi import Receive, Scope, Send
from radixgrove.service.server import Server
from tests.service.serving import exchange, serving

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def test_signals_stay_the_processs_own() -> None:
    async def ok(scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.respond(send, 200, b"{}")

    before = signal.getsignal(signal.SIGTERM)
    async with serving(ok) as server:
        assert (await exchange(server, REQUEST)).startswith(b"HTTP/1.1 200")
        assert signal.getsignal(signal.SIGTERM) is before


async def test_a_stopping_server_lets_requests_under_way_end() -> None:
    begun, finish = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await finish.wait()
        await asgi.respond(send, 200, b"{}")

    async with serving(slow, drain_timeout=20) as server:
        answer = asyncio.create_task(exchange(server, REQUEST))
        await begun.wait()
        await stop(server)
        finish.set()
        assert (await answer).startswith(b"HTTP/1.1 200")


async def stop(server: Server) -> None:
    """Returns once it accepts no connection any more."""
    server.stop()
    with contextlib.suppress(OSError):
        while True:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.close()
            await asyncio.sleep(0.02)


async def test_a_connection_made_before_a_server_stops_may_send_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the client it was accepted."""
    monkeypatch.setattr(http, "_NEW_SECONDS", 60.0)
    monkeypatch.setattr(http, "_FIRST_REQUEST_SECONDS", 15.0)

    async def ok(scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.respond(send, 200, b"{}")

    async with serving(ok, drain_timeout=20) as server:
        assert (await exchange(server, REQUEST)).startswith(b"HTTP/1.1 200")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await stop(server)
        writer.write(REQUEST)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_requests_that_outlive_the_drain_are_cut() -> None:
    begun = asyncio.Event()

    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with serving(stuck, drain_timeout=1) as server:
        answer = asyncio.create_task(exchange(server, REQUEST))
        await begun.wait()
    assert b"200" not in await answer


async def test_lingering_ends_with_the_last_connection() -> None:
    async def ok(scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.respond(send, 200, b"{}")

    async with serving(ok) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        waiting = asyncio.create_task(server.linger(3600))
        done, _ = await asyncio.wait([waiting], timeout=0.2)
        assert not done
        writer.close()
        async with asyncio.timeout(20):
            await waiting


async def test_aborting_cuts_answers_short() -> None:
    begun = asyncio.Event()

    async def stuck(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with serving(stuck) as server:
        answer = asyncio.create_task(exchange(server, REQUEST))
        await begun.wait()
        server.abort()
        with contextlib.suppress(ConnectionResetError):
            assert await answer == b""

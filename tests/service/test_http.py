"""HTTP as clients speak it, on a real server and a bare socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from radixgrove.service import asgi, http
from radixgrove.service.asgi import Receive, Scope, Send
from radixgrove.service.http import MAX_HEADER_BYTES, MAX_WAITING
from radixgrove.service.server import Server
from tests.router.harness import eventually
from tests.service.serving import exchange, serving

H2C = (
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
)
OFFERS = {
    "h2c, as Java's client": H2C,
    "TLS": b"Connection: upgrade\r\nUpgrade: TLS/1.2\r\n",
    "websocket": b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
    "several": b"connection: keep-alive, Upgrade\r\nupgrade: h2c, websocket\r\n",
}
BODY = b'{"prompt":"hi"}'
LENGTH = b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKS = b"4\r\n" + BODY[:4] + b"\r\nb\r\n" + BODY[4:] + b"\r\n0\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n" + CHUNKS
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
LARGE = 16 << 20  # more than the system's buffers take


@pytest.fixture
def unread() -> Iterator[socket.socket]:
    """A client that reads when the test says so."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.setblocking(False)
        yield client


def connections(server: Server) -> list[Any]:
    return list(server._server.server_state.connections)


async def mirror(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what it understood of the request."""
    body = await asgi.read_body(receive)
    names = sorted(name.decode() for name, _ in scope["headers"])
    seen = {"path": scope["path"], "body": body.decode(), "headers": names}
    await asgi.respond(send, 200, json.dumps(seen).encode())


@pytest.mark.parametrize("framing", [LENGTH, CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("offer", OFFERS.values(), ids=list(OFFERS))
async def test_an_offer_of_another_protocol_is_no_more_than_a_header(
    offer: bytes, framing: bytes
) -> None:
    """RFC 9110, 7.8: the server may ignore it; the body is the request's all the same."""
    request = b"POST /v1/completions?a=b HTTP/1.1\r\nhost: x\r\n" + offer + framing
    async with serving(mirror) as server:
        whole = await exchange(server, request + LAST)
        assert whole.count(b"HTTP/1.1 200 OK") == 2
        first = json.loads(whole.split(b"\r\n\r\n")[1].partition(b"HTTP/1.1")[0])
        assert (first["path"], first["body"]) == ("/v1/completions", BODY.decode())
        assert not {"upgrade", "http2-settings"} & set(first["headers"])
        piecemeal = [request[i : i + 1] for i in range(len(request))]
        assert (await exchange(server, *piecemeal, LAST)).count(b"HTTP/1.1 200 OK") == 2


async def test_offers_may_follow_each_other() -> None:
    request = b"POST /x HTTP/1.1\r\nhost: x\r\n" + H2C + LENGTH
    async with serving(mirror) as server:
        answers = await exchange(server, request * 3 + LAST)
    assert answers.count(b"HTTP/1.1 200 OK") == 4
    assert answers.count(b"hi") == 3


async def test_connect_is_refused() -> None:
    async with serving(mirror) as server:
        answer = await exchange(server, b"CONNECT other:443 HTTP/1.1\r\nhost: other:443\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b'"error"' in answer


async def test_requests_that_came_together_are_answered_in_order() -> None:
    async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (scope["path"].encode(), b""):
            await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})

    requests = b"".join(b"GET /no-%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(5))
    async with serving(streaming) as server:
        answers = await exchange(server, requests + LAST)
    positions = [answers.index(b"/no-%d" % i) for i in range(5)]
    assert positions == sorted(positions)
    assert answers.count(b"HTTP/1.1 200 OK") == 6


async def test_many_requests_that_came_together_have_no_large_head() -> None:
    """The last one's headers end with the next bytes."""
    request = b"GET /no HTTP/1.1\r\nhost: x\r\nx-padding: %b\r\n\r\n" % (b"x" * 2000)
    assert len(50 * request) > MAX_HEADER_BYTES
    async with serving(mirror) as server:
        answers = await exchange(server, 50 * request + LAST[:10], LAST[10:])
    assert answers.count(b"HTTP/1.1 200 OK") == 51


async def test_a_connection_on_which_very_many_requests_wait_ends() -> None:
    """Each takes some thousand bytes, however short it is."""
    going = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await going.wait()
        await asgi.respond(send, 200, b"{}")

    async with serving(slow) as server:
        request = b"GET /no HTTP/1.1\r\nhost: x\r\n\r\n"
        answers = await exchange(server, (MAX_WAITING + 2) * request)
        going.set()
    assert answers == b""


@pytest.mark.parametrize("framing", [[], [(b"content-length", b"7")]], ids=["open", "length"])
async def test_a_client_of_http_1_0_gets_no_chunks(framing: list[tuple[bytes, bytes]]) -> None:
    """RFC 9112, 6.1: it knows none. The connection's end is the body's."""

    async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": framing})
        for piece in (b"one", b"", b" ", b"two"):
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(streaming) as server:
        answer = await exchange(server, b"GET /x HTTP/1.0\r\nhost: x\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"one two"


async def test_a_head_without_a_body_leaves_at_once() -> None:
    async with serving(mirror) as server:
        answer = await exchange(server, b"HEAD /x HTTP/1.1\r\nhost: x\r\n\r\n", closing=False)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"\r\n\r\n")


# ---- clients that do not read --------------------------------------------------------------------


async def test_a_large_answer_stays_its_senders_until_its_client_has_read(
    unread: socket.socket,
) -> None:
    """Who sends it counts what it takes: a connection does not."""
    answered = asyncio.Event()

    async def large(scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.respond(send, 200, b"x" * LARGE)
        answered.set()

    async with serving(large) as server:
        await asyncio.get_running_loop().sock_connect(unread, ("127.0.0.1", server.port))
        unread.send(LAST)
        await eventually(lambda: any(c.flow.write_paused for c in connections(server)))
        (connection,) = connections(server)
        assert not answered.is_set()
        assert connection.transport.get_write_buffer_size() < 2 * asgi.PART_BYTES
        read = 0
        while part := await asyncio.get_running_loop().sock_recv(unread, 1 << 20):
            read += len(part)
        assert read > LARGE
        assert answered.is_set()


async def test_a_connection_that_ends_does_not_wait_for_its_client_for_ever(
    unread: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "CLOSE_SECONDS", 0.2)

    async def breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * LARGE, "more_body": True})

    async with serving(breaks_off) as server:
        await asyncio.get_running_loop().sock_connect(unread, ("127.0.0.1", server.port))
        unread.send(LAST)
        await eventually(lambda: any(c.transport.is_closing() for c in connections(server)))
        await eventually(lambda: not connections(server), what="the connection's end")

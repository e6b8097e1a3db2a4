"""The client for requests that are passed on, before servers that answer in every way there is."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.router import http_client
from radixgrove.router.http_client import AnswerBroke, ConnectFailed, Connection, Pool
from tests.conftest import examples, find_free_port, silent
from tests.router.harness import eventually

BODY = b'{"model":"m"}'
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


Piece = bytes | float


class Server:
    """Answers each request with the next script: bytes, written one by one, and seconds between
    them; then it ends the connection if `close` says so."""

    def __init__(self, scripts: Sequence[Sequence[Piece]], *, close: bool = False) -> None:
        self._scripts = list(scripts)
        self._close = close
        self.requests: list[bytes] = []
        self.connections = 0
        self.lost = 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                self.requests.append(head + await reader.readexactly(size))
                for piece in self._scripts.pop(0):
                    if isinstance(piece, float):
                        await asyncio.sleep(piece)
                    else:
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(0)
                if self._close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError, IndexError):
            self.lost += 1
        finally:
            writer.close()


@asynccontextmanager
async def serving(*scripts: Sequence[Piece], close: bool = False) -> AsyncIterator[Server]:
    server = Server(scripts, close=close)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    server.url = f"http://127.0.0.1:{port}"
    try:
        yield server
    finally:
        listener.close()


@asynccontextmanager
async def pool(connect_timeout: float = 2.0) -> AsyncIterator[Pool]:
    made = Pool(connect_timeout)
    try:
        yield made
    finally:
        made.close()


async def post(pool: Pool, url: str, seconds: float = 5.0) -> Connection:
    deadline = asyncio.get_running_loop().time() + seconds
    connection = await pool.connect(url)
    try:
        connection.send("/v1/completions", [(b"x-a", b"1")], BODY)
        await connection.headers_come(deadline)
    except BaseException:
        connection.finish()
        raise
    return connection


async def read(answer: Connection, seconds: float = 5.0) -> bytes:
    """The rest of the body."""
    deadline = asyncio.get_running_loop().time() + seconds
    chunks = []
    while chunk := await answer.read(deadline):
        chunks.append(chunk)
    return b"".join(chunks)


async def test_request_goes_out_whole_and_connections_are_reused() -> None:
    async with serving([OK], [OK]) as server, pool() as client:
        for _ in range(2):
            answer = await post(client, server.url + "/base/")
            assert (answer.status, await read(answer)) == (200, b"ok")
            answer.finish()
        head, _, body = server.requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /base/v1/completions HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"\r\nx-a: 1" in head
        assert body == BODY
        assert server.connections == 1


async def test_answers_under_way_have_connections_of_their_own() -> None:
    async with serving([OK], [OK]) as server, pool() as client:
        answers = [await post(client, server.url) for _ in range(2)]
        assert [await read(answer) for answer in answers] == [b"ok", b"ok"]
        assert server.connections == 2


@examples(60)
@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_chunked_bodies_however_the_network_cuts_them(chunks: list[bytes], cuts: list[int]) -> None:
    data = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
    )
    data += b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(ends) if a < b]

    async def run() -> None:
        async with serving(pieces, [OK]) as server, pool() as client:
            answer = await post(client, server.url)
            assert answer.headers[-1] == (b"content-type", b"text/event-stream")
            assert await read(answer) == b"".join(chunks)
            answer.finish()
            assert await read(await post(client, server.url)) == b"ok"
            assert server.connections == 1

    asyncio.run(run())


async def test_body_that_ends_with_the_connection() -> None:
    async with (
        serving([b"HTTP/1.1 200 OK\r\n\r\nab", b"cd"], close=True) as server,
        pool() as client,
    ):
        answer = await post(client, server.url)
        assert await read(answer) == b"abcd"
        answer.finish()


async def test_interim_answers_are_passed_over() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n"
    async with serving([early, OK]) as server, pool() as client:
        answer = await post(client, server.url)
        assert (answer.status, answer.headers) == (200, [(b"content-length", b"2")])


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"HTTP/1.1 200 OK\r\ncontent-le"],
        [b"not http at all\r\n\r\n"],
        [b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"],
        [b"HTTP/1.1 200 OK\r\n" + b"x-y: " + b"z" * (1 << 20)],
    ],
    ids=["nothing", "half a head", "no http", "upgrade", "endless head"],
)
async def test_answers_that_break_before_their_body(pieces: list[bytes]) -> None:
    async with serving(pieces, close=True) as server, pool() as client:
        with pytest.raises(AnswerBroke):
            await post(client, server.url)


@pytest.mark.parametrize(
    "head", [b"content-length: 10", b"transfer-encoding: chunked"], ids=["length", "chunked"]
)
async def test_body_that_ends_early_is_no_answer(head: bytes) -> None:
    start = b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n5\r\nab"
    async with serving([start], close=True) as server, pool() as client:
        answer = await post(client, server.url)
        assert answer.status == 200
        with pytest.raises(AnswerBroke):
            await read(answer)
        answer.finish()


async def test_second_answer_to_one_request_is_nobodys() -> None:
    other = b"HTTP/1.1 500 No\r\ncontent-length: 6\r\n\r\nothers"
    async with serving([OK + other], [OK]) as server, pool() as client:
        answer = await post(client, server.url)
        assert (answer.status, await read(answer)) == (200, b"ok")
        answer.finish()
        answer = await post(client, server.url)
        assert (answer.status, await read(answer)) == (200, b"ok")
        assert server.connections == 2


async def test_idle_connection_that_the_server_ended_is_not_used_again() -> None:
    async with serving([OK], [OK], close=True) as server, pool() as client:
        for _ in range(2):
            answer = await post(client, server.url)
            assert await read(answer) == b"ok"
            answer.finish()
            ended = partial(lambda idle: not idle.fresh, answer)
            await eventually(ended, what="the connection's end")
        assert server.connections == 2


async def test_server_may_ask_for_a_new_connection() -> None:
    last = OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
    async with serving([last], [OK]) as server, pool() as client:
        for _ in range(2):
            answer = await post(client, server.url)
            assert await read(answer) == b"ok"
            answer.finish()
        assert server.connections == 2


async def test_idle_connections_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "KEEPALIVE_SECONDS", 0.1)
    async with serving([OK]) as server, pool() as client:
        answer = await post(client, server.url)
        await read(answer)
        answer.finish()
        await eventually(lambda: server.lost == 1, what="the end of the connection")


async def test_slow_answers_are_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "KEEPALIVE_SECONDS", 0.1)
    async with serving([OK], [0.4, OK[:-1], 0.4, OK[-1:]]) as server, pool() as client:
        for _ in range(2):
            answer = await post(client, server.url)
            assert await read(answer) == b"ok"
            answer.finish()
        assert server.connections == 1


async def test_deadlines_of_head_and_body() -> None:
    async with serving([OK[:10]], [OK[:-1]]) as server, pool() as client:
        with pytest.raises(TimeoutError):
            await post(client, server.url, seconds=0.1)
        answer = await post(client, server.url)
        with pytest.raises(TimeoutError):
            await read(answer, seconds=0.1)
        answer.finish()
        await eventually(lambda: server.lost == 2, what="both connections' end")


async def test_a_later_wait_has_a_deadline_of_its_own() -> None:
    async with serving([OK[:-1], 0.4, OK[-1:]]) as server, pool() as client:
        answer = await post(client, server.url, seconds=0.2)
        assert await read(answer) == b"ok"
        answer.finish()


@pytest.mark.parametrize("point", ["head", "body"])
async def test_whoever_stops_waiting_cuts_the_connection(point: str) -> None:
    async with serving([OK[:10] if point == "head" else OK[:-1]]) as server, pool() as client:

        async def ask() -> None:
            answer = await post(client, server.url, seconds=60)
            try:
                await read(answer, seconds=60)
            finally:
                answer.finish()

        task = asyncio.create_task(ask())
        await eventually(lambda: len(server.requests) == 1, what="the request")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()
        await eventually(lambda: server.lost == 1, what="the connection's end")


async def test_unread_bodies_make_the_server_wait() -> None:
    size = 64 << 20
    written = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while written < size:
            writer.write(bytes(1 << 20))
            await writer.drain()
            written += 1 << 20
        writer.close()

    listener = await asyncio.start_server(flood, "127.0.0.1", 0)
    async with listener, pool() as client:
        answer = await post(client, f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        before = -1
        while before != written:  # until it stands still
            before = written
            await asyncio.sleep(0.2)
        assert written < size
        assert len(await read(answer, seconds=30)) == size


async def test_a_connection_that_nobody_accepts_is_given_up_in_time() -> None:
    with silent() as port:
        async with pool(connect_timeout=0.3) as client, asyncio.timeout(30):
            with pytest.raises(ConnectFailed):
                await post(client, f"http://127.0.0.1:{port}", seconds=60)


async def test_nobody_listens() -> None:
    async with pool() as client:
        nowhere = ["ftp://127.0.0.1", "http://", "http://[half", "http://a:99999", "http://a..b"]
        for url in (f"http://127.0.0.1:{find_free_port()}", *nowhere):
            with pytest.raises(ConnectFailed):
                await post(client, url)

"""How a router leaves: no client that is still connected gets an error for it."""

from __future__ import annotations

import asyncio
import json

from radixgrove.router import server
from radixgrove.router.__main__ import main as router_main
from tests.conftest import RedisServer
from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import Router, completion, eventually, prompt


class Connection:
    """One connection that is used for request after request, as a client's pool does."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, router: Router) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", router.port))

    async def complete(self, text: str) -> tuple[int, str]:
        """Status of the answer, and its `connection` header. Raises when the connection is cut."""
        body = json.dumps(completion(text)).encode()
        self._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        await self._reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers.get("connection", "")

    async def ended(self) -> bool:
        return await self._reader.read() == b""

    def close(self) -> None:
        self._writer.close()


async def test_open_connections_are_answered_and_sent_away_when_the_router_ends(
    redis_server: RedisServer, make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    await make_replica(redis_url=redis_server.url)
    router = await make_router(redis_server, main=lingering_router)
    connections = [await Connection.open(router) for _ in range(2)]
    for connection in connections:
        assert await connection.complete(prompt(1)) == (200, "")
    assert router.process is not None
    router.process.terminate()
    await eventually(lambda: router.answers("/readyz", 503), what="the router is not ready")
    alone = "/readyz?without-replicas=true"  # what Kubernetes asks
    assert await router.answers(alone, 503)
    answers = await asyncio.gather(*(c.complete(prompt(2)) for c in connections))
    assert answers == [(200, "close")] * 2
    for connection in connections:
        assert await connection.ended()
        connection.close()
    await router.client.close()
    assert await asyncio.to_thread(router.process.wait, 60) == 0


def lingering_router(arguments: list[str]) -> None:
    """A router that would wait for clients longer than a test does."""
    server.LINGER_SECONDS = 600.0
    router_main(arguments)


async def test_a_router_without_connections_waits_for_no_client(
    redis_server: RedisServer, make_router: MakeRouter
) -> None:
    router = await make_router(redis_server, ready=False, main=lingering_router)
    assert router.session is not None
    await router.session.close()
    assert await router.stop() == 0

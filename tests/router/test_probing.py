"""What replicas answer to a router that asks whether they serve: whatever it is, it lives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.router.conftest import MakeReplica, MakeRouter
from tests.router.harness import MODEL, Router, eventually, prompt

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
NESTED = b'{"data": [], "more": ' + b"[" * 100_000


class Answering:
    """A server that answers each path as it is told to; `asked` counts by path."""

    def __init__(self, answers: dict[str, bytes], endless: str = "") -> None:
        self._answers = answers
        self._endless = endless
        self.asked: list[str] = []
        self.most = 0  # bytes that were taken of an endless answer
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split()[1].decode()
            self.asked.append(path)
            writer.write(self._answers.get(path, b"HTTP/1.1 500 Error\r\n\r\n"))
            sent = 0
            while path == self._endless and not writer.is_closing():
                writer.write(bytes(1 << 16))
                sent += 1 << 16
                self.most = max(self.most, sent)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def answering(answers: dict[str, bytes], endless: str = "") -> AsyncIterator[Answering]:
    found = Answering(answers, endless)
    server = await asyncio.start_server(found.handle, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()


async def _goes_on(router: Router, odd: Answering, path: str) -> bool:
    """It has been asked twice, and others are served."""
    assert (await router.complete(prompt(1))).status == 200
    return odd.asked.count(path) > 1


async def test_models_that_are_listed_without_end_end_no_router(
    make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica()
    listing = OK + b"content-length: %d\r\n\r\n%b" % (len(NESTED), NESTED)
    ready = OK + b"content-length: 2\r\n\r\n{}"
    async with answering({"/readyz": ready, "/v1/models": listing}) as odd:
        router = await make_router(replicas=[f"{MODEL}={replica.url}", odd.url])
        await eventually(lambda: _goes_on(router, odd, "/v1/models"), what="two probes")


async def test_an_answer_without_end_is_no_answer(
    make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    replica = await make_replica()
    async with answering({"/readyz": OK + b"\r\n"}, endless="/readyz") as odd:
        static = [f"{MODEL}={replica.url}", f"{MODEL}={odd.url}"]
        router = await make_router(replicas=static)
        await eventually(lambda: _goes_on(router, odd, "/readyz"), what="two probes")
        states = {r["url"]: r["state"] for r in (await router.status())["replicas"]}
        assert states[odd.url] == "not-ready"
        assert odd.most < 32 << 20


async def test_a_replica_that_sends_probes_elsewhere_does_not_serve(
    make_replica: MakeReplica, make_router: MakeRouter
) -> None:
    """It would have the router ask whatever it names."""
    replica = await make_replica()
    async with answering({}) as victim:
        there = (
            b"HTTP/1.1 302 Found\r\nlocation: %b/x\r\ncontent-length: 0\r\n" % victim.url.encode()
        )
        async with answering({"/readyz": there + b"connection: close\r\n\r\n"}) as odd:
            router = await make_router(replicas=[f"{MODEL}={replica.url}", f"{MODEL}={odd.url}"])
            await eventually(lambda: _goes_on(router, odd, "/readyz"), what="two probes")
            assert victim.asked == []

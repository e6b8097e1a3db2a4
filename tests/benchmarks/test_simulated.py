"""The simulated replica says of its requests what a worker says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp

from tests.router.harness import MODEL, SimulatedReplica, completion, eventually, prompt


@contextlib.asynccontextmanager
async def asked(replica: SimulatedReplica) -> AsyncIterator[aiohttp.ClientSession]:
    """The replica, started, and a session for it."""
    await replica.start()
    try:
        async with aiohttp.ClientSession(replica.url) as session:

            async def listens() -> bool:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.get("/readyz") as answer:
                        return answer.status == 200
                return False

            await eventually(listens)
            yield session
    finally:
        await replica.stop()


async def test_an_aborted_request_waits_no_longer() -> None:
    replica = SimulatedReplica(block_ms=10_000)

    async def ask(number: int) -> None:
        async with session.post("/v1/completions", json=completion(prompt(number))):
            pass

    async with asked(replica) as session:
        asks = [asyncio.create_task(ask(number)) for number in range(3)]
        await eventually(lambda: (replica.running, replica.waiting) == (1, 2))
        asks[-1].cancel()
        await eventually(lambda: (replica.running, replica.waiting) == (1, 1))
        for task in asks:
            task.cancel()
        await eventually(lambda: (replica.running, replica.waiting) == (0, 0))


async def test_prompts_of_every_kind_are_answered() -> None:
    async with asked(SimulatedReplica()) as session:
        for given in ("text", ["two", "texts"], [1, 2], [[1], [2, 3]]):
            body = {"model": MODEL, "prompt": given}
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 200

"""A steady load on several routers, each request of which says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import aiohttp


class End(Enum):
    WHOLE = "whole"
    CUT = "cut"  # a stream that had begun and was ended by one error event, or broken off
    FAILED = "failed"  # any other status, or an answer that just stops


@dataclass(frozen=True)
class Sample:
    """One request; times are of the monotonic clock."""

    began: float
    ended: float
    end: End
    seen: str  # what came instead of a whole answer


@dataclass
class Load:
    """Requests to the routers in turn, every second one a stream, `rate` of them a second.

    As a Service's client does, a request that no router accepts tries the next one; an answer once
    begun stays where it is.
    """

    urls: list[str]
    body: Callable[[int], dict[str, Any]]
    rate: float
    timeout: float = 30.0
    samples: list[Sample] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Load:
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._running = asyncio.create_task(self._send_all())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self._session.close()

    async def stop(self) -> None:
        """Send no more; returns when all that was sent has ended."""
        assert self._running is not None
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        await asyncio.gather(*self._tasks)

    def count(self, end: End) -> int:
        return sum(sample.end is end for sample in self.samples)

    async def _send_all(self) -> None:
        number = 0
        begin = time.monotonic()
        while True:
            task = asyncio.create_task(self._send(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            number += 1
            await asyncio.sleep(max(0.0, begin + number / self.rate - time.monotonic()))

    async def _send(self, number: int) -> None:
        began = time.monotonic()
        body = self.body(number) | {"stream": number % 2 == 1}
        end, seen = End.FAILED, "no router accepts"
        for turn in range(len(self.urls)):
            url = self.urls[(number + turn) % len(self.urls)]
            try:
                end, seen = await self._ask(url, body)
            except aiohttp.ClientConnectorError:
                continue
            except aiohttp.ClientPayloadError as error:
                # It had begun: a client sees that it is not whole.
                end, seen = End.CUT if body["stream"] else End.FAILED, repr(error)
            except (aiohttp.ClientError, TimeoutError) as error:
                end, seen = End.FAILED, repr(error)
            break
        self.samples.append(Sample(began, time.monotonic(), end, seen))

    async def _ask(self, url: str, body: dict[str, Any]) -> tuple[End, str]:
        async with self._session.post(url + "/v1/completions", json=body) as response:
            text = (await response.read()).decode()
        if response.status != 200:
            return End.FAILED, f"{response.status} {text}"
        return _end_of_stream(text) if body["stream"] else _end_of_answer(text)


def _end_of_answer(text: str) -> tuple[End, str]:
    whole = bool(json.loads(text)["choices"][0]["finish_reason"])
    return (End.WHOLE, "") if whole else (End.FAILED, text)


def _end_of_stream(text: str) -> tuple[End, str]:
    events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
    errors = [event for event in events if '"error"' in event]
    if events[-1] == "[DONE]" and not errors:
        return End.WHOLE, ""
    if len(errors) == 1 and events[-1] in (errors[0], "[DONE]") and len(events) > 1:
        return End.CUT, errors[0]
    return End.FAILED, text

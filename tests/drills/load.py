"""A steady load on several routers, each request of which says how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import aiohttp


class End(Enum):
    WHOLE = "whole"
    CUT = "cut"  # a stream that had begun and was ended by one error event, or broken off
    LOST = "lost"  # its connection broke, and nothing of it, or part of a whole answer, had come
    FAILED = "failed"  # any other status
    TRUNCATED = "truncated"  # it just stops, as if it were whole
    WRONG = "wrong"  # another text than the expected one


@dataclass(frozen=True)
class Sample:
    """One request; times are of the monotonic clock."""

    number: int
    began: float
    ended: float
    end: End
    texts: tuple[str, ...]  # as far as they came, one a choice
    seen: str  # what came instead of a whole answer


@dataclass
class Answer:
    """What one router sent; `broken` says how its connection ended early."""

    status: int = 0
    raw: bytes = b""
    broken: str = ""


@dataclass
class Load:
    """Requests to the routers in turn, every second one a stream, `rate` of them a second.

    As a Service's client does, a request that a router does not accept, or before it is ready, goes
    to the next one; an answer once begun stays where it is. `expected` gives the texts of a
    request's choices, where known.
    """

    urls: list[str]
    body: Callable[[int], dict[str, Any]]
    rate: float
    timeout: float = 30.0
    expected: Callable[[int], tuple[str, ...] | None] = lambda _: None
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
        answer = Answer(broken="no router accepts")
        for turn in range(len(self.urls)):
            url = self.urls[(number + turn) % len(self.urls)]
            try:
                answer = await ask(self._session, url, body)
            except aiohttp.ClientConnectorError:
                continue
            if not (answer.status == 503 and b'"Starting' in answer.raw):
                break
        end, texts = judge(answer, self.expected(number), stream=body["stream"])
        seen = "" if end is End.WHOLE else f"{answer.status} {answer.broken} {answer.raw.decode()}"
        self.samples.append(Sample(number, began, time.monotonic(), end, texts, seen))


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Answer:
    """
    Raises:
        ClientConnectorError: the router takes no connection.
    """
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = Answer()
    try:
        async with session.post(url + path, json=body) as response:
            answer.status = response.status
            async for part in response.content.iter_any():
                answer.raw += part
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.broken = repr(error)
    return answer


def judge(
    answer: Answer, expected: tuple[str, ...] | None, *, stream: bool
) -> tuple[End, tuple[str, ...]]:
    """How an answer ended, and its texts as far as they came."""
    if answer.broken and not (stream and answer.raw):
        return End.LOST, ()
    if answer.status != 200:
        return End.FAILED, ()
    try:
        end, texts = _of_stream(answer) if stream else _of_whole(answer)
    except (ValueError, KeyError):  # what came whole is none of ours
        return End.WRONG, ()
    if expected is not None and differ(end, texts, expected):
        end = End.WRONG
    return end, texts


def differ(end: End, texts: tuple[str, ...], expected: tuple[str, ...]) -> bool:
    """Whether a text, as far as it came, is another one."""
    if end is End.WHOLE:
        return texts != expected
    begins = (want.startswith(text) for want, text in zip(expected, texts, strict=False))
    return not all(begins)


def _of_whole(answer: Answer) -> tuple[End, tuple[str, ...]]:
    choices = json.loads(answer.raw)["choices"]
    whole = all(choice["finish_reason"] for choice in choices)
    return End.WHOLE if whole else End.TRUNCATED, tuple(map(_text, choices))


def _of_stream(answer: Answer) -> tuple[End, tuple[str, ...]]:
    parts = answer.raw.split(b"\n\n")[:-1]
    events = [part.removeprefix(b"data: ") for part in parts if not part.startswith(b":")]
    done = b"[DONE]" in events
    parsed = [json.loads(event) for event in events if event != b"[DONE]"]
    texts: defaultdict[int, str] = defaultdict(str)
    for choice in (choice for event in parsed for choice in event.get("choices", ())):
        texts[choice["index"]] += _text(choice)
    errors = [number for number, event in enumerate(parsed) if "error" in event]
    if done and not errors:
        end = End.WHOLE
    elif errors == [len(parsed) - 1] or (answer.broken and not errors):
        end = End.CUT if texts else End.LOST if answer.broken else End.FAILED
    else:
        end = End.TRUNCATED
    return end, tuple(texts[index] for index in sorted(texts))


def _text(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or said.get("content") or ""

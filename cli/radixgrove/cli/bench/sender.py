"""One process of load: `python -m radixgrove.cli.bench.sender`.

Several of them share the requests, so that the measuring side is not what is measured. Each reads
its job from a line of standard input, makes its prompts, writes `ready`, reads the common start as
Unix seconds from a second line, and at the end writes what it saw.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator

import aiohttp
import msgspec
import uvloop

from radixgrove.cli.bench.workload import PlannedRequest

_LINE_BYTES = 1 << 20
_MESSAGE_CHARS = 200


class Job(msgspec.Struct, kw_only=True):
    """What one sender does."""

    url: str
    model: str
    key: str | None
    chat: bool
    ignore_eos: bool
    concurrency: int | None  # closed loop of that many; None: open loop, at the planned times
    timeout: float
    requests: list[PlannedRequest]
    temperature: float = 0.0


class Sample(msgspec.Struct, kw_only=True):
    """What one request experienced; seconds since its sending unless said otherwise."""

    sent: float  # since the common start
    late: float  # how long after its planned time it was sent
    first: float | None = None  # to the first token
    total: float = 0.0
    gaps: list[float] = []  # between events that carried output
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    token_ids: list[int] = []  # of the output, where the request asked for them
    error: str | None = None  # "HTTP 429", "cut short", ...
    said: str = ""  # what the server said to it


class Outcome(msgspec.Struct):
    """What one sender saw, and what the sending took of it."""

    samples: list[Sample]
    cpu_seconds: float


class Sender:
    """Sends one job's requests. `samples` has one a request, in the order of their ends."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.samples: list[Sample] = []
        self._bodies = [(request.at, _body(job, request)) for request in job.requests]

    async def run(self, start_at: float) -> None:
        """Send everything, from `start_at` (Unix seconds) on."""
        job = self.job
        async with open_session(job.timeout, job.key) as session:
            await asyncio.sleep(max(0.0, start_at - time.time()))
            if job.concurrency is None:
                users = [self._once(session, start_at, *entry) for entry in self._bodies]
            else:
                waiting = iter(self._bodies)
                users = [self._user(session, start_at, waiting) for _ in range(job.concurrency)]
            await asyncio.gather(*users)

    async def _once(
        self, session: aiohttp.ClientSession, start_at: float, at: float, body: bytes
    ) -> None:
        await asyncio.sleep(max(0.0, start_at + at - time.time()))
        await self._send(session, start_at, at, body)

    async def _user(
        self,
        session: aiohttp.ClientSession,
        start_at: float,
        waiting: Iterator[tuple[float, bytes]],
    ) -> None:
        """One user of a closed loop: the next request follows the end of the last."""
        for _, body in waiting:
            await self._send(session, start_at, time.time() - start_at, body)

    async def _send(
        self, session: aiohttp.ClientSession, start_at: float, planned: float, body: bytes
    ) -> None:
        sent = time.time() - start_at
        sample = Sample(sent=sent, late=max(0.0, sent - planned))
        path = "/v1/chat/completions" if self.job.chat else "/v1/completions"
        await send(session, self.job.url + path, body, sample)
        self.samples.append(sample)


def open_session(timeout: float, key: str | None = None) -> aiohttp.ClientSession:
    """A session without a limit of connections; `timeout` is seconds a request may take."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout),
        headers={"authorization": f"Bearer {key}"} if key else {},
        read_bufsize=_LINE_BYTES,
    )


async def send(session: aiohttp.ClientSession, address: str, body: bytes, sample: Sample) -> None:
    """Send a request that streams, and note in `sample` what came of it."""
    started = time.perf_counter()
    try:
        async with session.post(
            address, data=body, headers={"content-type": "application/json"}
        ) as response:
            if response.status != 200:
                sample.error = f"HTTP {response.status}"
                sample.said = _message(await response.read())
            else:
                await _read(response, sample, started)
    except TimeoutError:
        sample.error = "timeout"
    except msgspec.DecodeError:
        sample.error = "malformed event"
    except (aiohttp.ClientError, OSError) as error:
        sample.error = type(error).__name__
    sample.total = time.perf_counter() - started


def _message(body: bytes) -> str:
    """The message in the answer of an error; empty where it has none."""
    try:
        return str(json.loads(body)["error"]["message"])[:_MESSAGE_CHARS]
    except (ValueError, KeyError, TypeError):
        return ""


def _body(job: Job, request: PlannedRequest) -> bytes:
    prompt = request.prompt()
    body = {
        "model": job.model,
        "max_tokens": request.output_tokens,
        "temperature": job.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if job.ignore_eos:
        body["ignore_eos"] = True
    if request.seed is not None:
        body["seed"] = request.seed
    if job.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    return json.dumps(body).encode()


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    @property
    def carries_output(self) -> bool:
        """Text, or tokens that are no whole character yet."""
        text = self.text or (self.delta is not None and self.delta.content)
        return bool(text or self.token_ids)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    type: str | None = None


class _Event(msgspec.Struct):
    """What we look at of a stream's event, of either API."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_event_decoder = msgspec.json.Decoder(_Event)


async def _read(response: aiohttp.ClientResponse, sample: Sample, started: float) -> None:
    """Follow the stream; an end without `[DONE]` is an error, as is an error event."""
    last = started
    rest = b""
    ended = False
    async for chunk in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                ended = True  # read on: what is left of the response frees its connection
                continue
            if _take(_event_decoder.decode(data), sample):
                if sample.first is None:
                    sample.first = now - started
                else:
                    sample.gaps.append(now - last)
                last = now
            if sample.error is not None:
                return
        if len(rest) > _LINE_BYTES:
            break
    if not ended:
        sample.error = "cut short"


def _take(event: _Event, sample: Sample) -> bool:
    """Note usage, tokens and failure of an event; whether it carries output."""
    if event.error is not None:
        sample.error = f"stream: {event.error.type}"
    if event.usage is not None:
        sample.prompt_tokens = event.usage.prompt_tokens
        sample.output_tokens = event.usage.completion_tokens
        details = event.usage.prompt_tokens_details
        sample.cached_tokens = (details.cached_tokens or 0) if details is not None else 0
    for choice in event.choices:
        sample.token_ids += choice.token_ids or []
    return any(choice.carries_output for choice in event.choices)


def main() -> None:
    sender = Sender(msgspec.json.decode(sys.stdin.buffer.readline(), type=Job))
    gc.collect()
    gc.disable()  # a pause of ours must not look like one of the server
    print("ready", flush=True)
    start_at = float(sys.stdin.buffer.readline())
    before = time.process_time()
    uvloop.run(sender.run(start_at))
    outcome = Outcome(sender.samples, time.process_time() - before)
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


if __name__ == "__main__":
    main()

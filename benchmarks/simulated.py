"""A simulated replica: a real HTTP server with a block cache and a FIFO prefill, but no model.

It speaks the worker's side of the protocol (envelopes, tokenizer files, registration, cache events
through the real `Publisher`), and plain JSON for any other router. Hits are counted by itself, from
the text of the prompt (64 characters a block), alike for every router before it. `/stats` has the
counters of each member of its group.

    python -m benchmarks.simulated --port 8100 [--redis redis://…] [--block-ms 1] [--dp 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from radixgrove.protocol.blocks import HASH_BYTES, BlockHasher
from radixgrove.protocol.envelope import ENVELOPE_TYPE, INTERNAL_KEY_HEADER, Envelope
from radixgrove.protocol.registry import EngineInfo, Registration, member_id, root_fingerprint
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.service.listening import bound_socket
from radixgrove.service.server import Server
from radixgrove.worker.agent.publisher import Publisher
from radixgrove.worker.messages import (
    Admitted,
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
    EngineState,
    Stats,
    Tier,
)

MODEL = "simulated"
INTERNAL_KEY = "simulated-internal-key"
BLOCK_CHARS = 64
BLOCK_TOKENS = 16  # four characters a token
NAMESPACE = "simulated"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@cache
def tokenizer_files() -> TokenizerFiles:
    """A tokenizer of four-character words: a text of 64 characters is one block of 16 tokens."""
    words = [a + b + c + " " for a in _LETTERS for b in _LETTERS for c in _LETTERS]
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<|im_start|>", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]{1,4}"), "isolated")
    tokenizer.add_special_tokens(["<|im_start|>"])
    template = (
        "{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    return TokenizerFiles(
        {
            "tokenizer.json": tokenizer.to_str().encode(),
            "tokenizer_config.json": json.dumps({"chat_template": template}).encode(),
        }
    )


def block_text(number: int) -> str:
    """The text of one block of a trace: 16 words, of which the first two name the block."""
    values = [number % 17576, number // 17576 % 17576]
    values += [(number * 2654435761 + position * 40503) % 17576 for position in range(2, 16)]
    return "".join(
        _LETTERS[value // 676] + _LETTERS[value // 26 % 26] + _LETTERS[value % 26] + " "
        for value in values
    )


@dataclass
class Behaviour:
    """What a test may ask of a replica."""

    status: int = 200  # answered instead of work when not 200
    hang: bool = False  # accept, and never answer
    tokens: int = 2  # chunks of a stream
    token_seconds: float = 0.0  # between chunks
    break_after: int | None = None  # cut the connection after so many chunks
    ready: bool = True
    tokenizer: bool = True  # hand its files to routers
    tokenizer_hangs: bool = False  # accept that they ask, and never answer


@dataclass
class Counters:
    requests: int = 0
    aborted: int = 0  # the client went away before the end
    finished: int = 0
    blocks: int = 0
    hits: int = 0  # blocks that were in the cache
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


class BlockCache:
    """Prefix blocks, least recently used first out; a block is younger than its descendants."""

    def __init__(self, capacity: int) -> None:
        self._blocks: OrderedDict[int, bytes] = OrderedDict()  # path hash → chain hash
        self._capacity = capacity

    def match(self, path: list[int]) -> int:
        matched = next((i for i, key in enumerate(path) if key not in self._blocks), len(path))
        for key in reversed(path[:matched]):
            self._blocks.move_to_end(key)
        return matched

    def insert(self, path: list[int], chain: bytes) -> tuple[bytes, bytes]:
        """Adds a path; returns the chain hashes that came and those that went, packed."""
        path = path[: self._capacity]
        added = b""
        for i, key in enumerate(path):
            if key not in self._blocks:
                self._blocks[key] = chain[i * HASH_BYTES : (i + 1) * HASH_BYTES]
                added += self._blocks[key]
        for key in reversed(path):
            self._blocks.move_to_end(key)
        removed = b""
        while len(self._blocks) > self._capacity:
            removed += self._blocks.popitem(last=False)[1]
        return added, removed

    def all(self) -> bytes:
        return b"".join(reversed(self._blocks.values()))


class SimulatedReplica:
    """One replica on a port of its own. `start`, then `stop`."""

    def __init__(
        self,
        *,
        port: int = 0,
        redis_url: str | None = None,
        prefix: str = "radixgrove",
        replica_id: str | None = None,
        dp: int = 1,
        host: SimulatedReplica | None = None,
        service: str = "default",
        models: list[str] | None = None,
        secret: bytes = b"",
        internal_key: str = INTERNAL_KEY,
        block_ms: float = 1.0,
        capacity: int = 10_000,
        max_model_len: int = 1 << 20,
        keep_bodies: bool = False,
        namespace: str = NAMESPACE,
        weight_version: str = "0",
    ) -> None:
        """
        Args:
            dp: members of its group, of which this one is the first. `replica_id` is the group's.
            host: the first member of its group, at which requests for this one arrive too.
        """
        self.behaviour = Behaviour()
        self.counters = Counters()
        self.cache = BlockCache(capacity)
        self.running = self.waiting = 0
        self.publisher: Publisher | None = None
        self.models = models or [MODEL]
        self._internal_key = internal_key
        self._block_ms = block_ms
        self._max_model_len = max_model_len
        self._keep_bodies = keep_bodies
        self._redis_url, self._prefix = redis_url, prefix
        self._replica_id, self._service = replica_id, service
        self.members = [self] if host is None else host.members
        self._dp, self._dp_rank = dp, len(self.members) if host is not None else 0
        if host is not None:
            self.members.append(self)
        self._namespace, self._weight_version = namespace, weight_version
        self._hasher = BlockHasher(secret, self._namespace, BLOCK_TOKENS)
        self._turn = asyncio.Lock()
        self._busy_until = 0.0
        self._sequence = 0
        self._server = Server(self, bound_socket("127.0.0.1", port))
        self.port = self._server.port
        self.url = f"http://127.0.0.1:{self.port}"
        self._tasks: list[asyncio.Task[Any]] = []

    # ---- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        self._tasks.append(asyncio.create_task(self._server.run()))
        if self._redis_url is not None:
            self.publisher = Publisher(
                self._redis_url,
                self._prefix,
                self.registration(),
                self._hasher,
                self._snapshot,
                lambda: True,
            )
            self._report()
            await self.publisher.start()
            self._tasks.append(asyncio.create_task(self._pulse()))

    def registration(self) -> Registration:
        group = self._replica_id or f"127.0.0.1:{self.members[0].port}"
        return Registration(
            replica_id=member_id(group, self._dp_rank, self._dp),
            group=group,
            dp_rank=self._dp_rank,
            dp=self._dp,
            service=self._service,
            url=self.members[0].url,
            models=self.models,
            namespace=self._namespace,
            weight_version=self._weight_version,
            root=root_fingerprint(self._hasher),
            index_block=BLOCK_TOKENS,
            tokenizer_digest=tokenizer_files().digest,
            engine=EngineInfo(
                page_size=BLOCK_TOKENS,
                max_model_len=self._max_model_len,
                vocab_size=20_000,
                prefill_tokens_per_second=BLOCK_TOKENS / self._block_ms * 1000,
            ),
        )

    async def stop(self) -> None:
        """Leaves the service and cuts what is still connected."""
        if self.publisher is not None:
            await self.publisher.close()
        self._server.abort()
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- publishing --------------------------------------------------------------------------

    async def _pulse(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(0.2)

    def _report(self) -> None:
        assert self.publisher is not None
        left = max(0.0, self._busy_until - time.monotonic()) * 1000
        self.publisher.apply(
            Stats(
                state=EngineState.READY,
                ticks=0,
                steps=0,
                step_remaining=None,
                running=self.running,
                waiting=self.waiting,
                prefill_backlog=round(left / self._block_ms * BLOCK_TOKENS),
                prompt_tokens=self.counters.blocks * BLOCK_TOKENS,
                cached_tokens=self.counters.hits * BLOCK_TOKENS,
            )
        )

    def _snapshot(self) -> None:
        assert self.publisher is not None
        event = CacheEvent(True, Tier.GPU, "local", self.cache.all())
        self.publisher.apply(CacheSnapshot(self._sequence, [event], last=True))

    def _publish(self, added: bytes, removed: bytes) -> None:
        if self.publisher is not None and (added or removed):
            self._sequence += 1
            events = [
                CacheEvent(True, Tier.GPU, "local", added),
                CacheEvent(False, Tier.GPU, "local", removed),
            ]
            self.publisher.apply(CacheEvents(self._sequence, events))

    # ---- serving -----------------------------------------------------------------------------

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path.startswith("/internal/tokenizer/"):
            if self.behaviour.tokenizer_hangs:
                await asyncio.Event().wait()
            files = tokenizer_files().contents if self.behaviour.tokenizer else {}
            content = files.get(path.rpartition("/")[2])
            await _answer(send, 404 if content is None else 200, content or b"")
        elif path in ("/readyz", "/health", "/livez", "/get_model_info", "/get_server_info"):
            await _answer(send, 200 if self.behaviour.ready else 503, b"{}")
        elif path == "/v1/models":
            data = [{"id": model, "object": "model"} for model in self.models]
            await _answer(send, 200, msgspec.json.encode({"object": "list", "data": data}))
        elif path == "/stats":
            stats = [vars(member.counters) | {"bodies": None} for member in self.members]
            await _answer(send, 200, msgspec.json.encode(stats))
        elif path == "/tokenize":  # vllm-router asks the workers
            body = msgspec.json.decode(await _body(receive))
            ids = TOKENIZER.encode(body.get("prompt") or "", add_special_tokens=False).ids
            answer = {"count": len(ids), "tokens": ids, "max_model_len": self._max_model_len}
            await _answer(send, 200, msgspec.json.encode(answer))
        elif path in ("/v1/completions", "/v1/chat/completions"):
            await self._complete(scope, receive, send)
        else:
            await _answer(send, 404, b"{}")

    async def _complete(self, scope: Any, receive: Any, send: Any) -> None:
        raw = await _body(receive)
        headers = {k.decode(): v.decode() for k, v in scope["headers"]}
        envelope = None
        if headers.get("content-type") == ENVELOPE_TYPE:
            assert headers[INTERNAL_KEY_HEADER] == self._internal_key
            envelope = msgspec.msgpack.decode(raw, type=Envelope)
            raw = envelope.body
        member = self.members[envelope.dp_rank or 0] if envelope is not None else self
        await member._run(raw, headers, envelope, receive, send)

    async def _run(
        self,
        raw: bytes,
        headers: dict[str, str],
        envelope: Envelope | None,
        receive: Any,
        send: Any,
    ) -> None:
        if self._keep_bodies:
            self.counters.bodies.append(raw)
            self.counters.headers.append(headers)
        self.counters.requests += 1
        behaviour = self.behaviour
        if behaviour.status != 200:
            error = {"error": {"message": "simulated", "type": "server_error", "code": None}}
            await _answer(send, behaviour.status, msgspec.json.encode(error))
            return
        work = asyncio.ensure_future(self._work(msgspec.json.decode(raw), envelope, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            self.counters.finished += 1
        else:
            self.counters.aborted += 1
            work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)

    async def _work(self, body: dict[str, Any], envelope: Envelope | None, send: Any) -> None:
        behaviour = self.behaviour
        if behaviour.hang:
            await asyncio.Event().wait()
        path = _path(_text(body))
        cached = await self._prefill(path, envelope)
        usage = {
            "prompt_tokens": len(path) * BLOCK_TOKENS,
            "completion_tokens": behaviour.tokens,
            "total_tokens": len(path) * BLOCK_TOKENS + behaviour.tokens,
            "prompt_tokens_details": {"cached_tokens": cached * BLOCK_TOKENS},
        }
        if not body.get("stream"):
            await asyncio.sleep(behaviour.tokens * behaviour.token_seconds)
            if behaviour.break_after is not None:
                _cut(send)
                await asyncio.Event().wait()
            choice = {"index": 0, "text": "tok " * behaviour.tokens, "finish_reason": "stop"}
            answer = {"id": "x", "object": "text_completion", "choices": [choice], "usage": usage}
            await _answer(send, 200, msgspec.json.encode(answer))
            return
        start = {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
        }
        await send(start)
        for number in range(behaviour.tokens):
            if behaviour.break_after == number:
                await asyncio.sleep(0)  # the head leaves by itself
                _cut(send)
                await asyncio.Event().wait()
            chunk = {
                "id": "x",
                "object": "text_completion",
                "choices": [{"index": 0, "text": "tök ", "finish_reason": None}],
            }
            await _event(send, msgspec.json.encode(chunk))
            if behaviour.token_seconds:
                await asyncio.sleep(behaviour.token_seconds)
        await _event(send, msgspec.json.encode({"id": "x", "choices": [], "usage": usage}))
        await _event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async def _prefill(self, path: list[int], envelope: Envelope | None) -> int:
        """Waits its turn, then as long as the uncached blocks take; returns the cached ones."""
        arrived = time.monotonic()
        self.waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            matched = self.cache.match(path)
            if self.publisher is not None and envelope is not None:
                self.publisher.apply(Admitted([f"{envelope.request_id}:0"]))
            begin = max(arrived, self._busy_until)
            self._busy_until = begin + (len(path) - matched) * self._block_ms / 1000
            await asyncio.sleep(max(0.0, self._busy_until - time.monotonic()))
            chain = bytes(HASH_BYTES * len(path))
            if envelope is not None and envelope.prompts:
                chain = self._hasher.chain(envelope.prompts[0])
            self._publish(*self.cache.insert(path, chain))
        except asyncio.CancelledError:
            self._busy_until = min(self._busy_until, time.monotonic())
            raise
        finally:
            self.running -= 1
            self._turn.release()
        self.counters.blocks += len(path)
        self.counters.hits += matched
        return matched


TOKENIZER = tokenizer_files().tokenizer()


def _text(body: dict[str, Any]) -> str:
    """What stands for a prompt: all its strings, or JSON of what is none."""
    given = body.get("prompt")
    if given is None:
        given = [message["content"] for message in body["messages"]]
    texts = given if isinstance(given, list) else [given]
    return "".join(text if isinstance(text, str) else json.dumps(text) for text in texts)


def _path(text: str) -> list[int]:
    """Path hashes of a prompt's full blocks."""
    path, parent = [], 0
    for offset in range(0, len(text) - len(text) % BLOCK_CHARS, BLOCK_CHARS):
        parent = hash((parent, text[offset : offset + BLOCK_CHARS]))
        path.append(parent)
    return path


async def _body(receive: Any) -> bytes:
    chunks, more = [], True
    while more:
        message = await receive()
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(chunks)


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _event(send: Any, data: bytes) -> None:
    body = b"data: " + data + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _cut(send: Any) -> None:
    """Breaks the connection, as a dying process does."""
    send.__self__.transport.abort()


async def _main(arguments: argparse.Namespace) -> None:
    options = {
        "redis_url": arguments.redis,
        "block_ms": arguments.block_ms,
        "capacity": arguments.capacity,
        "max_model_len": arguments.max_model_len,
        "replica_id": arguments.replica_id,
        "dp": arguments.dp,
    }
    first = SimulatedReplica(port=arguments.port, **options)
    members = [first, *(SimulatedReplica(host=first, **options) for _ in range(1, arguments.dp))]
    for member in members:
        await member.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    for member in reversed(members):
        await member.stop()


def main(arguments: list[str] | None = None) -> None:
    import uvloop

    parser = argparse.ArgumentParser(description="A simulated replica.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--redis")
    parser.add_argument("--replica-id")
    parser.add_argument("--dp", type=int, default=1, help="members; the capacity is of each")
    parser.add_argument("--block-ms", type=float, default=1.0)
    parser.add_argument("--capacity", type=int, default=10_000)
    parser.add_argument("--max-model-len", type=int, default=1 << 20)
    uvloop.run(_main(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()

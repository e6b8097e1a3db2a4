"""The fastest worker there can be: parses a request and answers at once, always the same.

A request with `stream` gets `EVENTS` events, one every `EVENT_SECONDS`, as an engine's steps would
yield them. What a router adds is measured before it. With `--redis` it registers as a replica, with
the real tokenizer of the demo model, and never caches anything.

    python -m benchmarks.load.echo_worker --port 8100 [--redis redis://…] [--model-dir DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import cast

import httptools
import uvloop

from benchmarks.simulated import MODEL
from radixgrove.protocol.blocks import BlockHasher
from radixgrove.protocol.registry import EngineInfo, Registration, root_fingerprint
from radixgrove.protocol.text.tokenizer import TokenizerFiles
from radixgrove.worker.agent.publisher import Publisher
from radixgrove.worker.messages import CacheSnapshot, EngineState, Stats

_ANSWER = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello."},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }
).encode()
EVENTS = 100
EVENT_SECONDS = 0.002
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENT = (
    b"data: %b\n\n"
    % json.dumps(
        {
            "id": "x",
            "object": "chat.completion.chunk",
            "model": MODEL,
            "choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}],
        }
    ).encode()
)
_MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
_TOKENS = b'{"count":1,"max_model_len":1048576,"tokens":[1]}'


class _Connection(asyncio.Protocol):
    files: TokenizerFiles | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url
        self._streams = False

    def on_body(self, body: bytes) -> None:
        self._streams = self._streams or b'"stream":true' in body

    def _send_event(self, left: int) -> None:
        if self._transport.is_closing():
            return
        event = _EVENT if left else b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        if left:
            asyncio.get_running_loop().call_later(EVENT_SECONDS, self._send_event, left - 1)
        else:
            self._transport.write(b"0\r\n\r\n")

    def on_message_complete(self) -> None:
        if self._streams:
            self._transport.write(_STREAM_HEAD)
            self._send_event(EVENTS)
            return
        status, body = b"200 OK", _ANSWER
        if self._url.startswith(b"/internal/tokenizer/") and self.files is not None:
            found = self.files.contents.get(self._url.rpartition(b"/")[2].decode())
            status, body = (b"404 Not Found", b"") if found is None else (b"200 OK", found)
        elif self._url == b"/v1/models":
            body = _MODELS
        elif self._url == b"/tokenize":
            body = _TOKENS
        self._transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (status, len(body), body)
        )


async def main(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    publisher = None
    if arguments.redis:
        _Connection.files = files = TokenizerFiles.load(arguments.model_dir)
        hasher = BlockHasher(b"", "echo", 16)
        registration = Registration(
            replica_id=f"127.0.0.1:{arguments.port}",
            service="default",
            url=f"http://127.0.0.1:{arguments.port}",
            models=[MODEL],
            namespace="echo",
            root=root_fingerprint(hasher),
            index_block=16,
            tokenizer_digest=files.digest,
            engine=EngineInfo(
                page_size=16,
                max_model_len=1 << 20,
                vocab_size=1 << 17,
                prefill_tokens_per_second=20_000.0,
            ),
        )

        def empty() -> None:
            assert publisher is not None
            publisher.apply(CacheSnapshot(0, [], last=True))

        publisher = Publisher(
            arguments.redis, "radixgrove", registration, hasher, empty, lambda: True
        )
    server = await loop.create_server(_Connection, "127.0.0.1", arguments.port, backlog=1024)
    async with server:
        if publisher is not None:
            publisher.apply(Stats(state=EngineState.READY, ticks=0, steps=0, step_remaining=None))
            await publisher.start()
        while True:
            await asyncio.sleep(0.5)
            if publisher is not None:
                pulse = Stats(state=EngineState.READY, ticks=0, steps=0, step_remaining=None)
                publisher.apply(pulse)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A worker that answers at once.")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--redis")
    parser.add_argument("--model-dir", type=Path)
    uvloop.run(main(parser.parse_args()))

"""Rank 0's side of the worker's HTTP protocol: tokenizer files, and a canned text as the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from secrets import compare_digest

import msgspec
from aiohttp import web

from radixgrove.protocol.envelope import ENVELOPE_TYPE, INTERNAL_KEY_HEADER, Envelope
from radixgrove.protocol.openai.formats import DONE, ChatFormat, Choice, StreamEncoder, new_head
from radixgrove.protocol.openai.responses import Head, Usage
from radixgrove.protocol.text.tokenizer import TokenizerFiles

_PIECE_SECONDS = 0.05
_FORM = ChatFormat()


class _ChatBody(msgspec.Struct):
    """What of a client's request the canned answer depends on."""

    model: str
    max_tokens: int = 16
    stream: bool = False


class Answers:
    """Every answer begins with the name of its pod, so that a client sees who gave it."""

    def __init__(self, name: str, tokenizer: TokenizerFiles, internal_key: str) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._key = internal_key
        self.running = 0

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/internal/tokenizer/{digest}/{file}", self._tokenizer_file),
            web.post("/v1/chat/completions", self._chat),
        ]

    async def _tokenizer_file(self, request: web.Request) -> web.Response:
        self._check_key(request)
        content = self._tokenizer.contents.get(request.match_info["file"])
        if content is None or request.match_info["digest"] != self._tokenizer.digest:
            raise web.HTTPNotFound
        return web.Response(body=content)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        if request.content_type != ENVELOPE_TYPE:
            raise web.HTTPUnsupportedMediaType
        envelope = msgspec.msgpack.decode(await request.read(), type=Envelope)
        body = msgspec.json.decode(envelope.body, type=_ChatBody)
        pieces = [f"{self._name}:", *(f" {number}" for number in range(1, body.max_tokens))]
        with self._counted():
            if body.stream:
                return await self._stream(request, body.model, pieces)
            await asyncio.sleep(_PIECE_SECONDS * len(pieces))
            unset = msgspec.UNSET
            choice = Choice(0, "".join(pieces), "", [], "length", None, unset, unset)
            prompt = sum(len(ids) // 4 for ids in envelope.prompts)
            usage = Usage.of(prompt, len(pieces), 0)
            content = _FORM.whole(self._head(body.model, stream=False), [choice], usage)
            return web.Response(body=content, content_type="application/json")

    async def _stream(
        self, request: web.Request, model: str, pieces: list[str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        encoder = StreamEncoder(self._head(model, stream=True), _FORM, include_usage=False)
        await response.write(encoder.opening(0))
        for piece in pieces:
            await response.write(encoder.text(0, piece))
            await asyncio.sleep(_PIECE_SECONDS)
        await response.write(encoder.finish(0, "length"))
        await response.write(DONE)
        return response

    def _head(self, model: str, *, stream: bool) -> Head:
        return new_head(
            _FORM, stream=stream, model=model, fingerprint="group-probe", service_tier=None
        )

    def _check_key(self, request: web.Request) -> None:
        given = request.headers.get(INTERNAL_KEY_HEADER, "")
        if not compare_digest(given.encode(), self._key.encode()):
            raise web.HTTPUnauthorized

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

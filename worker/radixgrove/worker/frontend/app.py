"""The frontend's ASGI application: routes, admission, and the endpoints that generate."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from array import array
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import Request as HttpRequest
from fastapi import Response

from radixgrove.protocol.blocks import TOKEN_BYTES
from radixgrove.protocol.endpoints import ENDPOINTS, Endpoint
from radixgrove.protocol.envelope import ENVELOPE_TYPE, Envelope
from radixgrove.protocol.errors import RadixgroveError
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.decoding import peek_model
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.openai.requests import Generation, ModelLimits, Request
from radixgrove.protocol.openai.responses import ModelList, ModelObject
from radixgrove.protocol.settings import WorkerSettings, reveal
from radixgrove.protocol.text.prompts import EncodedPrompt
from radixgrove.service import asgi, generation, tokenization
from radixgrove.service.api import Api, Health, reply
from radixgrove.service.asgi import ClientDisconnected, Receive, Scope, Send
from radixgrove.service.auth import ApiKeys, sharing_domain
from radixgrove.service.guard import INTERNAL, PRINCIPAL, Guard
from radixgrove.service.tokenization import ModelText
from radixgrove.worker.frontend.answers import Answer, token_list
from radixgrove.worker.frontend.constraints import Checked, ConstraintCheck
from radixgrove.worker.frontend.generation import RequestInFlight, Signal
from radixgrove.worker.frontend.members import Chosen, Members
from radixgrove.worker.frontend.metrics import CONTENT_TYPE, Exposition
from radixgrove.worker.frontend.model import ServedModel
from radixgrove.worker.frontend.sequence import Sequence
from radixgrove.worker.frontend.unread import Unread

_log = logging.getLogger(__name__)

PING_SECONDS = 15.0  # proxies commonly cut streams that are silent for a minute
STALL_SECONDS = 120.0  # a client that reads nothing for so long loses its request
HOUSEKEEPING_SECONDS = 1.0
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# Keywords of a JSON schema that the answer is not held to.
IGNORED_KEYWORDS_HEADER = b"x-radixgrove-ignored-schema-keywords"
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


class Frontend:
    """One process's application. `app` is the ASGI callable; `housekeeping` must run beside it."""

    def __init__(
        self, settings: WorkerSettings, model: ServedModel, members: Members, keys: ApiKeys
    ) -> None:
        self.settings = settings
        self.model = model
        self.members = members
        self.draining = False
        self._keys = keys
        self._flights: set[RequestInFlight] = set()
        self._in_flight = 0  # from the first byte of a completion request to its last
        self._exposition = Exposition()
        self._metrics = self._exposition.metrics
        self._unread = Unread()
        self._constraints = ConstraintCheck(model, settings, self._metrics)
        for engine in members.engines:  # with one of them all are lost
            engine.on_gone = lambda: self.signal_all(Signal.ENGINE_GONE)
        guarded = Guard(
            self._api(),
            keys,
            management_key=reveal(settings.management_key),
            internal_key=reveal(settings.internal_key) or "",
        )
        self.app = asgi.build(
            guarded,
            max_body_bytes=settings.max_body_bytes,
            max_bodies_bytes=settings.max_bodies_bytes,
            cors_origins=settings.cors_origins,
        )

    @property
    def _max_in_flight(self) -> int:
        """What the engines can hold at all: more requests need not be read."""
        return len(self.members) * self.settings.max_queued + self.members.max_running

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def signal_all(self, signal: Signal) -> None:
        for flight in list(self._flights):
            flight.signal(signal)

    async def housekeeping(self) -> None:
        """Pings, stalled clients, a stuck engine, batched metrics; runs until cancelled."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            now = time.monotonic()
            self.members.check_stuck()
            for flight in list(self._flights):
                if flight.sending_since is not None:
                    if now - flight.sending_since > STALL_SECONDS:
                        flight.abandon()
                elif flight.generation.stream and now - flight.last_event > PING_SECONDS:
                    flight.signal(Signal.PING)
            self._metrics.flush()

    # ---- routes ------------------------------------------------------------------------------

    def _api(self) -> Api:
        api = Api("Radixgrove worker", needs_key=self.settings.api_keys_file is not None)
        for endpoint in ENDPOINTS:
            generation.serve(api, endpoint, partial(self._observed, endpoint))
        tokenization.serve(api, self._text_of)

        @api.probe("/livez", "/health")
        def livez() -> str:
            """Whether the process answers."""
            return ""

        @api.read("/readyz", Health)
        async def readyz() -> Response:
            """Whether requests are taken: follows the step counters of all engines."""
            self._check_ready(len(self.members))
            return reply(Health("serving" if self.settings.nodes > 1 else "ok"))

        @api.read("/metrics", CONTENT_TYPE)
        async def metrics() -> Response:
            """Metrics of the whole worker."""
            return Response(self._exposition.render(), media_type=CONTENT_TYPE)

        @api.read("/v1/models", ModelList)
        async def models() -> Response:
            """The model under all its names."""
            return reply(ModelList(self.model.objects(self._limits)))

        @api.read("/v1/models/{model:path}", ModelObject)
        async def model(model: str) -> Response:
            """The model under one of its names."""
            for entry in self.model.objects(self._limits):
                if entry.id == model:
                    return reply(entry)
            raise errors.model_not_found(model)

        @api.read("/internal/tokenizer/{digest}/{file}", "application/octet-stream")
        async def tokenizer_file(request: HttpRequest, digest: str, file: str) -> Response:
            """A tokenizer file, for routers only, and only of the very tokenizer they ask for."""
            if not asgi.state(request.scope)[INTERNAL]:
                raise errors.unauthorized(given=False)
            content = self.model.files.contents.get(file)
            if digest != self.model.files.digest or content is None:
                raise errors.not_found(request.method, request.url.path)
            return Response(content, media_type="application/octet-stream")

        return api

    async def _text_of(self, name: str | None) -> ModelText:
        if name is not None:
            self._check_name(name)
        return ModelText(self.model.encoder, self._limits)

    @property
    def _limits(self) -> ModelLimits:
        """The model's, until an engine has said how long its KV pool lets a request be."""
        limits, longest = self.model.limits, self.members.max_model_len
        if longest is None:
            return limits
        return msgspec.structs.replace(limits, max_model_len=longest)

    def _check_ready(self, least: int = 1) -> None:
        """
        Args:
            least: members that must take requests.

        Raises:
            ApiError: 503.
        """
        if self.draining:
            raise errors.overloaded("The server is shutting down.", retry_after=5)
        if self.members.gone:
            raise errors.overloaded("The engine has stopped.", retry_after=5)
        if len(self.members.ready) < least:
            heard = self.members.heard
            text = "The engine is not ready." if heard else "The model is still loading."
            raise errors.overloaded(text, retry_after=5)

    # ---- completions -------------------------------------------------------------------------

    async def _observed(
        self, endpoint: Endpoint[Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Count the request by its outcome, whatever that is."""
        arrived = time.monotonic()
        outcome = "error"
        self._in_flight += 1
        self._metrics.http_in_flight.inc()
        try:
            await self._complete(endpoint, scope, receive, send, arrived)
            outcome = "ok"
        except ClientDisconnected:
            outcome = "disconnected"
            raise
        except ApiError as error:
            outcome = _outcome(error)
            raise
        except _StreamFailed as failure:
            outcome = _outcome(failure.error)
        finally:
            self._in_flight -= 1
            self._metrics.http_in_flight.dec()
            self._metrics.requests.labels(endpoint.name, outcome).inc()
            self._metrics.duration.labels(endpoint.name).observe(time.monotonic() - arrived)

    async def _complete(
        self,
        endpoint: Endpoint[Any],
        scope: Scope,
        receive: Receive,
        send: Send,
        arrived: float,
    ) -> None:
        self._check_ready()
        if self._in_flight > self._max_in_flight:
            raise errors.rate_limited(1)
        media_type = asgi.require_content_type(scope, "application/json", ENVELOPE_TYPE)
        body = await asgi.read_body(receive)
        envelope = None
        if media_type == ENVELOPE_TYPE:
            envelope = self._open_envelope(scope, body)
            body, principal = envelope.body, envelope.principal
        else:
            principal = self._principal(scope)
        request = self._parse(endpoint, body)
        domain = sharing_domain(self.settings.sharing, principal, request.generation.cache_salt)
        with asgi.WhileConnected(scope):  # what has not begun for a client that left never does
            prompts = await self._encode(endpoint, request, envelope)
            checked = await self._constraints.check(request, prompts)
            chosen = await self._choose(request.generation, prompts, domain, envelope)
        identity = self._unique_id(envelope)
        await self._generate(
            _Accepted(endpoint, request, prompts, checked, domain, chosen, arrived, identity),
            scope,
            receive,
            send,
        )

    def _principal(self, scope: Scope) -> str:
        """A plain request's principal; the internal key alone has none."""
        principal: str | None = asgi.state(scope).get(PRINCIPAL)
        if principal is not None:
            return principal
        return self._keys.authenticate(asgi.header(scope, "authorization"))

    def _open_envelope(self, scope: Scope, body: bytes) -> Envelope:
        if not asgi.state(scope)[INTERNAL]:
            raise errors.unauthorized(given=True)
        try:
            return _envelope_decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise errors.invalid("The envelope is malformed.") from None

    def _unique_id(self, envelope: Envelope | None) -> str:
        """Base of the engine's ids of a request; a router's own id if it is not in use."""
        if envelope is not None:
            given = envelope.request_id
            if _ENGINE_ID.match(given) and not self.members.knows(f"{given}:0"):
                return given
        return uuid4().hex

    def _parse(self, endpoint: Endpoint[Any], body: bytes) -> Request:
        try:
            request: Request = endpoint.parse(body, self._limits)
        except ApiError:  # by the limits of a model that the client may not have meant
            self._check_name(peek_model(body))
            raise
        self._check_name(request.model)
        return request

    def _check_name(self, name: str) -> None:
        if name not in self.model.names:
            raise errors.model_not_found(name)

    async def _encode(
        self, endpoint: Endpoint[Any], request: Request, envelope: Envelope | None
    ) -> list[EncodedPrompt]:
        """Token ids of the prompts: the router's where they were made by this very tokenizer."""
        if (
            envelope is not None
            and envelope.tokenizer_digest == self.model.files.digest
            and len(envelope.prompts) == request.prompt_count
            and all(self._valid_ids(prompt) for prompt in envelope.prompts)
        ):
            return [EncodedPrompt(prompt, b"") for prompt in envelope.prompts]
        return await endpoint.encode(self.model.encoder, request, self._limits)

    async def _choose(
        self,
        generation: Generation,
        prompts: list[EncodedPrompt],
        domain: str,
        envelope: Envelope | None,
    ) -> Chosen:
        """The member that gets a request: the router's choice, where it has made one.

        Raises:
            ApiError: 400, there is no such member; 503, none takes requests.
        """
        if envelope is not None and envelope.dp_rank is not None:
            return Chosen(self.members.member(envelope.dp_rank), envelope.matched_tokens)
        longest = max((prompt.token_ids for prompt in prompts), key=len)
        reads_cache = generation.prefix_cache and generation.sampling.prompt_logprobs is None
        return await self.members.choose(longest, domain if reads_cache else "")

    def _valid_ids(self, token_ids: bytes) -> bool:
        if not token_ids or len(token_ids) % TOKEN_BYTES:
            return False
        ids = array("I")  # unsigned, where negative ids are larger than any vocabulary
        ids.frombytes(token_ids)
        return max(ids) < self.model.limits.vocab_size

    async def _generate(
        self, accepted: _Accepted, scope: Scope, receive: Receive, send: Send
    ) -> None:
        request = accepted.request
        generation = request.generation
        limits = self._limits
        max_tokens = [generation.max_tokens_for(len(prompt), limits) for prompt in accepted.prompts]
        asgi.state(scope)[asgi.FIELDS].update(
            model=request.model,
            prompt_tokens=sum(len(prompt) for prompt in accepted.prompts),
            stream=generation.stream,
        )
        answer = Answer(accepted.endpoint.form, request, accepted.prompts, self.model)
        if answer.silent and generation.sampling.prompt_logprobs is None:
            await _send_without_engine(answer, send)
            return
        flight = RequestInFlight(
            accepted.chosen.engine,
            self._metrics,
            self._unread,
            generation,
            self._sequences(accepted, answer),
            accepted.prompts,
            accepted.arrived,
            accepted.chosen.matched_tokens,
        )
        if self.settings.log_prompts:
            flight.texts = [[] for _ in flight.sequences]
        watcher = asyncio.create_task(_watch(receive, flight))
        self._flights.add(flight)
        try:
            with flight:
                flight.submit(
                    accepted.domain,
                    max_tokens,
                    self.model.eos_ids,
                    self.settings.queue_timeout,
                    accepted.checked.rules,
                )
                if generation.stream:
                    await self._stream(answer, flight, send, accepted.headers)
                else:
                    body = await answer.collect(flight)
                    await asgi.respond(_timed(send, flight), 200, body, headers=accepted.headers)
            self._count_tokens(flight, scope)
        finally:
            self._flights.discard(flight)
            watcher.cancel()
            if flight.texts is not None:
                asgi.state(scope)[asgi.FIELDS].update(self._texts(flight, flight.texts))

    def _texts(self, flight: RequestInFlight, answers: list[list[str]]) -> dict[str, list[str]]:
        """Prompts and answers for the log; only `log_prompts` asks for them."""
        decode = self.model.encoder.tokenizer.decode
        return {
            "prompts": [
                decode(token_list(prompt.token_ids), skip_special_tokens=False)
                for prompt in flight.prompts
            ],
            "answers": ["".join(parts) for parts in answers],
        }

    def _sequences(self, accepted: _Accepted, answer: Answer) -> list[Sequence]:
        generation = accepted.request.generation
        offered = self.model.offered(accepted.request)
        sequences = []
        for index in range(len(accepted.prompts) * generation.n):
            prompt = accepted.prompts[index // generation.n]
            sequences.append(
                Sequence(
                    index,
                    f"{accepted.request_id}:{index}",
                    generation,
                    self.model.vocabulary,
                    token_list(prompt.token_ids[-8 * TOKEN_BYTES :]),
                    offset=len(answer.echoed(index)),
                    output=self.model.output(accepted.request, prompt, offered),
                )
            )
        return sequences

    async def _stream(
        self,
        answer: Answer,
        flight: RequestInFlight,
        send: Send,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        """Send the events; the status waits for the engine's first word, which may be a refusal.

        Raises:
            _StreamFailed: the failure has been reported inside the stream.
        """
        started = False
        timed = _timed(send, flight)
        try:
            async with contextlib.aclosing(answer.stream(flight)) as events:
                async for chunk in events:
                    if not started:
                        started = True
                        await send(
                            {
                                "type": "http.response.start",
                                "status": 200,
                                "headers": [*_EVENT_STREAM, *headers],
                            }
                        )
                    await timed({"type": "http.response.body", "body": chunk, "more_body": True})
        except ClientDisconnected:
            raise
        except Exception as error:
            if not started:
                raise
            failure = error if isinstance(error, ApiError) else errors.internal()
            if not isinstance(error, ApiError):
                _log.exception("a stream failed")
            # An error event and the end of the connection: never `[DONE]`, never a finish reason.
            await send({"type": "http.response.body", "body": failure.event(), "more_body": False})
            raise _StreamFailed(failure) from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _count_tokens(self, flight: RequestInFlight, scope: Scope) -> None:
        usage = flight.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        self._metrics.request_prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.request_cached_tokens.inc(cached)
        self._metrics.request_completion_tokens.inc(usage.completion_tokens)
        asgi.state(scope)[asgi.FIELDS].update(
            cached_tokens=cached, completion_tokens=usage.completion_tokens
        )


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A request that has been read, checked and encoded."""

    endpoint: Endpoint[Any]
    request: Request
    prompts: list[EncodedPrompt]
    checked: Checked
    domain: str  # in which its KV may be shared
    chosen: Chosen
    arrived: float  # time.monotonic()
    request_id: str  # base of the engine's ids

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Of the answer, beyond those of its type."""
        ignored = ", ".join(self.checked.ignored)
        return [(IGNORED_KEYWORDS_HEADER, ignored.encode("latin-1", "replace"))] if ignored else []


class _StreamFailed(RadixgroveError):
    """A stream that had begun ended with an error event."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


# Ids of routers' reservations; the engine appends `:<sequence>`.
_ENGINE_ID = re.compile(r"^[A-Za-z0-9._/-]{1,128}$")


def _outcome(error: ApiError) -> str:
    """The `outcome` label of `radixgrove_requests_total`."""
    if error.status == 429:
        return "rejected"
    if error.status == 503:
        return "unavailable"
    return "invalid" if error.status < 500 else "error"


async def _watch(receive: Receive, flight: RequestInFlight) -> None:
    """Wake the request when its client goes away. The body has been read: nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
    flight.signal(Signal.DISCONNECTED)


def _timed(send: Send, flight: RequestInFlight) -> Send:
    """Notes since when a message waits: the request of a client that does not read is ended."""

    async def timed(message: asgi.Message) -> None:
        flight.sending_since = time.monotonic()
        await send(message)
        flight.sending_since = None

    return timed


async def _send_without_engine(answer: Answer, send: Send) -> None:
    if not answer.generation.stream:
        await asgi.respond(send, 200, answer.without_engine())
        return
    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
    await send({"type": "http.response.body", "body": answer.stream_without_engine()})

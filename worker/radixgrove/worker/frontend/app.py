"""The frontend's ASGI application: routes, authentication, admission, and the two completions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from array import array
from dataclasses import dataclass
from uuid import uuid4

import msgspec
from starlette.routing import Route, Router

from radixgrove.protocol.blocks import TOKEN_BYTES
from radixgrove.protocol.openai import errors, requests, responses
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.openai.requests import (
    ENVELOPE_TYPE,
    INTERNAL_KEY_HEADER,
    ChatRequest,
    Envelope,
    ModelLimits,
    Request,
)
from radixgrove.protocol.settings import WorkerSettings, reveal
from radixgrove.protocol.text.prompts import EncodedPrompt
from radixgrove.service import asgi
from radixgrove.service.asgi import ClientDisconnected, Receive, Scope, Send
from radixgrove.service.auth import (
    PUBLIC_PATHS,
    ApiKeys,
    may_scrape,
    same_secret,
    sharing_domain,
)
from radixgrove.worker.frontend.answers import Answer, token_list
from radixgrove.worker.frontend.engine_client import EngineClient
from radixgrove.worker.frontend.generation import RequestInFlight, Signal
from radixgrove.worker.frontend.metrics import CONTENT_TYPE, Exposition
from radixgrove.worker.frontend.model import ServedModel
from radixgrove.worker.frontend.sequence import Sequence

_log = logging.getLogger(__name__)

PING_SECONDS = 15.0  # proxies commonly cut streams that are silent for a minute
STALL_SECONDS = 120.0  # a client that reads nothing for so long loses its request
HOUSEKEEPING_SECONDS = 1.0
DEFAULT_MAX_RUNNING = 256
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_PRINCIPAL = "principal"
_INTERNAL = "internal"
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)


class Frontend:
    """One process's application. `app` is the ASGI callable; `housekeeping` must run beside it."""

    def __init__(
        self, settings: WorkerSettings, model: ServedModel, engine: EngineClient, keys: ApiKeys
    ) -> None:
        self.settings = settings
        self.model = model
        self.engine = engine
        self.draining = False
        self._keys = keys
        self._internal_key = reveal(settings.internal_key)
        self._management_key = reveal(settings.management_key)
        self._flights: set[RequestInFlight] = set()
        self._in_flight = 0  # from the first byte of a completion request to its last
        # What the engine could hold at all: more requests need not be read.
        self._max_in_flight = settings.max_queued + (settings.max_running or DEFAULT_MAX_RUNNING)
        self._exposition = Exposition()
        self._metrics = self._exposition.metrics
        engine.on_gone = lambda: self.signal_all(Signal.ENGINE_GONE)
        router = Router(
            [
                Route("/livez", _Endpoint(self.livez), methods=["GET"]),
                Route("/readyz", _Endpoint(self.readyz), methods=["GET"]),
                Route("/metrics", _Endpoint(self.show_metrics), methods=["GET"]),
                Route("/v1/models", _Endpoint(self.list_models), methods=["GET"]),
                Route("/v1/models/{model_id:path}", _Endpoint(self.get_model), methods=["GET"]),
                Route("/v1/chat/completions", _Endpoint(self.chat), methods=["POST"]),
                Route("/v1/completions", _Endpoint(self.completions), methods=["POST"]),
                Route(
                    "/internal/tokenizer/{digest}/{file}",
                    _Endpoint(self.tokenizer_file),
                    methods=["GET"],
                ),
            ],
            redirect_slashes=False,
        )
        self.app = asgi.build(self._authenticated(router), max_body_bytes=settings.max_body_bytes)

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
            self.engine.check_stuck(time.time())
            for flight in list(self._flights):
                if flight.sending_since is not None:
                    if now - flight.sending_since > STALL_SECONDS:
                        flight.abandon()
                elif flight.generation.stream and now - flight.last_event > PING_SECONDS:
                    flight.signal(Signal.PING)
            self._metrics.flush()

    # ---- authentication ----------------------------------------------------------------------

    def _authenticated(self, app: asgi.App) -> asgi.App:
        """Deny by default: every path but the public ones needs an API key or the internal key."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope["path"] if scope["type"] == "http" else None
            if path is not None and path not in PUBLIC_PATHS:
                state = asgi.state(scope)
                given = asgi.header(scope, INTERNAL_KEY_HEADER)
                state[_INTERNAL] = same_secret(given, self._internal_key)
                authorization = asgi.header(scope, "authorization")
                scrapes = may_scrape(path, authorization, self._management_key)
                if not state[_INTERNAL] and not scrapes:
                    state[_PRINCIPAL] = self._keys.authenticate(authorization)
            await app(scope, receive, send)

        return guarded

    @property
    def _limits(self) -> ModelLimits:
        """The model's, until the engine has said how long its KV pool lets a request be."""
        limits, info = self.model.limits, self.engine.info
        if info is None:
            return limits
        return msgspec.structs.replace(limits, max_model_len=info.max_model_len)

    # ---- small routes ------------------------------------------------------------------------

    async def livez(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.respond(send, 200, b'{"status":"ok"}')

    async def readyz(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_ready()
        await asgi.respond(send, 200, b'{"status":"ok"}')

    def _check_ready(self) -> None:
        if self.draining:
            raise errors.overloaded("The server is shutting down.", retry_after=5)
        if self.engine.gone:
            raise errors.overloaded("The engine has stopped.", retry_after=5)
        stats = self.engine.liveness.stats
        if not self.engine.liveness.ready(time.time()):
            text = "The model is still loading." if stats is None else "The engine is not ready."
            raise errors.overloaded(text, retry_after=5)

    async def show_metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await asgi.respond(send, 200, self._exposition.render(), CONTENT_TYPE)

    async def list_models(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = msgspec.json.encode(responses.ModelList(self.model.objects(self._limits)))
        await asgi.respond(send, 200, body)

    async def get_model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["model_id"]
        for entry in self.model.objects(self._limits):
            if entry.id == name:
                await asgi.respond(send, 200, msgspec.json.encode(entry))
                return
        raise errors.model_not_found(name)

    async def tokenizer_file(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A tokenizer file, for routers only, and only of the very tokenizer they ask for."""
        if not asgi.state(scope)[_INTERNAL]:
            raise errors.unauthorized(given=False)
        parameters = scope["path_params"]
        content = self.model.files.contents.get(parameters["file"])
        if parameters["digest"] != self.model.files.digest or content is None:
            raise errors.not_found(scope["method"], scope["path"])
        await asgi.respond(send, 200, content, "application/octet-stream")

    # ---- completions -------------------------------------------------------------------------

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._observed("chat", scope, receive, send)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._observed("completions", scope, receive, send)

    async def _observed(self, endpoint: str, scope: Scope, receive: Receive, send: Send) -> None:
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
            self._metrics.requests.labels(endpoint, outcome).inc()
            self._metrics.duration.labels(endpoint).observe(time.monotonic() - arrived)

    async def _complete(
        self, endpoint: str, scope: Scope, receive: Receive, send: Send, arrived: float
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
        prompts = await self._encode(request, envelope)
        await self._generate(
            _Accepted(request, prompts, principal, arrived, self._unique_id(envelope)),
            scope,
            receive,
            send,
        )

    def _principal(self, scope: Scope) -> str:
        """A plain request's principal; the internal key alone stands for nobody."""
        principal: str | None = asgi.state(scope).get(_PRINCIPAL)
        if principal is not None:
            return principal
        return self._keys.authenticate(asgi.header(scope, "authorization"))

    def _open_envelope(self, scope: Scope, body: bytes) -> Envelope:
        if not asgi.state(scope)[_INTERNAL]:
            raise errors.unauthorized(given=True)
        try:
            return _envelope_decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise errors.invalid("The envelope is malformed.") from None

    def _unique_id(self, envelope: Envelope | None) -> str:
        """Base of the engine's ids of a request; a router's own id where nobody uses it yet."""
        if envelope is not None:
            given = envelope.request_id
            if _ENGINE_ID.match(given) and not self.engine.knows(f"{given}:0"):
                return given
        return uuid4().hex

    def _parse(self, endpoint: str, body: bytes) -> Request:
        limits = self._limits
        request: Request
        if endpoint == "chat":
            request = requests.parse_chat(body, limits)
        else:
            request = requests.parse_completion(body, limits)
        if request.model not in self.model.names:
            raise errors.model_not_found(request.model)
        return request

    async def _encode(self, request: Request, envelope: Envelope | None) -> list[EncodedPrompt]:
        """Token ids of the prompts: the router's where they were made by this very tokenizer."""
        expected = 1 if isinstance(request, ChatRequest) else len(request.prompts)
        if (
            envelope is not None
            and envelope.tokenizer_digest == self.model.files.digest
            and len(envelope.prompts) == expected
            and all(self._valid_ids(prompt) for prompt in envelope.prompts)
        ):
            return [EncodedPrompt(prompt, b"") for prompt in envelope.prompts]
        return await self.model.encoder.encode(request)

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
        max_tokens = [
            max(1, generation.max_tokens_for(len(prompt), limits)) for prompt in accepted.prompts
        ]
        asgi.state(scope)[asgi.FIELDS].update(
            model=request.model,
            prompt_tokens=sum(len(prompt) for prompt in accepted.prompts),
            stream=generation.stream,
        )
        answer = Answer(request, accepted.prompts, self.model)
        if answer.silent and generation.sampling.logprobs is None:
            await _send_without_engine(answer, send)
            return
        flight = RequestInFlight(
            self.engine,
            self._metrics,
            generation,
            self._sequences(accepted, answer),
            accepted.prompts,
            accepted.arrived,
        )
        if self.settings.log_prompts:
            flight.texts = [[] for _ in flight.sequences]
        watcher = asyncio.create_task(_watch(receive, flight))
        self._flights.add(flight)
        try:
            with flight:
                flight.submit(
                    sharing_domain(
                        self.settings.sharing, accepted.principal, generation.cache_salt
                    ),
                    max_tokens,
                    self.model.eos_ids,
                    self.settings.queue_timeout,
                )
                if generation.stream:
                    await self._stream(answer, flight, send)
                else:
                    await asgi.respond(send, 200, await answer.collect(flight))
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
                )
            )
        return sequences

    async def _stream(self, answer: Answer, flight: RequestInFlight, send: Send) -> None:
        """Send the events; the status waits for the engine's first word, which may be a refusal.

        Raises:
            _StreamFailed: the failure has been reported inside the stream.
        """
        started = False
        try:
            async with contextlib.aclosing(answer.stream(flight)) as events:
                async for chunk in events:
                    if not started:
                        started = True
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM}
                        )
                    flight.sending_since = time.monotonic()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    flight.sending_since = None
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


class _Endpoint:
    """An ASGI callable that Starlette routes to as it is, without a request object around it."""

    def __init__(self, handler: asgi.App) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope, receive, send)


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A request that has been read, checked and encoded."""

    request: Request
    prompts: list[EncodedPrompt]
    principal: str
    arrived: float  # time.monotonic()
    request_id: str  # base of the engine's ids


class _StreamFailed(Exception):
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


async def _send_without_engine(answer: Answer, send: Send) -> None:
    if not answer.generation.stream:
        await asgi.respond(send, 200, answer.without_engine())
        return
    await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
    await send({"type": "http.response.body", "body": answer.stream_without_engine()})

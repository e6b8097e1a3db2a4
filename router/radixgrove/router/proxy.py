"""The way of a request through the router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixgrove.protocol.endpoints import Endpoint
from radixgrove.protocol.envelope import ENVELOPE_TYPE, INTERNAL_KEY_HEADER, Envelope
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.decoding import peek_model, with_model
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router import metrics
from radixgrove.router.encoding import Encoded, Encoders
from radixgrove.router.event_stream import EventStream
from radixgrove.router.fleet import Fleet
from radixgrove.router.placement import Placement, Placer, count
from radixgrove.router.recovery import STREAM_BROKE, AttemptFailed, Course, ReplicaAnswer
from radixgrove.router.replicas import Replica, Service
from radixgrove.router.upstream import Attempt, StreamBroke, Upstream
from radixgrove.service.asgi import (
    FIELDS,
    READER_LAGS,
    RELEASE_BODY,
    REQUEST_ID,
    TRACE,
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    WhileConnected,
    header,
    read_body,
    require_content_type,
    split,
    state,
)
from radixgrove.service.guard import PRINCIPAL
from radixgrove.service.tracing import REQUEST_ID_HEADER, TRACEPARENT_HEADER

HOLD_STEP = 0.25  # leases and breakers end by time, which no event announces
# Not passed on: of one hop only, made anew here, or ours alone.
_NOT_FORWARDED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"host",
        b"content-length",
        b"content-type",
        b"expect",
        b"accept-encoding",
        b"x-request-id",
        b"traceparent",
        INTERNAL_KEY_HEADER.encode(),
    }
)


@dataclass(slots=True)
class _Exchange:
    """One client request while the router works on it."""

    endpoint: Endpoint[Any]
    scope: Scope
    send: Send
    body: bytes
    principal: str
    service: Service
    arrived: float  # perf_counter
    course: Course
    reader_lags: Callable[[], bool]
    encoded: Encoded = field(init=False)
    placing: bool = False  # in the middle of a booking
    gone: bool = False  # the client went away
    started: bool = False  # the client has the head of a stream, and perhaps comments
    over: bool = False  # all was said: a disconnect means nothing any more

    def leave(self) -> bool:
        """The client went away; returns whether the work on it may be cancelled."""
        if self.over:
            return False
        self.gone = True
        return not self.placing  # a placement's outcome must be known to be released

    def forget_body(self) -> None:
        """The answer has begun: no other replica will be asked."""
        self.body = b""
        state(self.scope)[RELEASE_BODY]()


class Proxy:
    """Encodes, places, forwards and relays."""

    def __init__(
        self,
        settings: RouterSettings,
        fleet: Fleet,
        encoders: Encoders,
        placer: Placer,
        upstream: Upstream,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._encoders = encoders
        self._placer = placer
        self._upstream = upstream
        self.in_flight = 0
        self.draining = False  # what still comes is answered, by connections that then close

    async def handle(
        self, endpoint: Endpoint[Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answers a POST to the endpoint after its authentication.

        Raises:
            ApiError: before anything was sent.
        """
        if self.in_flight >= self._settings.max_queued:
            raise errors.rate_limited(1.0)
        self.in_flight += 1
        metrics.IN_FLIGHT.inc()
        model, status = "unknown", 499
        try:
            require_content_type(scope, "application/json")
            exchange = await self._receive(endpoint, scope, receive, send)
            model = exchange.service.model
            with WhileConnected(scope, exchange.leave):
                await self._encode(exchange)
                status = await self._serve(exchange)
        except ApiError as error:
            status = error.status
            raise
        except ClientDisconnected:
            pass
        finally:
            self.in_flight -= 1
            metrics.IN_FLIGHT.dec()
            metrics.series(metrics.REQUESTS, model, status).inc()

    async def _receive(
        self, endpoint: Endpoint[Any], scope: Scope, receive: Receive, send: Send
    ) -> _Exchange:
        arrived, settings = time.perf_counter(), self._settings
        body = await read_body(receive)
        # With one service its limits are known before the model's name is: one look less.
        service = self._fleet.only_service()
        if service is None or not service.replicas:  # no waiting for an unknown one's
            service = self._fleet.resolve(peek_model(body))
        now = time.monotonic()
        course = Course(
            retries=settings.retries,
            hold_until=now + settings.queue_timeout,
            answer_by=now + settings.first_byte_timeout,
        )
        context = state(scope)
        return _Exchange(
            endpoint=endpoint,
            scope=scope,
            send=send,
            body=body,
            principal=context[PRINCIPAL],
            service=service,
            arrived=arrived,
            course=course,
            reader_lags=context[READER_LAGS],
        )

    async def _encode(self, exchange: _Exchange) -> None:
        """Encodes once the service is known well enough: one that is only just waking is not."""
        service, body = exchange.service, exchange.body
        while not service.replicas:
            if not await self._hold(exchange):
                raise errors.overloaded("No server can take this request now.", 2.0)
        try:
            exchange.encoded = await self._encoders.encode(
                exchange.endpoint, service, body, exchange.principal
            )
        except ApiError:  # by the limits of a model that the client may not have meant
            named = peek_model(body)
            if not service.answers_to(named):
                raise errors.model_not_found(named) from None
            raise
        if not service.answers_to(exchange.encoded.model):
            raise errors.model_not_found(peek_model(body))

    # ---- placing ---------------------------------------------------------------------------

    async def _serve(self, exchange: _Exchange) -> int:
        """Places and forwards, again and again until a replica answers, or the course is over.

        Raises:
            ApiError: no replica could answer.
        """
        course = exchange.course
        while (decision := await self._place(exchange)) is not None:
            if course.failure is not None:
                metrics.RETRIES.labels(course.failure.reason).inc()
            began = time.monotonic()
            try:
                return await self._attempt(exchange, decision)
            except AttemptFailed as error:
                replica, now = decision.replica, time.monotonic()
                self._fleet.failed(replica, error.failure)
                others = decision.service.others_of_group(replica)
                if not course.failed(replica, error, began, now, others):
                    break
            finally:
                self._placer.release(decision)
        answer = course.answer or errors.overloaded("No server can take this request now.", 2.0)
        if exchange.started:
            await self._end_stream(exchange, answer)
            return 502
        if isinstance(answer, ApiError):
            raise answer
        exchange.over = True
        await self._start(exchange, answer.status, answer.headers)
        await self._pass_on_whole(exchange, answer.body)
        return answer.status

    async def _place(self, exchange: _Exchange) -> Placement | None:
        """A booked replica; holds the request while there is none, as long as that may help."""
        ask, course = exchange.encoded.ask, exchange.course
        started = time.perf_counter()
        if course.starved and not await self._hold(exchange):
            return None
        while True:
            for passed_by in course.passed_by():
                decision = await self._book(exchange, passed_by)
                if decision is not None:
                    seconds = time.perf_counter() - started
                    asyncio.get_running_loop().call_soon(count, decision, ask, seconds)
                    return decision
            if not course.may_wait or not await self._hold(exchange):
                return None

    async def _book(self, exchange: _Exchange, passed_by: list[Replica]) -> Placement | None:
        exchange.placing = True
        decision = await self._placer.place(exchange.service, exchange.encoded.ask, passed_by)
        exchange.placing = False
        if exchange.gone:
            if decision is not None:
                self._placer.release(decision)
            raise ClientDisconnected
        return decision

    async def _hold(self, exchange: _Exchange) -> bool:
        """Waits a little for replicas to change. False when that is of no use, or no longer."""
        service = exchange.service
        if service.off:
            return False
        service.last_held = time.monotonic()
        left = exchange.course.deadline - service.last_held
        if left <= 0:
            return False
        held = metrics.HELD.labels(service.model)  # kept: the model may be forgotten meanwhile
        service.held += 1
        held.inc()
        try:
            await self._fleet.wait_for_change(min(left, HOLD_STEP))
        finally:
            service.held -= 1
            held.dec()
        return True

    # ---- forwarding ------------------------------------------------------------------------

    async def _attempt(self, exchange: _Exchange, decision: Placement) -> int:
        """Sends the request to the decided replica and relays its answer byte for byte.

        Raises:
            AttemptFailed: nothing reached the client.
        """
        replica = decision.replica
        replica.breaker.take()
        path, seconds = exchange.endpoint.path, exchange.course.answer_by - time.monotonic()

        async def comment(answer: ReplicaAnswer) -> None:
            await self._start(exchange, answer.status, answer.headers, decision)
            await self._pass_on(exchange, answer.body)

        attempt = await self._upstream.send(
            replica, path, *self._request(exchange, decision), seconds, comment
        )
        try:
            exchange.forget_body()
            replica.breaker.answering()
            answer = attempt.answer
            model = decision.service.model
            seconds = time.perf_counter() - exchange.arrived
            first_byte = metrics.series(metrics.FIRST_BYTE_SECONDS, model)
            metrics.soon(first_byte.observe, seconds)
            state(exchange.scope)[FIELDS].update(
                replica=replica.id,
                matched_tokens=decision.matched_tokens,
                host_tokens=decision.host_tokens,
                expected_ms=round(decision.time_ms, 1),
            )
            if exchange.started and not attempt.streams:
                await self._end_stream(exchange, answer)
                return answer.status
            await self._start(exchange, answer.status, answer.headers, decision)
            if attempt.streams:
                if not await self._relay(exchange, attempt):
                    self._fleet.failed(replica, STREAM_BROKE)
                    return 502
            else:
                exchange.over = True
                await self._pass_on_whole(exchange, answer.body)
            replica.breaker.succeeded()
            if attempt.cached_tokens is not None:
                metrics.series(metrics.REPORTED_TOKENS, model).inc(attempt.cached_tokens)
            return answer.status
        finally:
            attempt.close()

    async def _start(
        self,
        exchange: _Exchange,
        status: int,
        headers: list[tuple[bytes, bytes]],
        decision: Placement | None = None,
    ) -> None:
        if exchange.started:
            return
        exchange.started = True
        if (
            decision is not None
            and self._settings.reveal_replica
            and header(exchange.scope, "x-radixgrove-debug") == "1"
        ):
            headers = [
                *headers,
                (b"x-radixgrove-replica", decision.replica.id.encode("latin-1", "replace")),
                (b"x-radixgrove-matched-tokens", str(decision.matched_tokens).encode()),
            ]
        await exchange.send({"type": "http.response.start", "status": status, "headers": headers})

    async def _relay(self, exchange: _Exchange, attempt: Attempt) -> bool:
        """Passes a stream on. False when it broke: the client got an error event and no end."""
        events, chunk = EventStream(), attempt.answer.body
        try:
            while chunk and not events.over:
                if part := events.pass_on(chunk):
                    await self._pass_on(exchange, part)
                if not events.over:
                    chunk = await attempt.next()
            rest = events.ended()
        except StreamBroke:
            rest = b""
        if events.done:
            exchange.over = True
            await exchange.send({"type": "http.response.body", "body": rest})
            await attempt.read_end()
            return True
        if rest := rest or events.broken(_stream_error().event()):
            await self._pass_on(exchange, rest)
        return False

    async def _pass_on_whole(self, exchange: _Exchange, body: bytes) -> None:
        """Returns when the client has read all but the end. Raises as `_pass_on`."""
        for part, more in split(body):
            await self._pass_on(exchange, part, more)

    async def _pass_on(self, exchange: _Exchange, part: bytes, more: bool = True) -> None:
        """A part of an answer.

        Raises:
            ClientDisconnected: the client does not read.
        """
        message = {"type": "http.response.body", "body": part, "more_body": more}
        if not exchange.reader_lags():  # it is written at once: a timer would cost more than that
            await exchange.send(message)
            return
        try:
            async with asyncio.timeout(self._settings.idle_timeout):
                await exchange.send(message)
        except TimeoutError:
            raise ClientDisconnected from None

    async def _end_stream(self, exchange: _Exchange, answer: ApiError | ReplicaAnswer) -> None:
        """Reports a failure to a client that has the head of a stream, and no event."""
        error = answer if isinstance(answer, ApiError) else _stream_error()
        await self._pass_on(exchange, error.event())

    def _request(
        self, exchange: _Exchange, decision: Placement
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Headers and body for a replica: ours speak envelopes, others get what the client sent."""
        encoded, context = exchange.encoded, state(exchange.scope)
        fields = [field for field in exchange.scope["headers"] if field[0] not in _NOT_FORWARDED]
        fields += (
            (REQUEST_ID_HEADER.encode(), context[REQUEST_ID].encode()),
            (TRACEPARENT_HEADER.encode(), context[TRACE].header().encode()),
        )
        registration, body = decision.replica.registration, exchange.body
        if registration is not None and encoded.model not in registration.models:
            body = with_model(body, registration.models[0])
        if registration is None or not decision.replica.keys.internal_key:
            fields.append((b"content-type", b"application/json"))
            return fields, body
        # The principal stands for the key.
        fields = [field for field in fields if field[0] != b"authorization"]
        fields += (
            (b"content-type", ENVELOPE_TYPE.encode()),
            (INTERNAL_KEY_HEADER.encode(), decision.replica.keys.internal_key.encode()),
        )
        envelope = Envelope(
            body=body,
            prompts=encoded.prompts or [],  # without them it tokenizes
            principal=exchange.principal,
            request_id=decision.reservation,
            tokenizer_digest=encoded.digest,
            matched_tokens=decision.matched_tokens,
            dp_rank=registration.dp_rank,
        )
        return fields, msgspec.msgpack.encode(envelope)


def _stream_error() -> ApiError:
    return ApiError(
        502,
        "The server that ran this request failed while answering.",
        type="server_error",
        code="stream_interrupted",
    )

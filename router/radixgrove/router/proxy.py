"""The way of a request through the router."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from radixgrove.protocol.endpoints import Endpoint
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.openai.requests import (
    ENVELOPE_TYPE,
    INTERNAL_KEY_HEADER,
    Envelope,
    peek_model,
)
from radixgrove.protocol.settings import RouterSettings, reveal
from radixgrove.router import metrics
from radixgrove.router.encoding import Encoded, Encoders
from radixgrove.router.fleet import Fleet
from radixgrove.router.placement import Placement, Placer, count
from radixgrove.router.replicas import Replica, Service
from radixgrove.router.upstream import Attempt, AttemptFailed, StreamBroke, Upstream
from radixgrove.service.asgi import (
    FIELDS,
    ON_DISCONNECT,
    REQUEST_ID,
    TRACE,
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    header,
    read_body,
    require_content_type,
    state,
)
from radixgrove.service.guard import PRINCIPAL
from radixgrove.service.tracing import REQUEST_ID_HEADER, TRACEPARENT_HEADER

HOLD_STEP = 0.25  # leases and breakers end by time, which no event announces
MAX_LINE_BYTES = 1 << 20  # of a stream held back until its end comes
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
    encoded: Encoded = field(init=False)
    placing: bool = False  # in the middle of a booking
    gone: bool = False  # the client went away
    over: bool = False  # all was said: a disconnect means nothing any more


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
        self._internal_key = (reveal(settings.internal_key) or "").encode()
        self.in_flight = 0
        self.draining = False  # what still comes is answered, by connections that then close

    async def handle(
        self, endpoint: Endpoint[Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answers a POST to the endpoint after its authentication.

        Raises:
            ApiError: before anything was sent.
        """
        arrived = time.perf_counter()
        principal = state(scope)[PRINCIPAL]
        if self.in_flight >= self._settings.max_queued:
            raise errors.rate_limited(1.0)
        self.in_flight += 1
        metrics.IN_FLIGHT.inc()
        model, status = "unknown", 499
        try:
            require_content_type(scope, "application/json")
            body = await read_body(receive)
            # With one service its limits are known before the model's name is: one look less.
            service = self._fleet.only_service()
            if service is None or not service.replicas:  # no waiting for an unknown one's
                service = self._fleet.resolve(peek_model(body))
            model = service.model
            exchange = _Exchange(endpoint, scope, send, body, principal, service, arrived)
            status = await self._until_disconnect(exchange)
        except ApiError as error:
            status = error.status
            raise
        except ClientDisconnected:
            pass
        finally:
            self.in_flight -= 1
            metrics.IN_FLIGHT.dec()
            metrics.REQUESTS.labels(model, status).inc()

    async def _until_disconnect(self, exchange: _Exchange) -> int:
        """Runs the exchange and returns the client's status; ends it when the client goes away.

        Raises:
            ClientDisconnected: it did.
        """
        work = asyncio.current_task()
        assert work is not None

        def leave() -> None:
            if not exchange.over:
                exchange.gone = True
                if not exchange.placing:  # a placement's outcome must be known to be released
                    work.cancel()

        watch = state(exchange.scope)[ON_DISCONNECT]
        watch(leave)
        try:
            await self._encode(exchange)
            return await self._serve(exchange)
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
            work.uncancel()
            raise ClientDisconnected from None
        finally:
            watch(None)

    async def _encode(self, exchange: _Exchange) -> None:
        """Encodes once the service is known well enough: one that is only just waking is not."""
        service, body = exchange.service, exchange.body
        deadline = time.monotonic() + self._settings.queue_timeout
        while not service.replicas:
            if not await self._hold(service, deadline):
                raise errors.overloaded("No server can take this request now.", 2.0)
        exchange.encoded = await self._encoders.encode(
            exchange.endpoint, service, body, exchange.principal
        )
        if exchange.encoded.model not in service.models:
            raise errors.model_not_found(peek_model(body))

    # ---- placing ---------------------------------------------------------------------------

    async def _serve(self, exchange: _Exchange) -> int:
        """Places and forwards, on another replica when one fails before the first byte.

        Raises:
            ApiError: no replica could answer.
        """
        failed: list[Replica] = []
        failure: AttemptFailed | None = None
        for _ in range(self._settings.retries + 1):
            decision = await self._place(exchange, failed)
            if decision is None:
                break
            if failure is not None:
                metrics.RETRIES.labels(failure.reason).inc()
            try:
                return await self._attempt(exchange, decision)
            except AttemptFailed as error:
                failure = error
                failed.append(decision.replica)
                if error.blame:
                    self._blame(decision.replica, error.reason)
                if not error.retry:
                    break
            finally:
                self._placer.release(decision)
        if failure is None:
            raise errors.overloaded("No server can take this request now.", 2.0)
        if isinstance(failure.answer, ApiError):
            raise failure.answer
        exchange.over = True
        answer = failure.answer
        await self._start(exchange, answer.status, answer.headers)
        await exchange.send({"type": "http.response.body", "body": answer.body})
        return answer.status

    async def _place(self, exchange: _Exchange, failed: list[Replica]) -> Placement | None:
        """A booked replica; holds the request while there is none, unless others failed already."""
        service, ask = exchange.service, exchange.encoded.ask
        started = time.perf_counter()
        deadline = time.monotonic() + self._settings.queue_timeout
        while True:
            exchange.placing = True
            decision = await self._placer.place(service, ask, failed)
            exchange.placing = False
            if exchange.gone:
                if decision is not None:
                    self._placer.release(decision)
                raise ClientDisconnected
            if decision is not None:
                metrics.soon(metrics.PLACEMENT_SECONDS.observe, time.perf_counter() - started)
                asyncio.get_running_loop().call_soon(count, decision, ask)
                return decision
            if failed or not await self._hold(service, deadline):
                return None

    async def _hold(self, service: Service, deadline: float) -> bool:
        """Waits a little for replicas to change. False when that is of no use, or no longer."""
        if service.off:
            return False
        service.last_held = time.monotonic()
        left = deadline - service.last_held
        if left <= 0:
            return False
        service.held += 1
        metrics.HELD.labels(service.model).inc()
        try:
            await self._fleet.wait_for_change(min(left, HOLD_STEP))
        finally:
            service.held -= 1
            metrics.HELD.labels(service.model).dec()
        return True

    @staticmethod
    def _blame(replica: Replica, reason: str) -> None:
        replica.breaker.failed()
        metrics.FAILURES.labels(replica.id, reason).inc()

    # ---- forwarding ------------------------------------------------------------------------

    async def _attempt(self, exchange: _Exchange, decision: Placement) -> int:
        """Sends the request to the decided replica and relays its answer byte for byte.

        Raises:
            AttemptFailed: nothing reached the client.
        """
        replica = decision.replica
        replica.breaker.take()
        fields, body = self._request(exchange, decision)
        attempt = await self._upstream.send(replica.url, exchange.endpoint.path, fields, body)
        try:
            replica.breaker.succeeded()
            answer = attempt.answer
            model = decision.service.model
            seconds = time.perf_counter() - exchange.arrived
            metrics.soon(metrics.FIRST_BYTE_SECONDS.labels(model).observe, seconds)
            state(exchange.scope)[FIELDS].update(
                replica=replica.id, matched_tokens=decision.matched_tokens
            )
            await self._start(exchange, answer.status, answer.headers, decision)
            if attempt.streams:
                whole = await self._relay(exchange, attempt)
                if not whole:
                    self._blame(replica, "stream_broke")
                    return 502
            else:
                exchange.over = True
                await exchange.send({"type": "http.response.body", "body": answer.body})
            if attempt.cached_tokens is not None:
                metrics.REPORTED_TOKENS.labels(model).inc(attempt.cached_tokens)
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
        send = exchange.send
        chunk, line, part = attempt.answer.body, b"", b""
        try:
            while chunk:
                # Whole lines only: a stream that breaks must not leave half an event behind.
                cut = chunk.rfind(b"\n") + 1
                if len(line) > MAX_LINE_BYTES:
                    cut = len(chunk)
                if cut:
                    part, line = line + chunk[:cut], chunk[cut:]
                    async with asyncio.timeout(self._settings.idle_timeout):
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                else:
                    line += chunk
                chunk = await attempt.next()
        except TimeoutError:  # the client does not read
            raise ClientDisconnected from None
        except StreamBroke:
            if not attempt.failed_inside:
                event = _stream_error().event()
                if not part.endswith(b"\n\n"):
                    event = b"\n" + event  # ends the event that was under way
                await send({"type": "http.response.body", "body": event, "more_body": True})
            return False
        exchange.over = True
        await send({"type": "http.response.body", "body": line})
        return True

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
        if encoded.prompts is None or decision.replica.registration is None:
            fields.append((b"content-type", b"application/json"))
            return fields, exchange.body
        # The principal stands for the key.
        fields = [field for field in fields if field[0] != b"authorization"]
        fields += (
            (b"content-type", ENVELOPE_TYPE.encode()),
            (INTERNAL_KEY_HEADER.encode(), self._internal_key),
        )
        envelope = Envelope(
            body=exchange.body,
            prompts=encoded.prompts,
            principal=exchange.principal,
            request_id=decision.reservation,
            tokenizer_digest=encoded.digest,
            matched_tokens=decision.matched_tokens,
        )
        return fields, msgspec.msgpack.encode(envelope)


def _stream_error() -> ApiError:
    return ApiError(
        502,
        "The server that ran this request failed while answering.",
        type="server_error",
        code="stream_interrupted",
    )

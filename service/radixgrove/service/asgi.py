"""ASGI middleware that router, worker and operator share.

From the outside in, `build` stacks them so that every answer, the framework's own ones included,
has a request id, OpenAI's error shape and one access log line.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from radixgrove.protocol.errors import PeerError
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.service.logs import ACCESS_LOGGER
from radixgrove.service.tracing import (
    REQUEST_ID_HEADER,
    TRACEPARENT_HEADER,
    TraceContext,
    request_id,
    trace_context,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger(__name__)
_access = logging.getLogger(ACCESS_LOGGER)

# Keys of `scope["state"]`.
REQUEST_ID = "request_id"
TRACE = "trace"  # a tracing.TraceContext
FIELDS = "log_fields"  # a dict; what a handler adds appears in the access log line
ON_DISCONNECT = "on_disconnect"  # see service/http.py
READER_LAGS = "reader_lags"  # says whether what is sent now has to wait for the client to read
RELEASE_BODY = "release_body"  # to be called once the request's body is needed no more
ANSWERED = "answered"  # true: the framework answered a failure, which it raises nevertheless

PART_BYTES = 256 << 10  # of a body that are written before its reader has to keep up

EXPOSED_HEADERS = (REQUEST_ID_HEADER, "retry-after", "x-should-retry")  # to scripts of web pages
QUIET_PATHS = frozenset({"/livez", "/health", "/readyz", "/metrics"})


class ClientDisconnected(PeerError):
    """The client closed the connection before its request was complete."""


def header(scope: Scope, name: str) -> str | None:
    """The first header of that (lower-case) name, decoded as Latin-1 like all ASGI headers."""
    wanted = name.encode("latin-1")
    for key, value in scope["headers"]:
        if key == wanted:
            return bytes(value).decode("latin-1")
    return None


def state(scope: Scope) -> dict[str, Any]:
    found: dict[str, Any] = scope.setdefault("state", {})
    return found


async def read_body(receive: Receive) -> bytes:
    """The whole request body; `BodyLimit` bounds it. A byte order mark before it, as clients on
    Windows write one, is left out.

    Raises:
        ClientDisconnected: the client went away first.
    """
    chunks: list[bytes] = []
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    return body.removeprefix(codecs.BOM_UTF8)


class WhileConnected:
    """Cancels the block when the client goes away, and raises ClientDisconnected instead.

    `leave()` is called when it does; the block is not cancelled where that returns False.
    """

    def __init__(self, scope: Scope, leave: Callable[[], bool] = lambda: True) -> None:
        self._watch: Callable[[Callable[[], None] | None], None] = state(scope)[ON_DISCONNECT]
        self._leave = leave
        self._work: asyncio.Task[Any] | None = None
        self._cancelled = False

    def __enter__(self) -> None:
        self._work = asyncio.current_task()
        self._watch(self._gone)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watch(None)
        if self._cancelled and self._work is not None:
            self._work.uncancel()
            if kind is not None and issubclass(kind, asyncio.CancelledError):
                raise ClientDisconnected from None

    def _gone(self) -> None:
        if self._leave() and self._work is not None:
            self._cancelled = True
            self._work.cancel()


def require_content_type(scope: Scope, *accepted: str) -> str:
    """The media type of the request, which must be one of `accepted`, and not compressed.

    Raises:
        ApiError: 415.
    """
    encoding = header(scope, "content-encoding")
    if encoding and encoding.strip().lower() != "identity":
        raise errors.compressed(encoding)
    media_type = (header(scope, "content-type") or "").partition(";")[0].strip().lower()
    if media_type not in accepted:
        raise errors.unsupported_media_type(accepted[0])
    return media_type


def split(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """A body in parts, and whether more follow.

    A connection takes the next part once its client has read: a large body that is written at once
    would lie in the connection, which neither counts it nor gives the client up.
    """
    for start in range(0, max(1, len(body)), PART_BYTES):
        yield body[start : start + PART_BYTES], start + PART_BYTES < len(body)


async def respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: str = "application/json",
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    """Send a complete response; returns when the client has read all but the end of it."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type.encode()),
                (b"content-length", str(len(body)).encode()),
                *(headers or []),
            ],
        }
    )
    for part, more in split(body):
        await send({"type": "http.response.body", "body": part, "more_body": more})


async def respond_error(send: Send, error: ApiError) -> None:
    extra = [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()
    ]
    await respond(send, error.status, error.body(), headers=extra)


class RequestContext:
    """Gives every request an id and a span, returns the id, and writes the access log line."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        context = state(scope)
        # There already when the request was refused before it got here.
        identity = context.get(REQUEST_ID) or request_id(header(scope, REQUEST_ID_HEADER))
        trace = trace_context(header(scope, TRACEPARENT_HEADER))
        fields: dict[str, Any] = context.setdefault(FIELDS, {})
        context.update({REQUEST_ID: identity, TRACE: trace})
        id_header = (REQUEST_ID_HEADER.encode(), identity.encode())
        status = 0
        ended = False

        async def observed(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                given = [item for item in message.get("headers", ()) if item[0] != id_header[0]]
                message = {**message, "headers": [*given, id_header]}
            elif not message.get("more_body", False):
                ended = True
            await send(message)

        try:
            await self.app(scope, receive, observed)
        finally:
            seconds = time.perf_counter() - started
            log_access(scope, status or None, ended, seconds, identity, trace, fields)


def log_access(
    scope: Scope,
    status: int | None,
    complete: bool,
    seconds: float,
    identity: str,
    trace: TraceContext,
    fields: dict[str, Any],
) -> None:
    """One line of the access log; a scope that is no whole request has no method or path."""
    path = scope.get("path", "")
    level = logging.DEBUG if path in QUIET_PATHS else logging.INFO
    if _access.isEnabledFor(level):
        line = {
            "method": scope.get("method"),
            "path": path[:200] or None,
            "status": status,
            "complete": complete,
            "seconds": round(seconds, 4),
            "request_id": identity,
            "trace_id": trace.trace_id,
            **fields,
        }
        _access.log(level, "request", extra={"fields": line})


class ErrorShape:
    """Turns exceptions, and a framework's own 404 and 405, into OpenAI's error body.

    Handlers raise `ApiError`. A framework answers unknown routes and wrong methods by itself, in
    text or as `{"detail": …}`: such a body is replaced; one relayed from a replica is not. Once a
    response began nothing can be shaped any more: the handler that streams reports its failure in
    the stream.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False
        held: Message | None = None  # start of a 404 or 405 until its body is known
        replaced = False

        async def shaped(message: Message) -> None:
            nonlocal started, held, replaced
            started = True
            if message["type"] == "http.response.start" and message["status"] in (404, 405):
                held = message
                return
            if held is not None:
                start, held = held, None
                replaced = _is_frameworks_own(start, message.get("body", b""))
                if replaced:
                    await respond_error(send, _framework_error(scope, start))
                else:
                    await send(start)
            if not replaced:
                await send(message)

        try:
            await self.app(scope, receive, shaped)
        except ClientDisconnected:
            state(scope).setdefault(FIELDS, {})["disconnected"] = True
        except ApiError as error:
            if started:
                raise
            await respond_error(send, error)
        except Exception:
            _log.exception("unexpected error", extra={"fields": {"path": scope["path"][:200]}})
            if state(scope).get(ANSWERED):
                return
            if started:
                raise
            await respond_error(send, errors.internal())


def _is_frameworks_own(start: Message, body: bytes) -> bool:
    headers = _headers(start)
    return not headers.get("content-type", "").startswith("application/json") or body.startswith(
        b'{"detail"'
    )


def _framework_error(scope: Scope, start: Message) -> ApiError:
    if start["status"] == 404:
        return errors.not_found(scope["method"], scope["path"])
    return errors.method_not_allowed(scope["method"], _headers(start).get("allow", ""))


def _headers(start: Message) -> dict[str, str]:
    return {
        bytes(key).decode("latin-1").lower(): bytes(value).decode("latin-1")
        for key, value in start.get("headers", ())
    }


class BodyLimit:
    """Refuses bodies over `limit` bytes, declared or streamed, with 413; more than `total` bytes of
    all requests' bodies, held at once, with 429. One alone may be larger than `total`.
    """

    def __init__(self, app: App, limit: int, total: int | None = None) -> None:
        self.app = app
        self.limit = limit
        self.total = total
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = header(scope, "content-length")
        if declared is not None and declared.isdigit() and int(declared[:19]) > self.limit:
            raise errors.body_too_large(self.limit)
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            came = len(message.get("body", b""))
            size += came
            self.held += came
            if size > self.limit:
                raise errors.body_too_large(self.limit)
            if self.total is not None and size < self.held > self.total:
                raise errors.rate_limited(1.0)
            return message

        def release() -> None:
            nonlocal size
            self.held -= size
            size = 0

        state(scope)[RELEASE_BODY] = release
        try:
            await self.app(scope, counted, send)
        finally:
            release()


def build(
    app: App,
    *,
    max_body_bytes: int,
    max_bodies_bytes: int | None = None,
    cors_origins: Sequence[str] = (),
) -> App:
    """`app` with request context, error shaping and limits of bodies, one and all, around it.

    `cors_origins`: of web pages that may read the answers, refusals too; `*`: all. Keys travel in a
    header that a page sets itself: no cookies, so no credentials in the sense of CORS.
    """
    shaped: App = ErrorShape(BodyLimit(app, max_body_bytes, max_bodies_bytes))
    if cors_origins:
        shaped = CORSMiddleware(
            shaped,
            allow_origins=cors_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    return RequestContext(shaped)

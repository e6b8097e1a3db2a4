"""What every server of ours adds to uvicorn's httptools protocol.

uvicorn bounds neither the size of a request's headers nor the time that headers and body may take,
and answers malformed requests in plain text, without an id or a line in the access log. It loses
the body of a request that offers to speak another protocol (`Upgrade: h2c`, as every Java client
does), writes the head of a response apart from its body, sends chunks to clients of HTTP/1.0, which
know none, keeps a connection that it has closed for as long as the client does not read, and
reports a lost connection only to an application that waits in `receive`.

Which request and response a connection is at, only uvicorn's `cycle` and `pipeline` know: they are
read here, never written.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from radixgrove.protocol.openai.errors import ApiError, invalid
from radixgrove.service.asgi import (
    FIELDS,
    ON_DISCONNECT,
    READER_LAGS,
    REQUEST_ID,
    Scope,
    header,
    log_access,
    state,
)
from radixgrove.service.tracing import (
    REQUEST_ID_HEADER,
    TRACEPARENT_HEADER,
    request_id,
    trace_context,
)

MAX_HEADER_BYTES = 64 << 10  # request line and headers
MAX_WAITING = 128  # requests of one connection that came before the one ahead was answered
CLOSE_SECONDS = 60.0  # for a client to read the rest of what was written, once a connection ends
_CHUNKED = b"transfer-encoding: chunked\r\n"  # as uvicorn writes it
_NEW_SECONDS = 1.0  # that a connection without a request counts as one that has just been made
_FIRST_REQUEST_SECONDS = 0.5  # that it has for that once the server stops
_OFFERS = frozenset({b"upgrade", b"http2-settings"})  # headers, and tokens of `Connection`


class _Parser(httptools.HttpRequestParser):
    """Reads a request that offers another protocol as if it did not (RFC 9110, 7.8).

    llhttp ends such a request after its headers. It is then read again without the offer, and what
    came after the headers is its body.
    """

    def __init__(self, protocol: HttpProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        """
        Raises:
            httptools.HttpParserError: this is no HTTP, or a CONNECT.
        """
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT") from None
                super().feed_data(self._protocol.head_without_offer())
                data = memoryview(data)[offer.args[0] :]


class _JoinedWrites(asyncio.Transport):
    """Holds a response's head until the first of its body comes, for one write.

    When the body does not follow at once, the head leaves in the event loop's next round. A client
    of HTTP/1.0 gets a body without chunks, which the connection's end ends.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = None
        self._expects_head = False
        self._knows_chunks = True  # the client, by its HTTP version
        self._chunked = False  # uvicorn's body

    def expect_head(self, *, knows_chunks: bool) -> None:
        """The next write begins a response."""
        self._expects_head = True
        self._knows_chunks = knows_chunks

    def write(self, data: Any) -> None:
        if not self._knows_chunks:
            data = self._without_chunks(data)
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.writelines((head, data))
        elif self._expects_head:
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)
        self._expects_head = False

    def _without_chunks(self, data: bytes) -> bytes:
        """Of a head, or of one chunk with or without the last one, as uvicorn writes them."""
        if self._expects_head:
            head = data.replace(_CHUNKED, b"")
            self._chunked = len(head) < len(data)
            return head
        if not self._chunked:
            return data
        size, _, rest = data.partition(b"\r\n")
        return rest[: int(size or b"0", 16)]

    def close(self) -> None:
        """Ends the connection once its client has read what was written, or will not."""
        self._flush()
        self._transport.close()
        if self.get_write_buffer_size():
            self._loop.call_later(CLOSE_SECONDS, self._transport.abort)

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def _flush(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._transport.write(head)


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    A timer runs from the connection's start, or a request's first byte, until that request is
    complete. Between requests uvicorn's keep-alive timer takes over.

    `scope["state"][ON_DISCONNECT]` is a function that takes a callback for when the connection is
    lost, or None to forget it.
    """

    transport: _JoinedWrites

    _header_bytes: int | None = None  # since the request began; None outside of headers
    _begun = False  # a request is under way
    _ended_request = False  # within the bytes that came last
    _offers = False  # its headers offer another protocol
    _timer: asyncio.TimerHandle | None = None
    _began_at = 0.0  # the event loop's time
    _made_at = 0.0  # the connection, likewise
    _stopping = False
    _on_disconnect: Callable[[], None] | None = None

    def __init__(self, *args: Any, request_timeout: float, **more: Any) -> None:
        """`request_timeout`: seconds in which a request must arrive whole."""
        super().__init__(*args, **more)
        self._request_timeout = request_timeout
        self.parser = _Parser(self)
        # As uvicorn's own: a client may go on after a request that closes the connection.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_JoinedWrites(transport, self.loop))
        self._start_timer()
        self._began_at = self._made_at = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        if self._on_disconnect is not None:
            self._on_disconnect()

    def shutdown(self) -> None:
        """The server stops: end the connection, after the request that it has.

        One that has just been made is about to send its first: to close it would lose that without
        a word.
        """
        is_new = self.cycle is None and self.loop.time() - self._made_at < _NEW_SECONDS
        if is_new and not self._stopping:
            self._stopping = True
            self.loop.call_later(_FIRST_REQUEST_SECONDS, self.shutdown)
        else:
            super().shutdown()

    def _watch_disconnect(self, callback: Callable[[], None] | None) -> None:
        self._on_disconnect = callback
        if callback is not None and self.transport.is_closing():
            callback()

    def _reader_lags(self) -> bool:
        return self.flow.write_paused

    def data_received(self, data: bytes) -> None:
        # Empty lines between requests are no request, but end uvicorn's keep-alive timer.
        self._start_timer()
        self._ended_request = False
        super().data_received(data)
        # Counted after parsing: what is still in the headers now has been nothing else, but where
        # another request ended within the same bytes.
        if self._header_bytes is not None and not self._ended_request:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._header_bytes = None
                self._refuse(
                    ApiError(
                        431,
                        f"The request's headers are larger than {MAX_HEADER_BYTES} bytes.",
                        code="headers_too_large",
                    )
                )

    def on_message_begin(self) -> None:
        """Raises OverflowError, which ends the reading: more requests wait than one may send."""
        if len(self.pipeline) >= MAX_WAITING:
            raise OverflowError
        self._begun = True
        self._header_bytes = 0
        self._start_timer()
        self._began_at = self.loop.time()
        super().on_message_begin()
        self.scope["state"][ON_DISCONNECT] = self._watch_disconnect
        self.scope["state"][READER_LAGS] = self._reader_lags

    def on_headers_complete(self) -> None:
        self._offers = self.parser.should_upgrade()
        if self._offers:
            return  # the parser comes again, without the offer
        self._header_bytes = None
        old = self.parser.get_http_version() == "1.0" and not self._is_answering()
        self.transport.expect_head(knows_chunks=not old)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self._offers:
            return
        self._begun = False
        self._ended_request = True
        self._stop_timer()
        super().on_message_complete()

    def head_without_offer(self) -> bytes:
        """Request line and headers of the latest request, without its offer of a protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _OFFERS)
            if name not in _OFFERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP."""
        self._refuse(invalid("The request is not valid HTTP."))

    def _start_timer(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._request_timeout, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._is_answering():
            self._start_timer()  # the response before has the connection: look again later
        elif self._begun and not self._has_begun_answer():
            self._refuse(
                ApiError(408, "The request did not arrive in time.", code="request_timeout")
            )
        else:
            self.transport.close()

    def _arriving(self) -> Any:
        """The cycle of the request that is not whole yet; None while its headers come."""
        own = self._begun and self.cycle is not None and self.cycle.scope is self.scope
        return self.cycle if own else None

    def _is_answering(self) -> bool:
        """Whether a response to an earlier, complete request is still under way."""
        unfinished = self.cycle is not None and not self.cycle.response_complete
        return bool(self.pipeline) or (unfinished and self.cycle is not self._arriving())

    def _has_begun_answer(self) -> bool:
        """Whether the request has been answered before all of its body came."""
        cycle = self._arriving()
        return cycle is not None and bool(cycle.response_started)

    def _refuse(self, error: ApiError) -> None:
        """Answers a request that never became whole, and ends the connection."""
        self._header_bytes = None
        if self._has_begun_answer():
            self.transport.close()
            return
        scope: Scope = cast(Scope, self.scope) if self._begun else {}
        scope.setdefault("headers", [])
        context = state(scope)
        identity = context.get(REQUEST_ID) or request_id(header(scope, REQUEST_ID_HEADER))
        body = error.body()
        answered = not self._is_answering()
        if answered:
            self.transport.write(
                b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n%b: %b\r\nconnection: close\r\n\r\n%b"
                % (error.status, len(body), REQUEST_ID_HEADER.encode(), identity.encode(), body)
            )
        self.transport.close()
        if self._arriving() is not None and not self.pipeline:
            # The application waits for the body, or is about to, and will write the line.
            context[REQUEST_ID] = identity
            context.setdefault(FIELDS, {})["status"] = error.status
            return
        trace = trace_context(header(scope, TRACEPARENT_HEADER))
        seconds = self.loop.time() - self._began_at
        log_access(scope, error.status, answered, seconds, identity, trace, {})

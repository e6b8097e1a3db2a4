"""A lean HTTP/1.1 client for the requests that are passed on.

Everything a general client does beyond that costs a third of the router's time: this one posts a
body that is known whole, on pooled keep-alive connections with one request each, and hands over the
answer's bytes as they come, with a deadline on every wait. No redirects, cookies, proxies, content
codings or retries: those are left to the caller.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Iterable
from typing import cast
from urllib.parse import urlsplit

import httptools

from radixgrove.protocol.errors import PeerError

# Below the 5 s after which uvicorn closes an idle connection: a request must not meet the close.
KEEPALIVE_SECONDS = 4.0
MAX_HEADER_BYTES = 64 << 10  # of an answer, its status line included
BUFFER_BYTES = 256 << 10  # of an answer's body not read yet; then the replica has to wait
MAX_ORIGINS = 4096

Fields = Iterable[tuple[bytes, bytes]]


# Of a connection that this machine has nothing left for: that says nothing of the replica.
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


class ConnectFailed(PeerError):
    """No connection within the time for it; nothing was sent."""


class NoResources(ConnectFailed):
    """This process, or its machine, can open no more connections."""


def is_ours(error: BaseException) -> bool:
    """Whether connecting failed for want of descriptors, ports or memory on this side."""
    return isinstance(error, OSError) and error.errno in _OURS


class AnswerBroke(PeerError):
    """The connection ended, or spoke no HTTP, before the answer was complete."""


class _Origin:
    """Where one base URL leads, and the idle connections there, the latest last."""

    def __init__(self, url: str) -> None:
        """Raises ConnectFailed: it leads nowhere."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise ConnectFailed from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConnectFailed
        self.host = parts.hostname
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/").encode()
        self.authority = parts.netloc.rpartition("@")[2].encode()
        self.idle: list[Connection] = []


class Pool:
    """All connections of one router process. Use it in the event loop only."""

    def __init__(self, connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._origins: dict[str, _Origin] = {}
        self._all: set[Connection] = set()

    async def connect(self, url: str) -> Connection:
        """A connection to send one request on; `finish` it, whatever comes.

        Args:
            url: scheme, host and port, perhaps with a path before that of the request.

        Raises:
            ConnectFailed: there is none. NoResources: for lack of our own.
        """
        origin = self._origins.get(url)
        if origin is None:
            if len(self._origins) >= MAX_ORIGINS:  # replicas come and go; idle connections end
                self._origins.clear()
            origin = self._origins[url] = _Origin(url)
        return self._take(origin) or await self._connect(origin)

    def close(self) -> None:
        for connection in list(self._all):
            connection.abort()

    def _take(self, origin: _Origin) -> Connection | None:
        while origin.idle:
            connection = origin.idle.pop()
            if connection.fresh:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: _Origin) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(loop, origin, self._all)
        try:
            async with asyncio.timeout(self._connect_timeout):
                await loop.create_connection(
                    lambda: connection, origin.host, origin.port, ssl=origin.tls
                )
        except (OSError, ValueError) as error:  # ValueError: a name that no resolver takes
            connection.abort()
            raise (NoResources if is_ours(error) else ConnectFailed) from None
        except BaseException:
            connection.abort()
            raise
        return connection


class Connection(asyncio.Protocol):
    """One connection to a replica and, while a request is under way, the answer to it."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, origin: _Origin, everyone: set[Connection]
    ) -> None:
        self._loop = loop
        self._origin = origin
        self._everyone = everyone
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0  # of the wait, or of the latest one
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None  # looks for idleness
        self._idle_since = 0.0
        self._in_use = True
        self.given_up = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []  # names in lower case
        self._header_bytes = 0
        self._has_headers = False
        self._complete = False
        self._broken = False
        self._keep_alive = False
        self.until_close = False  # the connection's end is the body's: one cut short looks whole
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._paused = False

    # ---- for the one who asks --------------------------------------------------------------

    @property
    def fresh(self) -> bool:
        """Whether an idle connection may be used again."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._loop.time() - self._idle_since < KEEPALIVE_SECONDS
        )

    def send(self, path: str, fields: Fields, body: bytes) -> None:
        """Begins a request. The answer is read while the body is still on its way.

        Args:
            fields: headers, without those of the connection, `host` and `content-length`.

        Raises:
            ConnectFailed: the connection has ended before anything was sent.
        """
        self._reset()
        self._in_use = True
        if self._transport is None:
            raise ConnectFailed
        origin = self._origin
        head = b"POST %b%b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            origin.path,
            path.encode(),
            origin.authority,
            len(body),
            b"".join([b"%b: %b\r\n" % field for field in fields]),
        )
        self._transport.writelines((head, body))

    async def headers_come(self, deadline: float) -> None:
        """Returns once `status` and `headers` are set.

        Raises:
            AnswerBroke: they do not come.
            TimeoutError: they are not there by `deadline`, the event loop's time.
        """
        while not self._has_headers:
            if self._broken:
                raise AnswerBroke
            await self._wait(deadline)

    async def read(self, deadline: float) -> bytes:
        """What has come of the body since the last call; empty at its end.

        Raises:
            AnswerBroke: it ended early.
            TimeoutError: nothing came by `deadline`, the event loop's time.
        """
        while not self._chunks:
            if self._complete:
                return b""
            if self._broken:
                raise AnswerBroke
            await self._wait(deadline)
        chunks, self._chunks, self._buffered = self._chunks, [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def finish(self) -> None:
        """The answer is read or no longer wanted: keeps the connection, or cuts it."""
        if not self._in_use:
            return
        self._in_use = False
        if not (self._complete and self._keep_alive) or self._transport is None:
            self.abort()
            return
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        self._idle_since = self._loop.time()
        self._origin.idle.append(self)
        if self._timer is None:
            self._timer = self._loop.call_later(KEEPALIVE_SECONDS, self._look_for_idleness)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """The other end is taken for lost: the wait for its answer breaks."""
        self.given_up = True
        self._break()

    async def _wait(self, deadline: float) -> None:
        """Returns when something happened. Raises TimeoutError."""
        self._waiter = waiter = self._loop.create_future()
        self._deadline, timer = deadline, self._deadline_timer
        if timer is None or timer.when() > deadline:
            self._look_at(deadline)
        try:
            await waiter
        finally:
            self._waiter = None

    def _look_at(self, deadline: float) -> None:
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_timer = self._loop.call_at(deadline, self._look_for_lateness)

    def _look_for_lateness(self) -> None:
        """One timer for the chunks of a stream, as `_look_for_idleness`."""
        self._deadline_timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._deadline:
            self._look_at(self._deadline)
        else:
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look_for_idleness(self) -> None:
        """One timer a connection, not one a request: it comes back when it was early."""
        self._timer = None
        if self._transport is None:
            return
        left = KEEPALIVE_SECONDS
        if not self._in_use:
            left -= self._loop.time() - self._idle_since
            if left <= 0:
                self.abort()
                return
        self._timer = self._loop.call_later(left, self._look_for_idleness)

    def _break(self) -> None:
        self._broken = True
        self.abort()
        self._wake()

    # ---- asyncio calls these ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._everyone.add(self)

    def data_received(self, data: bytes) -> None:
        if not self._in_use or self._complete:
            self.abort()  # bytes without a request
            return
        if not self._has_headers:
            self._header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._break()
            return
        if not self._has_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._break()
            return
        if self._buffered > BUFFER_BYTES and not self._complete and not self._paused:
            self._paused = True
            assert self._transport is not None
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self.until_close and self._has_headers:
            self._complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._everyone.discard(self)
        for timer in (self._timer, self._deadline_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._deadline_timer = None
        if not self._in_use and self in self._origin.idle:
            self._origin.idle.remove(self)
        self._broken = True
        self._wake()

    # ---- the parser calls these ------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:  # a second answer to one request: it belongs to none
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._complete:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status < 200:  # an interim answer: the real one follows
            self.headers = []
            return
        self.status = status
        self._has_headers = True
        self._keep_alive = self._parser.should_keep_alive()
        framed = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        self.until_close = not framed and status not in (204, 304)

    def on_body(self, body: bytes) -> None:
        if self._complete:
            return
        self._chunks.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        if self._has_headers:
            self._complete = True

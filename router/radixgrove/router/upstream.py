"""One attempt to get a request answered by one replica."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from radixgrove.protocol import errors
from radixgrove.protocol.errors import ApiError
from radixgrove.protocol.settings import RouterSettings

# Below the 5 s after which uvicorn closes an idle connection: a request must not meet the close.
KEEPALIVE_SECONDS = 4.0
MAX_ANSWER_BYTES = 256 << 20
EVENT_STREAM = "text/event-stream"
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
BLAMED_STATUSES = frozenset({500, 502, 504})

_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s?(\d{1,9})')
# Of one connection only (RFC 9110, 7.6.1), or set anew by this server.
_DROPPED = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "date",
        "server",
        "x-request-id",
    }
)


class AttemptFailed(Exception):
    """Nothing has reached the client yet; another replica may try.

    `answer` is what the client gets if none does. `blame` says whether the replica is at fault.
    """

    def __init__(self, reason: str, answer: ApiError | Answer, *, blame: bool, retry: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.answer = answer
        self.blame = blame
        self.retry = retry


class StreamBroke(Exception):
    """The answer ended early after its first bytes had been passed on."""


@dataclass(slots=True)
class Answer:
    """A replica's answer: whole, or the first bytes of a stream."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def make_session(settings: RouterSettings) -> aiohttp.ClientSession:
    """The pooled client for all replicas. Must be made in the event loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout, connect=settings.connect_timeout
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept-Encoding"),
    )


class Upstream:
    """Sends requests to replicas, with a deadline on every wait."""

    def __init__(self, settings: RouterSettings, session: aiohttp.ClientSession) -> None:
        self._first_byte = settings.first_byte_timeout
        self._idle = settings.idle_timeout
        self._session = session

    async def send(self, url: str, headers: Mapping[str, str], body: bytes) -> Attempt:
        """Waits for the answer's first byte; a non-streaming answer comes whole.

        Raises:
            AttemptFailed: no first byte, or an answer that another replica might better.
        """
        attempt = Attempt(self._idle)
        try:
            async with asyncio.timeout(self._first_byte):
                response = await self._session.post(
                    url, headers=headers, data=body, allow_redirects=False
                )
                attempt.response = response
                await attempt.begin()
        except TimeoutError as error:
            attempt.close()
            if isinstance(error, aiohttp.ConnectionTimeoutError):
                raise _no_connection() from None
            answer = ApiError(
                504, "The model did not answer in time.", type="server_error", code="timeout"
            )
            raise AttemptFailed("first_byte_timeout", answer, blame=True, retry=False) from None
        except aiohttp.ClientConnectorError:
            attempt.close()
            raise _no_connection() from None
        except (aiohttp.ClientError, OSError):
            attempt.close()
            raise AttemptFailed("died", _bad_gateway(), blame=True, retry=True) from None
        except BaseException:
            attempt.close()  # the client went away: so does the request upstream
            raise
        status = response.status
        if status in RETRIED_STATUSES or status in BLAMED_STATUSES:
            attempt.close()
            raise AttemptFailed(
                f"status_{status}",
                attempt.answer,
                blame=status in BLAMED_STATUSES,
                retry=status in RETRIED_STATUSES,
            )
        return attempt


class Attempt:
    """An answer under way. Call `close` when done with it, however that came."""

    def __init__(self, idle: float) -> None:
        self._idle = idle
        self._complete = False
        self._tail = b""
        self.streams = False  # more follows `answer.body`, through `next`
        self.failed_inside = False  # the replica itself reported an error in the stream
        self.response: aiohttp.ClientResponse | None = None
        self.answer = Answer(0, [], b"")
        self.cached_tokens: int | None = None

    async def begin(self) -> None:
        """Reads up to the first byte of a stream, or all of any other answer."""
        response = self.response
        assert response is not None
        self.answer.status = response.status
        self.answer.headers = [
            (name, value)
            for name, value in response.raw_headers
            if name.decode("latin-1").lower() not in _DROPPED
        ]
        if response.content_type != EVENT_STREAM:
            self.answer.body = await self._whole(response)
            self._complete = True
            self._note(self.answer.body[-4096:])
            return
        self.answer.body = await response.content.readany()
        self._note(self.answer.body)
        self.streams = True

    async def _whole(self, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        while chunk := await response.content.readany():
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise aiohttp.ClientPayloadError("the answer is too large")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def next(self) -> bytes:
        """What follows in a stream; empty at its end.

        Raises:
            StreamBroke: the replica died, fell silent, or ended without its end mark.
        """
        assert self.response is not None
        try:
            async with asyncio.timeout(self._idle):
                chunk = await self.response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise StreamBroke from None
        if chunk:
            self._note(chunk)
            return chunk
        if not self._tail.rstrip().endswith(b"data: [DONE]"):
            raise StreamBroke
        self._complete = True
        return b""

    def _note(self, chunk: bytes) -> None:
        """Keeps the end of a stream, and the cached tokens where an answer names them."""
        self._tail = chunk[-64:] if len(chunk) >= 64 else (self._tail + chunk)[-64:]
        if chunk.startswith(b'data: {"error"'):
            self.failed_inside = True
        if b'"cached_tokens"' in chunk:
            found = _CACHED_TOKENS.search(chunk)
            if found:
                self.cached_tokens = int(found[1])

    def close(self) -> None:
        """Gives the connection back, or cuts it when the answer is not complete."""
        if self.response is not None:
            if self._complete:
                self.response.release()
            else:
                self.response.close()


def _bad_gateway() -> ApiError:
    return ApiError(
        502,
        "The server that ran this request failed before answering.",
        type="server_error",
        code="bad_gateway",
    )


def _no_connection() -> AttemptFailed:
    answer = errors.overloaded("The model cannot be reached now. Please try again later.", 2.0)
    return AttemptFailed("connect", answer, blame=True, retry=True)

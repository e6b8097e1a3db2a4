"""One attempt to get a request answered by one replica."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from radixgrove.protocol.errors import PeerError
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router.http_client import AnswerBroke, ConnectFailed, Connection, Fields, Pool

MAX_ANSWER_BYTES = 256 << 20
EVENT_STREAM = b"text/event-stream"
ERROR_EVENT = b'data: {"error"'
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
BLAMED_STATUSES = frozenset({500, 502, 504})

_CACHED_TOKENS = re.compile(rb'"cached_tokens":\s?(\d{1,9})')
# Of one connection only (RFC 9110, 7.6.1), or set anew by this server.
_DROPPED = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"date",
        b"server",
        b"x-request-id",
    }
)


class AttemptFailed(PeerError):
    """Nothing has reached the client yet; another replica may try.

    `answer` is what the client gets if none does. `blame` says whether the replica is at fault.
    """

    def __init__(
        self, reason: str, answer: ApiError | ReplicaAnswer, *, blame: bool, retry: bool
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.answer = answer
        self.blame = blame
        self.retry = retry


class StreamBroke(PeerError):
    """The answer ended early after its first bytes had been passed on."""


@dataclass(slots=True)
class ReplicaAnswer:
    """A replica's answer: whole, or the first bytes of a stream."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Upstream:
    """Sends requests to replicas, with a deadline on every wait."""

    def __init__(self, settings: RouterSettings) -> None:
        self._first_byte = settings.first_byte_timeout
        self._idle = settings.idle_timeout
        self._pool = Pool(settings.connect_timeout)

    def close(self) -> None:
        self._pool.close()

    async def send(self, url: str, path: str, fields: Fields, body: bytes) -> Attempt:
        """Waits for the answer's first byte; a non-streaming answer comes whole.

        Raises:
            AttemptFailed: no first byte, or an answer that another replica might better.
        """
        try:
            attempt = await self._begin(url, path, fields, body)
        except ConnectFailed:
            raise _no_connection() from None
        except TimeoutError:
            answer = errors.timed_out()
            raise AttemptFailed("first_byte_timeout", answer, blame=True, retry=False) from None
        except AnswerBroke:
            raise AttemptFailed("died", _bad_gateway(), blame=True, retry=True) from None
        status = attempt.answer.status
        if status in RETRIED_STATUSES or status in BLAMED_STATUSES:
            attempt.close()
            raise AttemptFailed(
                f"status_{status}",
                attempt.answer,
                blame=status in BLAMED_STATUSES,
                retry=status in RETRIED_STATUSES,
            )
        return attempt

    async def _begin(self, url: str, path: str, fields: Fields, body: bytes) -> Attempt:
        deadline = asyncio.get_running_loop().time() + self._first_byte
        connection = await self._pool.post(url, path, fields, body, deadline)
        attempt = Attempt(connection, self._idle)
        try:
            await attempt.begin(deadline)
        except BaseException:
            attempt.close()  # the client went away, perhaps: so does the request upstream
            raise
        return attempt


class Attempt:
    """An answer under way. Call `close` when done with it, however that came."""

    def __init__(self, connection: Connection, idle: float) -> None:
        self._connection = connection
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._tail = b""
        self.streams = False  # more follows `answer.body`, through `next`
        self.failed_inside = False  # the replica itself reported an error in the stream
        headers = [field for field in connection.headers if field[0] not in _DROPPED]
        self.answer = ReplicaAnswer(connection.status, headers, b"")
        self.cached_tokens: int | None = None

    async def begin(self, deadline: float) -> None:
        """Reads up to the first byte of a stream, or all of any other answer.

        Raises:
            AnswerBroke, TimeoutError: it did not come, or not by `deadline`.
        """
        if _media_type(self.answer.headers) != EVENT_STREAM:
            self.answer.body = await self._whole(deadline)
            self._note(self.answer.body[-4096:])
            return
        self.answer.body = await self._connection.read(deadline)
        self._note(self.answer.body)
        self.streams = True

    async def _whole(self, deadline: float) -> bytes:
        chunks, size = [], 0
        while chunk := await self._connection.read(deadline):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                raise AnswerBroke
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def next(self) -> bytes:
        """What follows in a stream; empty at its end.

        Raises:
            StreamBroke: the replica died, fell silent, or ended without its end mark.
        """
        try:
            chunk = await self._connection.read(self._loop.time() + self._idle)
        except (AnswerBroke, TimeoutError):
            raise StreamBroke from None
        if chunk:
            self._note(chunk)
        elif not self._tail.rstrip().endswith(b"data: [DONE]"):
            raise StreamBroke
        return chunk

    def _note(self, chunk: bytes) -> None:
        """Keeps the end of a stream, and the cached tokens where an answer names them."""
        self._tail = chunk[-64:] if len(chunk) >= 64 else (self._tail + chunk)[-64:]
        if chunk.startswith(ERROR_EVENT) or b"\n" + ERROR_EVENT in chunk:
            self.failed_inside = True
        if b'"cached_tokens"' in chunk:
            found = _CACHED_TOKENS.search(chunk)
            if found:
                self.cached_tokens = int(found[1])

    def close(self) -> None:
        """Gives the connection back, or cuts it when the answer is not complete."""
        self._connection.finish()


def _media_type(headers: list[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"content-type":
            return value.partition(b";")[0].strip().lower()
    return b""


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

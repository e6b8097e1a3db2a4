"""One attempt to get a request answered by one replica."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable

from radixgrove.protocol.errors import PeerError
from radixgrove.protocol.foreign import decode_json
from radixgrove.protocol.openai import errors
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.protocol.settings import RouterSettings
from radixgrove.router.event_stream import COMMENTS, MAX_LINE_BYTES, says_unavailable
from radixgrove.router.http_client import (
    AnswerBroke,
    ConnectFailed,
    Connection,
    Fields,
    NoResources,
    Pool,
)
from radixgrove.router.recovery import (
    CONNECT,
    DIED,
    LATE,
    LOST,
    NO_ANSWER,
    NO_RESOURCES,
    TOO_LARGE,
    UNAVAILABLE,
    AttemptFailed,
    ReplicaAnswer,
    refusal,
)
from radixgrove.router.replicas import Replica

MAX_ANSWER_BYTES = 256 << 20
MAX_HELD_BYTES = 256 << 20  # of all answers that are held whole at once; then large ones end
SMALL_ANSWER_BYTES = 64 << 10
EVENT_STREAM = b"text/event-stream"
JSON = (b"application/json", b"")
END_SECONDS = 1.0  # for the end of a stream after its last event
MAX_READS_TO_END = 4

Comment = Callable[[ReplicaAnswer], Awaitable[None]]
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


class StreamBroke(PeerError):
    """No more comes of an answer of which the first bytes had been passed on."""


class Upstream:
    """Sends requests to replicas, with a deadline on every wait."""

    def __init__(self, settings: RouterSettings) -> None:
        self._idle = settings.idle_timeout
        self._pool = Pool(settings.connect_timeout)
        self._held = HeldAnswers()

    def close(self) -> None:
        self._pool.close()

    async def send(
        self,
        replica: Replica,
        path: str,
        fields: Fields,
        body: bytes,
        seconds: float,
        comment: Comment,
    ) -> Attempt:
        """Waits for the answer to begin; a non-streaming answer comes whole.

        Args:
            seconds: how long to wait for the first byte.
            comment: gets the comments of a stream that come before its first event: they are no
                part of the answer, and another replica may still give it.

        Raises:
            AttemptFailed: no first byte, or an answer that another replica might better.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            connection = await self._pool.connect(replica.url)
            connection.send(path, fields, body)
        except ConnectFailed as error:
            ours = isinstance(error, NoResources)
            raise AttemptFailed(NO_RESOURCES if ours else CONNECT, _unreachable()) from None
        replica.waiting.add(connection)
        try:
            attempt = await self._begin(connection, deadline, comment)
        except TimeoutError:
            raise AttemptFailed(LATE, errors.timed_out()) from None
        except AnswerBroke:
            failure = LOST if connection.given_up else DIED
            raise AttemptFailed(failure, _bad_gateway()) from None
        except NoAnswer:
            raise AttemptFailed(NO_ANSWER, _bad_gateway()) from None
        except AnswerTooLarge:
            raise AttemptFailed(TOO_LARGE, errors.answer_too_large()) from None
        finally:
            replica.waiting.discard(connection)
        if refused := refusal(attempt.answer.status):
            attempt.close()
            raise AttemptFailed(refused, attempt.answer)
        if attempt.streams and says_unavailable(attempt.answer.body):
            attempt.close()
            raise AttemptFailed(UNAVAILABLE, _unreachable())
        return attempt

    async def _begin(self, connection: Connection, deadline: float, comment: Comment) -> Attempt:
        try:
            await connection.headers_come(deadline)
        except BaseException:
            connection.finish()  # the client went away, perhaps: so does the request upstream
            raise
        attempt = Attempt(connection, self._idle, self._held)
        try:
            await attempt.begin(deadline, comment)
        except BaseException:
            attempt.close()
            raise
        return attempt


class NoAnswer(PeerError):
    """The replica ended an answer that is none."""


class AnswerTooLarge(PeerError):
    """It takes more memory than there is for answers that are held whole."""


class HeldAnswers:
    """Bytes of the answers that are held whole, until their clients have read them."""

    def __init__(self) -> None:
        self._bytes = 0

    def take(self, size: int, of: int) -> None:
        """So many more `of` an answer's bytes. Raises AnswerTooLarge."""
        self._bytes += size
        full = self._bytes > MAX_HELD_BYTES and of > SMALL_ANSWER_BYTES
        if full or of > MAX_ANSWER_BYTES:
            raise AnswerTooLarge

    def give_back(self, size: int) -> None:
        self._bytes -= size


class Attempt:
    """An answer under way. Call `close` when done with it, however that came."""

    def __init__(self, connection: Connection, idle: float, held: HeldAnswers) -> None:
        self._connection = connection
        self._idle = idle
        self._held = held
        self._size = 0  # of a whole answer, as far as it has come
        self._loop = asyncio.get_running_loop()
        self.streams = False  # more follows `answer.body`, through `next`
        headers = [field for field in connection.headers if field[0] not in _DROPPED]
        self.answer = ReplicaAnswer(connection.status, headers, b"")
        self.cached_tokens: int | None = None

    async def begin(self, deadline: float, comment: Comment) -> None:
        """Reads up to the first event of a stream, or all of any other answer.

        Raises:
            AnswerBroke, TimeoutError: it did not come, or not by `deadline`.
            NoAnswer: there is none.
            AnswerTooLarge: it would have to be held whole.
        """
        media_type = _media_type(self.answer.headers)
        if media_type == EVENT_STREAM:
            self.answer.headers = [f for f in self.answer.headers if f[0] != b"content-length"]
            self.answer.body = await self._first_lines(deadline, comment)
            self.streams = True
            self._note(self.answer.body)
            return
        self.answer.body = await self._whole(deadline)
        cut = self._connection.until_close and media_type in JSON and not _is_json(self.answer.body)
        if cut or (not self.answer.body and self.answer.status < 300):
            raise NoAnswer
        self._note(self.answer.body[-4096:])

    async def _first_lines(self, deadline: float, comment: Comment) -> bytes:
        """A stream up to a whole line that is no comment: half a line cannot be passed on."""
        body = await self._connection.read(deadline)
        while body:
            if COMMENTS.fullmatch(body):
                self.answer.body, body = body, b""
                await comment(self.answer)
            elif b"\n" in body or len(body) > MAX_LINE_BYTES:
                return body
            more = await self._read_on()
            if not more:
                break
            body += more
        raise NoAnswer

    async def _whole(self, deadline: float) -> bytes:
        chunks = []
        while chunk := await self._connection.read(deadline):
            chunks.append(chunk)
            self._size += len(chunk)
            self._held.take(len(chunk), self._size)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def next(self) -> bytes:
        """What follows in a stream; empty at its end.

        Raises:
            StreamBroke: the replica died, or fell silent.
        """
        try:
            chunk = await self._read_on()
        except AnswerBroke:
            raise StreamBroke from None
        self._note(chunk)
        return chunk

    async def _read_on(self) -> bytes:
        """Raises AnswerBroke: the replica died, or fell silent."""
        try:
            return await self._connection.read(self._loop.time() + self._idle)
        except TimeoutError:
            raise AnswerBroke from None

    async def read_end(self) -> None:
        """Lets the end of a stream come of which all was said: its connection can be kept then."""
        deadline = self._loop.time() + END_SECONDS
        with contextlib.suppress(AnswerBroke, TimeoutError):
            for _ in range(MAX_READS_TO_END):
                if not await self._connection.read(deadline):
                    return

    def _note(self, chunk: bytes) -> None:
        """Keeps the cached tokens where an answer names them."""
        if b'"cached_tokens"' in chunk:
            found = _CACHED_TOKENS.search(chunk)
            if found:
                self.cached_tokens = int(found[1])

    def close(self) -> None:
        """Gives the connection back, or cuts it when the answer is not complete."""
        self._held.give_back(self._size)
        self._size = 0
        self._connection.finish()


def _media_type(headers: list[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"content-type":
            return value.partition(b";")[0].strip().lower()
    return b""


def _is_json(body: bytes) -> bool:
    try:
        decode_json(body, object)
    except ValueError:
        return False
    return True


def _bad_gateway() -> ApiError:
    return ApiError(
        502,
        "The server that ran this request failed before answering.",
        type="server_error",
        code="bad_gateway",
    )


def _unreachable() -> ApiError:
    return errors.overloaded("The model cannot be reached now. Please try again later.", 2.0)

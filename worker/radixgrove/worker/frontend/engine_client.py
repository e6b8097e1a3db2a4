"""The frontend's end of the engine's sockets: submit, abort, and deliver what comes back.

Everything runs on the event loop's thread. The engine sends one message a step with the tokens of
all requests, so receiving is a plain reader callback: no task and no future a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import zmq
import zmq.utils.monitor

from radixgrove.protocol.blocks import TOKEN_BYTES
from radixgrove.protocol.openai import errors
from radixgrove.worker.cache.structure import common_pages
from radixgrove.worker.liveness import Liveness
from radixgrove.worker.messages import (
    Abort,
    CacheMode,
    EngineInfo,
    Outputs,
    Peek,
    Peeked,
    Read,
    Refused,
    Stats,
    Submit,
    SubmitChoices,
    ToEngine,
    ToFrontend,
    Tokens,
)

_log = logging.getLogger(__name__)

# Messages that may wait for the engine: beyond that it does not read its socket, and we refuse.
SEND_QUEUE = 4096
# Of prompts and grammars that the engine has not answered yet, in its socket or its queue.
MAX_UNANSWERED_BYTES = 256 << 20
_READ_BYTES = 1 << 20  # after so many the engine hears that they were read
_COMPARED = 64  # unanswered prompts, the latest, that a new one may share its beginning with

Deliver = Callable[[Tokens | Refused], None]


def _common(one: bytes, two: bytes) -> int:
    """How many token ids two prompts have in common, from the first."""
    shorter = min(len(one), len(two)) // TOKEN_BYTES
    return common_pages(one, 0, two, 0, shorter, TOKEN_BYTES)


def _discard(_: Tokens | Refused) -> None:
    """Where outputs of an aborted request go until the engine has confirmed its end."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What went to an engine: prompts' tokens that it has to compute, and sequences."""

    tokens: int = 0
    sequences: int = 0

    def since(self, earlier: Sent) -> Sent:
        return Sent(self.tokens - earlier.tokens, self.sequences - earlier.sequences)


@dataclass(frozen=True, slots=True)
class _Unanswered:
    """What was sent to the engine, until its first word."""

    size: int  # bytes of prompt and grammar
    prompt: bytes
    domain: str


class EngineClient:
    """One per frontend process and member.

    A request's entry is deleted only by the engine's final message (a finish or a refusal), aborted
    or not: until then its id is taken and its late outputs are expected.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        engine_socket: str,
        frontend_socket: str,
        index: int,
    ) -> None:
        """
        Args:
            index: this frontend's, by which the engine addresses it.
        """
        self.index = index
        self.liveness = Liveness()
        self.info: EngineInfo | None = None  # once the engine is ready
        self.gone = False  # the engine's process closed its end after having been there
        self.on_gone: Callable[[], None] = lambda: None
        self._addresses = (engine_socket, frontend_socket)
        self.sent = Sent()  # so far
        self.sent_at_pulse = Sent()  # until the last pulse came, which tells of that at most
        self._deliver: dict[str, Deliver] = {}
        self._unanswered: dict[str, _Unanswered] = {}
        self._unanswered_bytes = 0
        self._peeks: dict[str, asyncio.Future[Peeked]] = {}
        self._peek_ids = itertools.count()
        self._read = 0  # bytes that the engine has not heard of
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)
        self._inbox: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self._outbox: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._monitor: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Bind and connect; call on the event loop. The engine need not be there yet."""
        engine, frontend = self._addresses
        self._loop = asyncio.get_running_loop()
        self._inbox.set_hwm(0)  # the engine never drops or blocks on us; requests bound it
        self._inbox.bind(frontend)
        self._outbox.set_hwm(SEND_QUEUE)
        self._outbox.setsockopt(zmq.LINGER, 1000)
        self._monitor = self._outbox.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._outbox.connect(engine)
        self._loop.add_reader(_descriptor(self._inbox), self._readable)
        self._loop.add_reader(_descriptor(self._monitor), self._monitored)
        # A descriptor signals only what comes after a read that found nothing.
        self._readable()
        self._monitored()

    def close(self) -> None:
        """Stop receiving; aborts already queued still leave."""
        if self._loop is not None and self._monitor is not None:
            self._loop.remove_reader(_descriptor(self._inbox))
            self._loop.remove_reader(_descriptor(self._monitor))
            self._outbox.disable_monitor()
            self._monitor.close(0)
        self._inbox.close(0)
        self._outbox.close()

    @property
    def active(self) -> int:
        """Sequences that the engine has not finished, aborted ones included."""
        return len(self._deliver)

    def knows(self, request_id: str) -> bool:
        return request_id in self._deliver

    def submit(
        self,
        message: Submit | SubmitChoices,
        deliver: Mapping[str, Deliver],
        matched_tokens: int = 0,
    ) -> None:
        """Send sequences to the engine; `deliver` gets the outputs of each, the last of them final.

        Args:
            matched_tokens: of the prompt, which the engine is expected not to compute.

        Raises:
            ApiError: 503, when the engine is gone or takes no messages; 429, when prompts of too
                many bytes wait for it.
        """
        first = message.first if isinstance(message, SubmitChoices) else message
        size = len(first.token_ids)
        if first.rules is not None and first.rules.grammar is not None:
            size += len(first.rules.grammar)
        if not self._has_room(size):
            raise errors.rate_limited(1)
        self._send(message)
        self._deliver.update(deliver)
        domain = first.domain if first.cache is CacheMode.USE else ""  # else it leaves nothing
        self._expect(first.request_id, size, first.token_ids, domain)
        tokens = max(0, len(first.token_ids) // TOKEN_BYTES - matched_tokens)
        self.sent = Sent(self.sent.tokens + tokens, self.sent.sequences + len(deliver))

    def _has_room(self, size: int) -> bool:
        """A prompt larger than the bound goes alone."""
        return not self._unanswered or self._unanswered_bytes + size <= MAX_UNANSWERED_BYTES

    def _expect(self, request_id: str, size: int, prompt: bytes = b"", domain: str = "") -> None:
        self._unanswered[request_id] = _Unanswered(size, prompt, domain)
        self._unanswered_bytes += size

    def _answered(self, request_id: str) -> None:
        known = self._unanswered.pop(request_id, None)
        self._unanswered_bytes -= known.size if known is not None else 0

    def peek(self, prompt: bytes, domain: str) -> asyncio.Future[Peeked] | None:
        """Ask what the engine has of a prompt; None: it takes no messages now."""
        if not self._has_room(len(prompt)):
            return None
        peek_id = f"peek-{next(self._peek_ids)}"
        try:
            self._send(Peek(peek_id=peek_id, frontend=self.index, token_ids=prompt, domain=domain))
        except errors.ApiError:
            return None
        self._expect(peek_id, len(prompt))
        future = self._peeks[peek_id] = asyncio.get_running_loop().create_future()
        return future

    def awaited_tokens(self, prompt: bytes, domain: str) -> int:
        """How much of a prompt is on its way to the engine, or computed there, for another one."""
        latest = itertools.islice(reversed(self._unanswered.values()), _COMPARED)
        shared = [_common(prompt, other.prompt) for other in latest if other.domain == domain]
        return max(shared, default=0)

    def abort(self, request_id: str) -> None:
        """End a sequence early. Nothing of it is delivered any more; unknown ids are ignored."""
        if request_id in self._deliver:
            self._deliver[request_id] = _discard
            with contextlib.suppress(errors.ApiError):
                self._send(Abort(request_id))

    def check_stuck(self) -> None:
        """Give the engine up when its pulse stopped, as its agent does."""
        if not self.gone and self.liveness.problem() is not None:
            self._give_up("the engine's pulse stopped")

    def _send(self, message: ToEngine) -> None:
        if self.gone:
            raise errors.overloaded("The engine has stopped.", retry_after=5)
        try:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise errors.overloaded("The engine is busy.", retry_after=1) from None

    def _readable(self) -> None:
        # The descriptor is edge-triggered: read until nothing is left.
        while True:
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(self._decoder.decode(frame))
            self._read += len(frame)
            if self._read >= _READ_BYTES:
                with contextlib.suppress(errors.ApiError):
                    self._send(Read(self.index, self._read))
                    self._read = 0

    def _take(self, message: ToFrontend) -> None:
        if isinstance(message, Stats):
            self.liveness.take(message)
            self.sent_at_pulse = self.sent
        elif isinstance(message, EngineInfo):
            self.info = message
        elif isinstance(message, Peeked):
            self._answered(message.peek_id)
            self._peeks.pop(message.peek_id).set_result(message)
        else:
            self._take_outputs(message)

    def _take_outputs(self, outputs: Outputs) -> None:
        table = self._deliver
        for item in outputs.items:
            deliver = table.get(item.request_id)
            if deliver is None:
                _log.warning("output of an unknown request")
                continue
            self._answered(item.request_id)
            if isinstance(item, Refused) or item.finish is not None:
                del table[item.request_id]
            deliver(item)

    def _monitored(self) -> None:
        monitor = self._monitor
        assert monitor is not None
        while True:
            try:
                event = zmq.utils.monitor.recv_monitor_message(monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._give_up("the engine closed its socket")

    def _give_up(self, reason: str) -> None:
        if not self.gone:
            _log.error("%s: ending %d sequences", reason, len(self._deliver))
            self.gone = True
            self.on_gone()


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    """What the event loop watches; readable when the socket's state may have changed."""
    return int(socket.getsockopt(zmq.FD))

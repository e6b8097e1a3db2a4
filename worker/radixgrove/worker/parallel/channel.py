"""A connection between two ranks that have proven themselves: bounded frames, each with a key.

A frame is its length, a keyed digest, and the payload. The digest covers the frame's number in its
direction, so that none can be left out, repeated or sent back.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import struct
import threading
import time

from radixgrove.protocol.errors import PeerError

MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_DIGEST_BYTES = 32
_HEAD_BYTES = _LENGTH.size + _DIGEST_BYTES


class ChannelError(PeerError, RuntimeError):
    """The peer is gone, takes nothing more, or sent what is none of its own."""


class Channel:
    """One rank's end. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        sock.settimeout(None)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The other end's, "" on one machine. Kept: a connection that was reset has none.
        self.peer = address_of(sock)
        self._socket = sock
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0
        self._sending = threading.Lock()

    @property
    def own_address(self) -> str:
        """This end's address; "" on one machine."""
        name = self._socket.getsockname()
        return name[0] if isinstance(name, tuple) else ""

    def send(self, payload: bytes, seconds: float) -> None:
        """
        Raises:
            ChannelError: the peer is gone, or has not taken it within `seconds`, in which another
                thread's may be under way.
        """
        deadline = time.monotonic() + seconds
        if not self._sending.acquire(timeout=seconds):
            raise ChannelError("cannot send: the peer takes nothing more")
        try:
            if time.monotonic() >= deadline:  # the frame's number is not used up
                raise ChannelError("cannot send: the peer takes nothing more")
            frame = sealed(self._send_key, self._sent, payload)
            self._sent += 1
            _send_all(self._socket, frame, deadline)
        except OSError as error:
            raise ChannelError(f"cannot send: {error.strerror or error}") from error
        finally:
            self._sending.release()

    def receive(self, most: int = MAX_FRAME_BYTES) -> bytes:
        """Wait for the next frame.

        Raises:
            ChannelError: the peer is gone, or the frame is too long or has a wrong digest.
        """
        try:
            payload = open_frame(self._socket, self._receive_key, self._received, most)
        except OSError as error:
            raise ChannelError(f"cannot receive: {error.strerror or error}") from error
        self._received += 1
        return payload

    @property
    def is_closed(self) -> bool:
        """Whether an end is closed, though what the peer sent before is yet to be received."""
        if self._socket.fileno() < 0:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP)
        return bool(poller.poll(0))

    def close(self) -> None:
        """End both directions; a `receive` in another thread ends too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def address_of(sock: socket.socket) -> str:
    """The other end's address; "" where there is none, as on one machine."""
    try:
        name = sock.getpeername()
    except OSError:
        return ""
    return name[0] if isinstance(name, tuple) else ""


def digest(key: bytes, *parts: bytes) -> bytes:
    """A keyed digest of parts, none of which can be mistaken for a piece of its neighbour."""
    message = b"".join(_NUMBER.pack(len(part)) + part for part in parts)
    return hmac.digest(key, message, "sha256")


def sealed(key: bytes, number: int, payload: bytes) -> bytes:
    """The frame of a payload."""
    if len(payload) > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {len(payload)} bytes is too long")
    seal = hmac.digest(key, _NUMBER.pack(number) + payload, "sha256")
    return _LENGTH.pack(len(payload)) + seal + payload


def open_frame(
    sock: socket.socket, key: bytes, number: int, most: int, deadline: float | None = None
) -> bytes:
    """The payload of the next frame, of at most `most` bytes.

    Args:
        deadline: monotonic seconds by which it must be there; None: whenever it comes.

    Raises:
        ChannelError: it is longer, or its digest is wrong.
        OSError: the connection failed, or timed out.
    """
    head = receive_exactly(sock, _HEAD_BYTES, deadline)
    (length,) = _LENGTH.unpack_from(head)
    if length > most:
        raise ChannelError(f"a frame of {length} bytes is announced, {most} are the most")
    payload = receive_exactly(sock, length, deadline)
    seal = hmac.digest(key, _NUMBER.pack(number) + payload, "sha256")
    if not hmac.compare_digest(seal, head[_LENGTH.size :]):
        raise ChannelError("a frame has a wrong digest")
    return payload


def receive_exactly(sock: socket.socket, count: int, deadline: float | None = None) -> bytes:
    """
    Raises:
        ChannelError: the connection ended before.
        OSError: it failed, or the deadline has passed.
    """
    content = bytearray()
    while len(content) < count:
        if deadline is not None:
            # A peer that sends a byte now and then is not waited for longer than a silent one.
            sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(min(count - len(content), 1 << 20))
        if not piece:
            raise ChannelError("the connection was closed")
        content += piece
    return bytes(content)


def _send_all(sock: socket.socket, frame: bytes, deadline: float) -> None:
    """All of the frame by the deadline; a part of it would spoil the channel, which then is."""
    view = memoryview(frame)
    while view:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the peer takes nothing more")
        try:
            view = view[sock.send(view, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            _await_room(sock, remaining)


def _await_room(sock: socket.socket, seconds: float) -> None:
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    poller.poll(seconds * 1000)

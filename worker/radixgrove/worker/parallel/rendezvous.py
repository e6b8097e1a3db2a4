"""How the ranks of a member find and prove each other, before torch hears of any of them.

The member's leader, rank 0 of a group that has no other, listens: on a socket in the worker's
private directory when the group is on one machine, else at `master` over TCP. It sends a nonce; a
rank answers with who it is, in a frame that is keyed by that nonce and the group's token; and it is
answered in the same way. So each side proves that it has the token, and what was recorded elsewhere
proves nothing. Strangers, ranks of another version or another model, and second ranks of a number
are refused, and the group goes on waiting.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from radixgrove.protocol.errors import PeerError
from radixgrove.protocol.ranks import ARRIVAL_SECONDS_APART
from radixgrove.worker.parallel.channel import (
    Channel,
    ChannelError,
    address_of,
    digest,
    open_frame,
    receive_exactly,
    sealed,
)
from radixgrove.worker.parallel.identity import Identity
from radixgrove.worker.parallel.layout import Layout

logger = logging.getLogger(__name__)

ARRIVAL_SECONDS = 60.0  # on one machine
# For the first word of a host that has let one in: it says none while it waits for others.
FIRST_WORD_SECONDS = 900.0
_HANDSHAKE_SECONDS = 5.0
_AT_ONCE = 64  # handshakes; a rank that finds no room tries again
_RETRY_SECONDS = 0.1
_TRIES = 3  # at a host that hangs up without a word: it may have ended, to begin anew, or be slow
_ACCEPT_AGAIN_SECONDS = 1.0
_NAME_AGAIN_SECONDS = 1.0
_NAME_SECONDS = 60.0  # for name servers to know a machine that has just started
_NONCE_BYTES = 32
_MOST_BYTES = 4096  # of a handshake's frame
_SOCKET = "member-{}.sock"


class RankMissing(PeerError, RuntimeError):
    """A rank did not come, fell silent or failed; the message names it."""


class JoinRefused(PeerError, RuntimeError):
    """This rank may not join the group; the message says why."""


class _Hello(msgspec.Struct, array_like=True):
    """Who comes."""

    rank: int
    nonce: bytes
    version: str
    settings: str
    model: str


class _Welcome(msgspec.Struct, array_like=True):
    """The answer; `refusal` says why it is none."""

    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where a member's leader is met: a socket's path, or host and port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @classmethod
    def of(
        cls, directory: Path, layout: Layout, master: str | None, member: int = 0
    ) -> MeetingPoint:
        """
        Raises:
            ValueError: members are on several machines, and `master` is not host:port.
        """
        if not layout.members_straddle:
            return cls(path=directory / _SOCKET.format(member))
        return cls.at(master)

    @classmethod
    def at(cls, master: str | None) -> MeetingPoint:
        """Where machine 0 is met. Raises ValueError: `master` is not host:port."""
        host, colon, port = (master or "").rpartition(":")
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ValueError(f"master {master!r} is not host:port")
        return cls(host=host.strip("[]"), port=int(port))

    @property
    def arrival(self) -> float:
        """Seconds that ranks have to come."""
        return ARRIVAL_SECONDS if self.path is not None else ARRIVAL_SECONDS_APART

    def listen(self) -> socket.socket:
        """On the group's address alone.

        Raises:
            OSError: it is not this machine's, or taken (gaierror: or its name is not known).
        """
        if self.path is not None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self.path))
        else:
            family, kind, _, _, address = socket.getaddrinfo(
                self.host, self.port, type=socket.SOCK_STREAM
            )[0]
            listener = socket.socket(family, kind)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        listener.listen(128)
        return listener

    def connect(self, seconds: float) -> socket.socket:
        """
        Raises:
            OSError: nothing listens there, or its name is not known yet.
        """
        if self.path is None:
            return socket.create_connection((self.host, self.port), timeout=seconds)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(seconds)
            sock.connect(str(self.path))
        except OSError:
            sock.close()
            raise
        return sock

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Keys:
    """Made of the token and both sides' nonces: of the frames of one connection."""

    token: bytes
    nonce: bytes  # the leader's

    @property
    def hello(self) -> bytes:
        return digest(self.token, b"hello", self.nonce)

    def of(self, direction: bytes, rank: int, theirs: bytes) -> bytes:
        return digest(self.token, direction, self.nonce, theirs, str(rank).encode())


@dataclass(frozen=True, slots=True)
class Party:
    """Who meets: the first of `numbers` is met by the others."""

    numbers: range
    describe: Callable[[int], str]  # for people
    noun: str = "rank"

    @classmethod
    def of_member(cls, layout: Layout, member: int = 0) -> Party:
        """The ranks of a member, at its leader."""
        return cls(layout.ranks_of_member(member), lambda rank: describe(rank, layout))

    @classmethod
    def of_machines(cls, layout: Layout) -> Party:
        """The machines of a group, by their agents, at machine 0."""
        return cls(range(layout.nodes), lambda node: f"machine {node}", "machine")

    @property
    def host(self) -> str:
        return f"{self.noun} {self.numbers[0]}"


class Gathering:
    """The host's side of the meeting: it lets the others of its party in, each once."""

    def __init__(self, point: MeetingPoint, identity: Identity, party: Party) -> None:
        self._point = point
        self._identity = identity
        self._party = party
        self._expected = party.numbers[1:]
        self._channels: dict[int, Channel] = {}
        self._changed = threading.Condition()
        self._room = threading.Semaphore(_AT_ONCE)
        self._over = threading.Event()

    def wait(self, seconds: float) -> dict[int, Channel]:
        """The channel to each of the other ranks, once all have come.

        Raises:
            RankMissing: names those that did not come in time.
            OSError: the address cannot be listened on.
        """
        deadline = time.monotonic() + seconds
        listener = self._listen(min(seconds, _NAME_SECONDS))
        accepting = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        accepting.start()
        try:
            with self._changed:
                remaining = deadline - time.monotonic()
                if not self._changed.wait_for(lambda: not self._missing(), remaining):
                    raise RankMissing(self._complaint(seconds))
                return dict(sorted(self._channels.items()))
        finally:
            self._over.set()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            listener.close()

    def _listen(self, seconds: float) -> socket.socket:
        """As soon as the name of the point is known; the others try again until then.

        Raises:
            OSError: it is not within `seconds`, is not this machine's, or is taken.
        """
        deadline, said = time.monotonic() + seconds, False
        while True:
            try:
                return self._point.listen()
            except socket.gaierror as error:
                if time.monotonic() > deadline:
                    raise
                if not said:
                    logger.warning("cannot listen at %s yet: %s", self._point, error.strerror)
                    said = True
            time.sleep(_NAME_AGAIN_SECONDS)

    def _missing(self) -> list[int]:
        return [rank for rank in self._expected if rank not in self._channels]

    def _complaint(self, seconds: float) -> str:
        names = ", ".join(map(self._party.describe, self._missing()))
        return f"{names} did not join within {seconds:.0f} s"

    def _accept(self, listener: socket.socket) -> None:
        while not self._over.is_set():
            try:
                self._accept_one(listener)
            except (OSError, RuntimeError) as error:
                # A network's error, or no file or thread is left: the right ones try again.
                if not self._over.is_set():
                    logger.warning("could not take a peer: %s", error)
                    self._over.wait(_ACCEPT_AGAIN_SECONDS)

    def _accept_one(self, listener: socket.socket) -> None:
        """
        Raises:
            OSError, RuntimeError: it cannot be accepted, or has no thread.
        """
        with contextlib.ExitStack() as on_failure:
            sock, _ = listener.accept()
            on_failure.callback(sock.close)
            if not self._room.acquire(blocking=False):
                return
            on_failure.callback(self._room.release)
            threading.Thread(target=self._meet, args=(sock,), daemon=True).start()
            on_failure.pop_all()

    def _meet(self, sock: socket.socket) -> None:
        peer = address_of(sock) or "this machine"
        try:
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(sock.close)
                self._let_in(sock, time.monotonic() + _HANDSHAKE_SECONDS)
                on_failure.pop_all()
        except (OSError, ChannelError, msgspec.DecodeError, JoinRefused) as error:
            logger.warning("refused a peer at %s: %s", peer, error)
        finally:
            self._room.release()

    def _let_in(self, sock: socket.socket, deadline: float) -> None:
        keys = _Keys(self._identity.token, secrets.token_bytes(_NONCE_BYTES))
        sock.settimeout(_HANDSHAKE_SECONDS)
        sock.sendall(keys.nonce)
        frame = open_frame(sock, keys.hello, 0, _MOST_BYTES, deadline)
        hello = msgspec.msgpack.decode(frame, type=_Hello)
        with self._changed:
            refusal = self._refusal(hello)
            answer = msgspec.msgpack.encode(_Welcome(refusal))
            sock.sendall(sealed(keys.of(b"welcome", hello.rank, hello.nonce), 0, answer))
            if refusal is not None:
                raise JoinRefused(f"{self._party.noun} {hello.rank}: {refusal}")
            self._channels[hello.rank] = Channel(
                sock,
                keys.of(b"to rank", hello.rank, hello.nonce),
                keys.of(b"from rank", hello.rank, hello.nonce),
            )
            self._changed.notify()

    def _refusal(self, hello: _Hello) -> str | None:
        if hello.rank not in self._expected:
            first, last = self._party.numbers[0], self._party.numbers[-1]
            return f"the group has {self._party.noun}s {first} to {last}"
        present = self._channels.get(hello.rank)
        if present is not None and not present.is_closed:
            return f"the group has this {self._party.noun} already"
        return self._identity.difference((hello.version, hello.settings, hello.model))


def join(
    point: MeetingPoint, identity: Identity, number: int, seconds: float, party: Party
) -> Channel:
    """Another one's side: a channel to the host of the party, once that has let this one in.

    Raises:
        RankMissing: the host was not there in time.
        JoinRefused: it is not this group's, or does not take this one.
    """
    deadline, tries = time.monotonic() + seconds, 0
    name = f"{party.noun} {number}"
    while True:
        sock, nonce = _reach(point, seconds, deadline, party)
        try:
            return _introduce(sock, nonce, identity, number, name)
        except (OSError, ChannelError, msgspec.DecodeError) as error:
            sock.close()
            tries += 1
            if tries == _TRIES:
                raise JoinRefused(
                    f"{name} was not let in at {point}, where another group may be, or "
                    f"{party.host} has another key: {error}"
                ) from error
        except JoinRefused:
            sock.close()
            raise
        time.sleep(_RETRY_SECONDS)


def _reach(
    point: MeetingPoint, seconds: float, deadline: float, party: Party
) -> tuple[socket.socket, bytes]:
    """A connection to the host, and its nonce; by `deadline`, which was `seconds` away."""
    while True:
        with contextlib.ExitStack() as on_failure:
            try:
                sock = point.connect(_HANDSHAKE_SECONDS)
                on_failure.callback(sock.close)
                nonce = receive_exactly(sock, _NONCE_BYTES, time.monotonic() + _HANDSHAKE_SECONDS)
                on_failure.pop_all()
                return sock, nonce
            except (OSError, ChannelError) as error:
                if time.monotonic() > deadline:
                    missing = f"{party.host} was not at {point} within {seconds:.0f} s: {error}"
                    raise RankMissing(missing) from error
        time.sleep(_RETRY_SECONDS)


def _introduce(
    sock: socket.socket, theirs: bytes, identity: Identity, rank: int, name: str
) -> Channel:
    keys = _Keys(identity.token, theirs)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    deadline = time.monotonic() + _HANDSHAKE_SECONDS
    hello = _Hello(rank, nonce, identity.version, identity.settings, identity.model)
    sock.sendall(sealed(keys.hello, 0, msgspec.msgpack.encode(hello)))
    frame = open_frame(sock, keys.of(b"welcome", rank, nonce), 0, _MOST_BYTES, deadline)
    welcome = msgspec.msgpack.decode(frame, type=_Welcome)
    if welcome.refusal is not None:
        raise JoinRefused(f"{name} may not join: {welcome.refusal}")
    return Channel(sock, keys.of(b"from rank", rank, nonce), keys.of(b"to rank", rank, nonce))


def describe(rank: int, layout: Layout, address: str = "") -> str:
    """A rank for people, with its machine where there are several."""
    if layout.nodes == 1:
        return f"rank {rank}"
    at = f", {address}" if address else ""
    return f"rank {rank} (machine {layout.place(rank).node}{at})"

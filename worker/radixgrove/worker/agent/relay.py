"""What two machines of a group say to each other: messages of members' engines, and heartbeats.

A member on another machine than the first has its engine there, and its frontends here. Each of the
two agents binds the sockets that are read at the other one, under the names that they have in
any runtime directory, and passes on what comes, over the connection by which the machines have
proven themselves. So frontends, engines and publishers know nothing of machines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import zmq

from radixgrove.service.liveness import WatchClock
from radixgrove.worker.parallel.channel import Channel, ChannelError
from radixgrove.worker.parallel.rendezvous import FIRST_WORD_SECONDS
from radixgrove.worker.runtime import Runtime

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 5.0  # a machine that says nothing for so long is frozen, or cut off
_SEND_SECONDS = 10.0
_PART_BYTES = 16 << 20  # of a frame: others need not wait for a message as long as a prompt
_LAST_SECONDS = 1.0  # for the last frame to leave


class Passed(msgspec.Struct, array_like=True, tag=True):
    """A message for a socket of the other machine, or a part of it that others follow."""

    socket: str
    part: bytes
    more: bool = False


class Beat(msgspec.Struct, array_like=True, tag=True):
    """The machine runs."""


class Over(msgspec.Struct, array_like=True, tag=True):
    """The group ends; `why` is empty when it ends in order."""

    why: str = ""


Frame = Passed | Beat | Over


class Relay:
    """One agent's end of the connection to another one."""

    def __init__(
        self,
        runtime: Runtime,
        channel: Channel,
        inlets: Sequence[str],
        outlets: Sequence[str],
        ended: Callable[[str], None],
    ) -> None:
        """
        Args:
            inlets: sockets to bind here, which are read at the other machine.
            outlets: sockets that are read here.
            ended: called once, in a thread, when the other end says that the group is over (then
                with its words), or is lost (with words for people).
        """
        self._channel = channel
        self._runtime = runtime
        self._ended = ended
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Readers may have ended: what is not read by then must not hold up the context's end.
        self._context.setsockopt(zmq.LINGER, 0)
        self._heard = 0  # frames
        self._closing = threading.Event()
        self._once = threading.Lock()
        self._inlets = {name: self._context.socket(zmq.PULL) for name in inlets}
        for name, socket in self._inlets.items():
            socket.bind(runtime.address(name))
        self._threads = [
            threading.Thread(target=self._forward, daemon=True),
            threading.Thread(target=self._receive, args=(list(outlets),), daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, why: str = "") -> None:
        """Tell the other machine that the group is over, and close the connection."""
        self._closing.set()
        with suppress(ChannelError):  # it is gone
            self._channel.send(self._encoder.encode(Over(why)), _LAST_SECONDS)
        self._threads[0].join(_LAST_SECONDS + BEAT_SECONDS)
        self._channel.close()  # a thread that still sends, or receives, ends with it
        for thread in self._threads:
            thread.join(_LAST_SECONDS)
        self._context.destroy(linger=0)

    # ---- threads -----------------------------------------------------------------------------

    def _forward(self) -> None:
        """Pass on what comes here; say that this machine lives, and see whether the other does."""
        clock = WatchClock()
        beaten, heard, since = clock.now() - BEAT_SECONDS, -1, clock.now()
        poller = zmq.Poller()
        for socket in self._inlets.values():
            poller.register(socket, zmq.POLLIN)
        names = {socket: name for name, socket in self._inlets.items()}
        while not self._closing.is_set():
            ready = poller.poll(int(BEAT_SECONDS * 1000 / 2))
            now = clock.now()
            try:
                for socket, _ in ready:
                    self._pass_on(names[socket], socket.recv(zmq.NOBLOCK))
                if now - beaten >= BEAT_SECONDS:
                    beaten = now
                    self._send(Beat())
            except ChannelError as error:
                self._end(f"it is gone: {error}")
                return
            limit = SILENCE_SECONDS if self._heard else FIRST_WORD_SECONDS
            if heard != self._heard:
                heard, since = self._heard, now
            elif now - since > limit:
                self._end(f"it has said nothing for {limit:.0f} s: frozen, or cut off")
                return

    def _pass_on(self, socket: str, message: bytes) -> None:
        start = 0
        while len(message) - start > _PART_BYTES:
            self._send(Passed(socket, message[start : start + _PART_BYTES], more=True))
            start += _PART_BYTES
        self._send(Passed(socket, message[start:]))

    def _send(self, frame: Frame) -> None:
        self._channel.send(self._encoder.encode(frame), _SEND_SECONDS)

    def _receive(self, names: list[str]) -> None:
        decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)
        outlets = {name: self._context.socket(zmq.PUSH) for name in names}
        for name, socket in outlets.items():
            socket.set_hwm(0)  # what may wait is bounded by bytes, at those who send and read
            socket.connect(self._runtime.address(name))
        parts: dict[str, list[bytes]] = {}
        while True:
            try:
                frame = decoder.decode(self._channel.receive())
            except (ChannelError, msgspec.DecodeError) as error:
                self._end(f"it is gone: {error}")
                return
            self._heard += 1
            match frame:
                case Passed() if frame.socket not in outlets:
                    self._end(f"it has a message for {frame.socket!r}, which nothing reads here")
                    return
                case Passed():
                    parts.setdefault(frame.socket, []).append(frame.part)
                    if not frame.more:
                        outlets[frame.socket].send(b"".join(parts.pop(frame.socket)))
                case Over():
                    self._end(frame.why)
                    return
                case Beat():
                    pass

    def _end(self, why: str) -> None:
        if not self._closing.is_set() and self._once.acquire(blocking=False):
            self._ended(why)

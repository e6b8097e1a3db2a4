"""Messages of a member's engine between two machines, and what each hears of the other's end."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
import zmq

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.agent import relay
from radixgrove.worker.agent.relay import Beat, Over, Passed, Relay
from radixgrove.worker.parallel.channel import Channel
from radixgrove.worker.runtime import Runtime

SETTINGS = WorkerSettings(dp=2, nodes=2, frontends=1)


class Pair:
    """Machine 0 with a frontend, machine 1 with the engine of member 1."""

    def __init__(self, here: Path, there: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.first, self.second = (Runtime(path, SETTINGS, path) for path in (here, there))
        self.relays: dict[int, Relay] = {}
        ours, theirs = socket.socketpair()
        self.ends: dict[int, SimpleQueue[str]] = {0: SimpleQueue(), 1: SimpleQueue()}
        self.channels = [Channel(ours, b"a", b"b"), Channel(theirs, b"b", b"a")]

    def start(self, *machines: int) -> None:
        engines, peers = self.first.engine_sockets([1]), self.first.peer_sockets([1])
        for machine in machines or (0, 1):
            runtime, inlets, outlets = [
                (self.first, engines, peers),
                (self.second, peers, engines),
            ][machine]
            end = self.ends[machine].put
            self.relays[machine] = Relay(runtime, self.channels[machine], inlets, outlets, end)
            self.relays[machine].start()

    def reader(self, address: str) -> zmq.Socket[bytes]:
        made = self.context.socket(zmq.PULL)
        made.setsockopt(zmq.RCVTIMEO, 30_000)
        made.bind(address)
        return made

    def writer(self, address: str) -> zmq.Socket[bytes]:
        made = self.context.socket(zmq.PUSH)
        made.connect(address)
        return made


@pytest.fixture
def pair() -> Iterator[Pair]:
    # Not under tmp_path: a Unix socket's path may have 107 bytes.
    with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
        made = Pair(Path(here), Path(there))
        yield made
        for each in made.relays.values():
            each.close()
        for channel in made.channels:
            channel.close()
        made.context.destroy(linger=0)


def test_messages_reach_the_socket_of_their_name_in_both_directions(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_PART_BYTES", 100)
    engine = pair.reader(pair.second.engine_socket(1))
    frontend = pair.reader(pair.first.frontend_socket(0, 1))
    agent = pair.reader(pair.first.agent_socket(1))
    pair.start()
    prompt = bytes(range(256)) * 4
    to_engine = pair.writer(pair.first.engine_socket(1))
    for message in (prompt, b"short", b""):
        to_engine.send(message)
    assert [engine.recv() for _ in range(3)] == [prompt, b"short", b""]
    pair.writer(pair.second.frontend_socket(0, 1)).send(b"tokens")
    pair.writer(pair.second.agent_socket(1)).send(b"pulse")
    assert (frontend.recv(), agent.recv()) == (b"tokens", b"pulse")


@pytest.mark.parametrize("why", ["", "engine rank 0 was killed"])
def test_the_end_is_told_with_its_reason(pair: Pair, why: str) -> None:
    pair.start()
    pair.relays[0].close(why)
    assert pair.ends[1].get(timeout=30) == why
    assert pair.ends[0].empty(), "it knows already"


def test_a_machine_that_is_gone_is_lost(pair: Pair) -> None:
    pair.start()
    pair.channels[1].close()
    assert pair.ends[0].get(timeout=30).startswith("it is gone")


def test_messages_that_nothing_reads_any_more_hold_up_no_end(pair: Pair) -> None:
    pair.start(0)
    for name in pair.first.peer_sockets([1]):
        pair.channels[1].send(msgspec.msgpack.encode(Passed(name, b"unread")), 1.0)
    pair.channels[1].send(msgspec.msgpack.encode(Over()), 1.0)
    assert pair.ends[0].get(timeout=30) == ""
    ending = threading.Thread(target=pair.relays.pop(0).close, daemon=True)
    ending.start()
    ending.join(30.0)
    assert not ending.is_alive()


def test_a_machine_that_says_nothing_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SILENCE_SECONDS", 0.6)
    pair.start(0)
    pair.channels[1].send(msgspec.msgpack.encode(Beat()), 1.0)
    assert pair.ends[0].get(timeout=30) == "it has said nothing for 1 s: frozen, or cut off"


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"\x00" * 100, "it is gone"),
        (msgspec.msgpack.encode(Passed("engine-0", b"x")), "it has a message for 'engine-0'"),
    ],
)
def test_a_frame_that_is_none_of_ours_ends_the_group(pair: Pair, frame: bytes, words: str) -> None:
    pair.start(0)
    pair.channels[1].send(frame, 1.0)
    assert pair.ends[0].get(timeout=30).startswith(words)

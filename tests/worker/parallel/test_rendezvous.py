"""Who may join a group, and what becomes of everybody else; over TCP, as between machines."""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.parallel import rendezvous
from radixgrove.worker.parallel.channel import Channel, ChannelError, receive_exactly
from radixgrove.worker.parallel.identity import Identity
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.parallel.rendezvous import (
    Gathering,
    JoinRefused,
    MeetingPoint,
    Party,
    RankMissing,
    join,
)
from tests.conftest import find_free_port, wait_until

IDENTITY = Identity(token=b"a token", version="1", settings="5e771265", model="30de1")
LAYOUT = Layout(pp=3, nodes=3)
PARTY = Party.of_member(LAYOUT)


class Meeting:
    """Rank 0 of three, each on a machine of its own, waiting for the others."""

    def __init__(self) -> None:
        self.point = MeetingPoint(host="127.0.0.1", port=find_free_port())
        self._pool = ThreadPoolExecutor()
        gathering = Gathering(self.point, IDENTITY, PARTY)
        self.gathered: Future[dict[int, Channel]] = self._pool.submit(gathering.wait, 30.0)

    def join(self, rank: int, identity: Identity = IDENTITY) -> Channel:
        return join(self.point, identity, rank, 30.0, PARTY)

    def complete(self, *ranks: int) -> dict[int, Channel]:
        """The right ones still join; rank 0's channels."""
        theirs = {rank: self.join(rank) for rank in ranks}
        channels = self.gathered.result(30.0)
        assert sorted(channels) == [1, 2]
        for rank, channel in theirs.items():
            channel.send(b"from %d" % rank, 5.0)
            assert channels[rank].receive() == b"from %d" % rank
            channels[rank].send(b"to %d" % rank, 5.0)
            assert channel.receive() == b"to %d" % rank
        return channels

    def connect(self) -> socket.socket:
        return self.point.connect(5.0)

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    started = Meeting()
    # The socket listens once somebody gets a nonce from it.
    wait_until(lambda: _answers(started.point), what="rank 0's socket")
    yield started
    if not started.gathered.done():
        for rank in (1, 2):
            with suppress(RankMissing, JoinRefused):
                started.join(rank)
    started.close()


def _answers(point: MeetingPoint) -> bool:
    try:
        point.connect(1.0).close()
    except OSError:
        return False
    return True


def test_ranks_that_prove_themselves_join_in_any_order(meeting: Meeting) -> None:
    meeting.complete(2, 1)


@pytest.mark.parametrize(
    ("identity", "words"),
    [
        (replace(IDENTITY, version="2"), "it has another version: 2, not 1"),
        (replace(IDENTITY, settings="bad"), "it has another settings: bad, not 5e771265"),
        (replace(IDENTITY, model="other"), "it has another model: other, not 30de1"),
    ],
)
def test_another_version_settings_or_model_is_refused_and_said(
    meeting: Meeting, identity: Identity, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(JoinRefused, match=words):
        meeting.join(1, identity)
    wait_until(lambda: words in caplog.text, what="the refusal in the log")
    assert "refused a peer at 127.0.0.1: rank 1" in caplog.text
    meeting.complete(1, 2)


def test_a_wrong_token_is_refused_without_a_word(
    meeting: Meeting, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(JoinRefused, match=r"rank 1 was not let in at 127\.0\.0\.1"):
        meeting.join(1, replace(IDENTITY, token=b"of an older attempt"))
    wait_until(lambda: "a frame has a wrong digest" in caplog.text, what="the refusal in the log")
    meeting.complete(1, 2)


def test_a_host_that_ended_in_the_middle_of_the_meeting_is_met_when_it_is_back() -> None:
    """As a container that is started again."""
    point, layout = MeetingPoint(host="127.0.0.1", port=find_free_port()), Layout(pp=2, nodes=2)
    party = Party.of_member(layout)
    with ThreadPoolExecutor() as pool:
        with point.listen() as first:
            joining = pool.submit(join, point, IDENTITY, 1, 30.0, party)
            sock, _ = first.accept()
            sock.sendall(secrets.token_bytes(32))
            sock.close()
        channels = Gathering(point, IDENTITY, party).wait(30.0)
        channels[1].send(b"welcome", 5.0)
        assert joining.result(30.0).receive() == b"welcome"


@pytest.mark.parametrize("rank", [0, 3, -1])
def test_a_rank_that_the_group_does_not_have_is_refused(meeting: Meeting, rank: int) -> None:
    with pytest.raises(JoinRefused, match="the group has ranks 0 to 2"):
        meeting.join(rank)
    meeting.complete(1, 2)


def test_a_rank_is_there_once_and_may_come_again_when_it_is_gone(meeting: Meeting) -> None:
    first = meeting.join(1)
    first.send(b"a heartbeat, which rank 0 does not read yet", 5.0)
    with pytest.raises(JoinRefused, match="the group has this rank already"):
        meeting.join(1)
    first.close()
    meeting.complete(1, 2)


def test_a_peer_that_cannot_be_accepted_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(errno.ECONNABORTED, "gone"), OSError(errno.EMFILE, "too many files")]
    accept = socket.socket.accept

    def stumbling(listener: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", stumbling)
    monkeypatch.setattr(rendezvous, "_ACCEPT_AGAIN_SECONDS", 0.01)
    meeting = Meeting()
    meeting.complete(1, 2)
    meeting.close()
    assert caplog.text.count("could not take a peer") == 2


class _Recorder:
    """Between a rank and rank 0: keeps what the rank says."""

    def __init__(self, target: MeetingPoint) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.point = MeetingPoint(host="127.0.0.1", port=self._listener.getsockname()[1])
        self.said = b""
        self._thread = threading.Thread(target=self._relay)
        self._thread.start()

    def _relay(self) -> None:
        rank, _ = self._listener.accept()
        with rank, self._target.connect(5.0) as host:
            rank.sendall(receive_exactly(host, 32))
            self.said = rank.recv(4096)
            host.sendall(self.said)
            rank.sendall(host.recv(4096))
            rank.recv(1)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def test_a_recorded_proof_proves_nothing(
    meeting: Meeting, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = _Recorder(meeting.point)
    through = join(recorder.point, IDENTITY, 1, 30.0, PARTY)
    through.close()
    recorder.close()

    with meeting.connect() as replay:
        receive_exactly(replay, 32)
        replay.sendall(recorder.said)
        assert replay.recv(1) == b"", "closed without an answer"
    wait_until(lambda: "a frame has a wrong digest" in caplog.text, what="the refusal in the log")
    meeting.complete(1, 2)


def test_noise_and_silence_keep_nobody_out(
    meeting: Meeting, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with meeting.connect(), meeting.connect() as noisy, meeting.connect() as endless:
        noisy.sendall(secrets.token_bytes(10_000))
        endless.sendall(struct.pack("<I", (1 << 32) - 1) + bytes(32))
        meeting.complete(1, 2)
        wait_until(lambda: caplog.text.count("bytes is announced") >= 1, what="refusals in the log")


def test_a_name_that_is_not_known_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine's own may come to name servers after it has started."""
    failures = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")] * 2
    listen = MeetingPoint.listen

    def unknown(point: MeetingPoint) -> socket.socket:
        if failures:
            raise failures.pop()
        return listen(point)

    monkeypatch.setattr(MeetingPoint, "listen", unknown)
    monkeypatch.setattr(rendezvous, "_NAME_AGAIN_SECONDS", 0.01)
    meeting = Meeting()
    meeting.complete(1, 2)
    meeting.close()
    assert caplog.text.count("yet: Name or service not known") == 1


def test_a_name_that_stays_unknown_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_NAME_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "_NAME_AGAIN_SECONDS", 0.01)
    point = MeetingPoint(host="no-such-machine.invalid", port=find_free_port())
    monkeypatch.setattr(socket, "getaddrinfo", _unknown)
    with pytest.raises(socket.gaierror):
        Gathering(point, IDENTITY, PARTY).wait(30.0)


def _unknown(*_: object, **__: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_missing_ranks_are_named_with_their_machines() -> None:
    gathering = Gathering(
        MeetingPoint(host="127.0.0.1", port=find_free_port()),
        IDENTITY,
        Party.of_member(Layout(2, 2, 1, 2)),
    )
    with pytest.raises(RankMissing) as error:
        gathering.wait(0.2)
    assert "rank 1 (machine 0), rank 2 (machine 1), rank 3 (machine 1)" in str(error.value)


def test_a_rank_without_a_group_says_where_it_looked() -> None:
    point = MeetingPoint(host="127.0.0.1", port=find_free_port())
    with pytest.raises(RankMissing, match=rf"rank 0 was not at 127\.0\.0\.1:{point.port} within"):
        join(point, IDENTITY, 1, 0.2, PARTY)


# ---- what the group goes by ----------------------------------------------------------------------


def settings(**changes: object) -> WorkerSettings:
    base = {"tp": 2, "nodes": 2, "master": "svc-0-a1-0.svc:29500", "internal_key": "k" * 16}
    return WorkerSettings.model_validate({**base, **changes})


def test_what_belongs_to_a_machine_does_not_part_a_group(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    own = Identity.of(settings(), tmp_path)
    other = Identity.of(
        settings(node_rank=1, host="10.0.0.2", replica_id="b", log_level="debug"), tmp_path
    )
    assert own == other


@pytest.mark.parametrize(
    "changes", [{"master": "svc-0-a2-0.svc:29500"}, {"internal_key": "another key"}]
)
def test_another_attempt_or_another_key_is_another_token(
    changes: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Identity.of(settings(), tmp_path).token != (
        Identity.of(settings(**changes), tmp_path).token
    )


def test_settings_that_shape_steps_part_a_group(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    own = Identity.of(settings(), tmp_path)
    assert own.settings != Identity.of(settings(page_size=32), tmp_path).settings
    config = tmp_path / "config.json"
    config.write_text(config.read_text() + "\n")
    assert own.model != Identity.of(settings(), tmp_path).model


# ---- channels ------------------------------------------------------------------------------------


def pair() -> tuple[Channel, socket.socket]:
    """A channel, and the bare other end of its connection."""
    ours, theirs = socket.socketpair()
    return Channel(ours, b"there", b"back"), theirs


def frame_of(payload: bytes, key: bytes) -> bytes:
    sender, receiver = socket.socketpair()
    Channel(sender, key, b"").send(payload, 1.0)
    sender.close()
    content = b""
    while piece := receiver.recv(65536):
        content += piece
    return content


def test_a_frame_is_taken_once() -> None:
    channel, other = pair()
    frame = frame_of(b"plan", b"back")
    other.sendall(frame + frame)
    assert channel.receive() == b"plan"
    with pytest.raises(ChannelError, match="wrong digest"):
        channel.receive()


def test_a_frame_that_was_changed_or_is_too_long_is_refused() -> None:
    channel, other = pair()
    frame = frame_of(b"plan", b"back")
    other.sendall(frame[:-1] + b"!")
    with pytest.raises(ChannelError, match="wrong digest"):
        channel.receive()
    channel, other = pair()
    other.sendall(frame_of(bytes(100), b"back"))
    with pytest.raises(ChannelError, match="100 bytes is announced, 99 are the most"):
        channel.receive(most=99)


def test_a_peer_that_takes_nothing_is_not_waited_for() -> None:
    channel, _other = pair()
    with pytest.raises(ChannelError, match="takes nothing more"):
        channel.send(bytes(8 << 20), 0.1)


def test_a_send_waits_for_another_thread_s_no_longer_than_it_may_take() -> None:
    """A heartbeat behind a long order: other ranks are yet to hear theirs."""
    channel, other = pair()
    long = Future[None]()

    def send_long() -> None:
        try:
            channel.send(bytes(8 << 20), 5.0)
        except ChannelError as error:
            long.set_exception(error)

    thread = threading.Thread(target=send_long)
    thread.start()
    other.recv(1)
    with pytest.raises(ChannelError, match="takes nothing more"):
        channel.send(b"beat", 0.05)
    assert not long.done()
    other.close()
    thread.join()
    assert isinstance(long.exception(), ChannelError)


def test_a_frame_that_came_too_late_to_be_sent_leaves_no_gap() -> None:
    """The next one still has the number that the peer expects."""
    channel, other = pair()
    far = Channel(other, b"back", b"there")
    with pytest.raises(ChannelError, match="takes nothing more"):
        channel.send(b"beat", 0.0)
    channel.send(b"order", 5.0)
    assert far.receive() == b"order"


def test_a_peer_keeps_its_name_when_its_connection_is_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    channel = Channel(near, b"there", b"back")
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()  # with a reset
    with pytest.raises(ChannelError):
        channel.receive()
    assert channel.peer == "127.0.0.1"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"port": 9}, True),
        ({"cors_origins": ["https://a.example"]}, True),
        ({"max_bodies_bytes": 1 << 30}, True),
        ({"tools_strict": False}, True),
        ({"grammar_threads": 1}, True),
        ({"kv_dtype": "fp8_e4m3"}, False),
        ({"max_step_tokens": 64}, False),
    ],
)
def test_machines_agree_on_what_their_ranks_compute_and_not_on_what_frontends_do(
    change: dict[str, Any], same: bool, tmp_path: Path
) -> None:
    one, other = (
        Identity.of(WorkerSettings.model_validate(settings), tmp_path)
        for settings in ({"nodes": 2, "pp": 2}, {"nodes": 2, "pp": 2, **change})
    )
    assert (one.settings == other.settings) == same

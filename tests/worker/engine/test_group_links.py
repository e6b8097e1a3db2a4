"""Who is named when a group loses a rank, and that no process stays behind; over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from radixgrove.worker.engine import group_links
from radixgrove.worker.engine.group_links import FollowerLink, LeaderLinks
from radixgrove.worker.engine.orders import (
    Alive,
    Compared,
    End,
    Failed,
    Launch,
    Order,
    Progress,
    Report,
    Sample,
    Sampled,
)
from radixgrove.worker.parallel.channel import Channel, ChannelError
from radixgrove.worker.parallel.crew import Crew
from radixgrove.worker.parallel.layout import Layout
from radixgrove.worker.parallel.rendezvous import RankMissing
from radixgrove.worker.plan import StepPlan, StepResult
from tests.conftest import wait_until

LAYOUT = Layout(pp=3, nodes=3)
FAR = 1000.0  # seconds


def connection() -> tuple[Channel, Channel]:
    """Both ends."""
    ours, theirs = socket.socketpair()
    return Channel(ours, b"out", b"in"), Channel(theirs, b"in", b"out")


class Rank:
    """Another rank, which says what the test wants."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.orders: list[Order] = []
        self.ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                order = msgspec.msgpack.decode(self.channel.receive(), type=Order)
            except ChannelError:
                self.ended.set()
                return
            self.orders.append(order)
            if isinstance(order, End):
                self.channel.close()

    def say(self, report: Report) -> None:
        self.channel.send(msgspec.msgpack.encode(report), 1.0)


class Group:
    """Rank 0 of three, at work."""

    def __init__(self) -> None:
        ends = {rank: connection() for rank in (1, 2)}
        self.ranks = {rank: Rank(theirs) for rank, (_, theirs) in ends.items()}
        self.given_up: list[str] = []
        crew = Crew(LAYOUT, LAYOUT.place(0), {rank: ours for rank, (ours, _) in ends.items()})
        self.links = LeaderLinks(crew, self.given_up.append)
        self.links.serving = True

    def launch(self, seconds: float = FAR) -> None:
        self.links.launched(seconds)
        self.links.send(Launch(StepPlan(step_id=1)))
        self.links.carried_out()

    def loss(self) -> str:
        """What the main thread hears that waits for a result."""
        with pytest.raises(RankMissing) as error:
            self.links.await_result()
        return str(error.value)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience of tenths of a second."""
    monkeypatch.setattr(group_links, "SILENCE_SECONDS", 0.6)
    monkeypatch.setattr(group_links, "START_SILENCE_SECONDS", 0.6)
    monkeypatch.setattr(group_links, "_RETURN_SECONDS", 0.2)
    monkeypatch.setattr(group_links, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(group_links, "BEAT_SECONDS", 0.1)


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.links.close()


def test_orders_reach_every_rank_and_results_come_back(group: Group) -> None:
    group.launch()
    group.ranks[2].say(Sampled(StepResult(step_id=1, tokens=[5])))
    assert group.links.await_result().tokens == [5]
    for rank in group.ranks.values():
        wait_until(lambda rank=rank: Launch(StepPlan(step_id=1)) in rank.orders, what="the order")  # type: ignore[misc]
        wait_until(lambda rank=rank: Alive() in rank.orders, what="a heartbeat")  # type: ignore[misc]


def test_a_rank_that_ends_is_named_with_its_machine(group: Group) -> None:
    group.launch()
    group.ranks[1].channel.close()
    assert group.loss() == "rank 1 (machine 1) is gone"


def test_last_words_are_passed_on(group: Group) -> None:
    group.launch()
    group.ranks[2].say(Failed("out of memory"))
    assert group.loss() == "rank 2 (machine 2) failed: out of memory"


def test_a_death_goes_before_the_failures_it_causes(group: Group) -> None:
    group.launch()
    group.ranks[2].say(Failed("connection closed by peer"))
    group.ranks[1].channel.close()
    assert group.loss() == "rank 1 (machine 1) is gone"


def test_silence_is_a_loss(quick: None, group: Group) -> None:
    group.launch()
    beating = threading.Event()

    def beat() -> None:
        while not beating.wait(0.05):
            group.ranks[1].say(Progress(0, waits=True))

    thread = threading.Thread(target=beat)
    thread.start()
    loss = group.loss()
    beating.set()
    thread.join()
    assert loss.startswith("rank 2 (machine 2) has said nothing for")


def test_a_step_past_its_deadline_is_the_fault_of_who_waits_for_no_other(
    quick: None, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_links, "SILENCE_SECONDS", FAR)
    group.ranks[1].say(Progress(0, waits=False))
    group.ranks[2].say(Progress(0, waits=True))
    wait_until(lambda: all(p.signs for p in group.links._peers.values()), what="their words")
    group.launch(seconds=0.3)
    assert group.loss() == "rank 1 (machine 1) did not end a step within 0 s"


@pytest.mark.parametrize(
    ("ended", "names"),
    [
        ((1, 0, 0), "rank 1 (machine 1)"),
        ((1, 1, 0), "rank 2 (machine 2)"),
        ((0, 0, 0), "rank 0 (machine 0)"),
    ],
)
def test_of_stages_that_launched_a_step_the_first_that_has_not_ended_it_is_named(
    ended: tuple[int, int, int], names: str, quick: None, group: Group
) -> None:
    group.links.steps_ended = lambda: ended[0]
    beating = threading.Event()

    def beat() -> None:
        while not beating.wait(0.05):
            for rank, peer in group.ranks.items():
                peer.say(Progress(1, waits=False, ended=ended[rank]))

    thread = threading.Thread(target=beat)
    thread.start()
    group.launch(seconds=0.3)
    loss = group.loss()
    beating.set()
    thread.join()
    assert loss == f"{names} did not end a step within 0 s"


def test_rank_0_itself_may_be_the_one_that_hangs(
    quick: None, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_links, "SILENCE_SECONDS", FAR)
    for rank in group.ranks.values():
        rank.say(Progress(0, waits=True))
    wait_until(lambda: all(p.signs for p in group.links._peers.values()), what="their words")
    group.links.launched(0.3)
    group.links.send(Sample())
    wait_until(lambda: bool(group.given_up), what="the end of the process")
    assert group.given_up == ["rank 0 (machine 0) did not end a step within 0 s"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (Compared(1, b"plan", b"other"), "in step 1 rank 2 (machine 2) drew other tokens"),
        (Compared(1, b"other", b"drawn"), "in step 1 rank 2 (machine 2) ran another plan"),
    ],
)
def test_ranks_that_differ_are_named_with_the_step(
    said: Compared, words: str, group: Group
) -> None:
    group.launch()
    group.links.agreement.expect(Compared(0, b"", b""))
    for rank, peer in group.ranks.items():
        peer.say(Compared(0, b"", b"of no stage but the last" if rank == 1 else b""))
        peer.say(said if rank == 2 else Compared(1, b"plan", b""))
    group.links.agreement.expect(Compared(1, b"plan", b"drawn"))
    assert group.loss() == words


def test_a_main_thread_that_hangs_is_ended(quick: None, group: Group) -> None:
    group.launch()
    group.ranks[1].channel.close()
    wait_until(lambda: bool(group.given_up), what="the end of the process")
    assert group.given_up == ["rank 1 (machine 1) is gone"]


def test_the_group_ends_in_order(group: Group) -> None:
    group.links.close()
    for rank in group.ranks.values():
        assert rank.ended.wait(30.0)
        assert rank.orders[-1] == End()
    assert group.given_up == []


# ---- another rank's end --------------------------------------------------------------------------


def follower() -> tuple[FollowerLink, Channel, list[str]]:
    host, own = connection()
    given_up: list[str] = []
    return FollowerLink(Crew(LAYOUT, LAYOUT.place(1), {0: own}), given_up.append), host, given_up


def test_a_rank_that_loses_rank_0_hears_of_it() -> None:
    link, host, _ = follower()
    host.close()
    with pytest.raises(RankMissing, match=r"rank 0 \(machine 0\) is gone"):
        link.next_order()


def test_a_rank_that_hears_nothing_of_rank_0_ends(quick: None) -> None:
    _link, host, given_up = follower()
    host.send(msgspec.msgpack.encode(Alive()), 1.0)
    wait_until(lambda: bool(given_up), what="the end of the process")
    assert given_up[0].startswith("rank 0 (machine 0) has said nothing for 1 s")


def test_rank_0_is_waited_for_while_it_waits_for_others(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first word comes once all have joined."""
    monkeypatch.setattr(group_links, "FIRST_WORD_SECONDS", 2.0)
    _link, _host, given_up = follower()
    wait_until(lambda: bool(given_up), what="the end of the process")
    assert given_up[0].startswith("rank 0 (machine 0) has said nothing for 2 s")


def test_a_rank_that_hangs_while_the_group_ends_is_ended(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_links, "_END_SECONDS", 0.2)
    _link, host, given_up = follower()
    host.send(msgspec.msgpack.encode(End()), 1.0)
    wait_until(lambda: bool(given_up), what="the end of the process")


def test_a_rank_that_hears_of_the_end_goes_by_itself() -> None:
    link, host, given_up = follower()
    host.send(msgspec.msgpack.encode(End()), 1.0)
    assert link.next_order() is None
    link._reader.join(30.0)
    assert given_up == []


def test_a_rank_says_how_far_it_is() -> None:
    link, host, _ = follower()
    link.carried_out()
    with link.activity:
        report = msgspec.msgpack.decode(host.receive(), type=Report)
    assert report == Progress(1, waits=True)
    link.close()

"""Channels of a member at work: orders one way, reports the other, and heartbeats both ways.

Each end has a thread that reads and one that watches, so that neither a frozen rank nor a silent
network leaves anybody in a collective for ever: who is lost is found within seconds, and a main
thread that does not come back from its collective by itself is ended with its process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

import msgspec

from radixgrove.service.liveness import WatchClock
from radixgrove.worker.engine.agreement import Agreement
from radixgrove.worker.engine.orders import (
    BEAT_SECONDS,
    SEND_SECONDS,
    SILENCE_SECONDS,
    START_SILENCE_SECONDS,
    Alive,
    Compared,
    End,
    Failed,
    Order,
    Progress,
    Report,
    Sampled,
    Step,
)
from radixgrove.worker.parallel.channel import Channel, ChannelError
from radixgrove.worker.parallel.crew import Crew
from radixgrove.worker.parallel.group import Activity
from radixgrove.worker.parallel.member import StorePlace
from radixgrove.worker.parallel.rendezvous import FIRST_WORD_SECONDS, RankMissing
from radixgrove.worker.plan import StepResult

_LOOK_SECONDS = 0.25
_SYMPTOMS_SECONDS = 0.3  # after the first sign of a loss: of several, the cause is named
_RETURN_SECONDS = 2.0  # for the main thread to find out by itself
_END_SECONDS = 3.0  # for the main thread to hear of the end, which may wait for a rank that is lost
_ANSWER_SECONDS = 1.0  # for the cause of a failed collective to show

GiveUp = Callable[[str], None]  # ends the process; the text names who is lost


def _none() -> int:
    return 0


@dataclass(slots=True)
class _Peer:
    """What rank 0 knows of another rank."""

    channel: Channel
    signs: int = 0  # frames received
    orders: int = 0
    waits: bool = False
    ended: int = 0
    gone: bool = False
    last_words: str | None = None


@dataclass(slots=True)
class _Watched:
    """When the watch has last seen something change, on its own clock."""

    value: object = None
    since: float = 0.0

    def age(self, value: object, now: float) -> float:
        if value != self.value:
            self.value, self.since = value, now
        return now - self.since


@dataclass(slots=True)
class _Flights:
    """Steps in flight, as rank 0 sees them."""

    allowances: deque[float] = field(default_factory=deque)  # seconds, once it is the oldest
    collected: int = 0


class LeaderLinks:
    """The leader's end of all channels; rank 0's, where the group has one member."""

    def __init__(self, crew: Crew, give_up: GiveUp) -> None:
        self.crew = crew
        self.activity = Activity()  # of rank 0's main thread; replaced once it has groups
        self.steps_ended: Callable[[], int] = _none  # on its device; replaced once it runs steps
        self.serving = False  # the start is over: ranks answer at once from here on
        # For debugging: of what ranks say in that case.
        others, layout = crew.channels.keys(), crew.layout
        sampling = [rank for rank in others if layout.place(rank).stage == layout.pp - 1]
        self.agreement = Agreement(others, sampling, crew.name)
        self._give_up = give_up
        self._peers = {rank: _Peer(channel) for rank, channel in crew.channels.items()}
        self._changed = threading.Condition()
        self._results: deque[StepResult] = deque()
        self._flights = _Flights()
        self._encoder = msgspec.msgpack.Encoder()
        self._sent = 0  # steps' orders
        self._own_orders = 0
        self._verdict: str | None = None
        self._noticed = False  # the main thread knows
        self._ended = threading.Event()
        for rank in self._peers:
            threading.Thread(target=self._read, args=(rank,), daemon=True).start()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    # ---- rank 0's main thread --------------------------------------------------------------------

    def send(self, order: Step | StorePlace) -> None:
        """Send an order to every rank.

        Raises:
            RankMissing: a rank is lost.
        """
        frame = self._encoder.encode(order)
        self._sent += isinstance(order, Step)
        for rank, peer in self._peers.items():
            try:
                peer.channel.send(frame, SEND_SECONDS)
            except ChannelError as error:
                raise self.blame(RuntimeError(f"{self.crew.name(rank)}: {error}")) from error

    def carried_out(self) -> None:
        """Rank 0 has carried out an order too."""
        self._own_orders += 1

    def launched(self, allowance: float) -> None:
        """A step is in flight, with so many seconds from the moment it is the oldest."""
        self._flights.allowances.append(allowance)

    def collected(self) -> None:
        self._flights.allowances.popleft()
        self._flights.collected += 1

    def await_result(self) -> StepResult:
        """The last stage's next result.

        Raises:
            RankMissing: a rank is lost.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._verdict is not None)
            if self._results:
                return self._results.popleft()
            self._noticed = True
            raise RankMissing(self._verdict)

    def blame(self, error: Exception) -> RankMissing:
        """The cause of a failure here: a rank that is lost, if one is.

        When a rank dies, the others' collectives fail too: theirs are symptoms.
        """
        with self._changed:
            self._noticed = True
            # A rank that is cut off may be known by its silence alone.
            patience = SILENCE_SECONDS if self.activity.broke else 0.0
            self._changed.wait_for(lambda: self._verdict is not None, patience + _ANSWER_SECONDS)
            return RankMissing(
                self._verdict or f"a step failed on rank {self.crew.leader}: {error}"
            )

    def close(self) -> None:
        """End the other ranks in order."""
        self._ended.set()
        frame = self._encoder.encode(End())
        for peer in self._peers.values():
            with suppress(ChannelError):  # it is gone already
                peer.channel.send(frame, _ANSWER_SECONDS)
        with self._changed:  # closed sooner, a channel might take the frame with it
            peers = self._peers.values()
            self._changed.wait_for(lambda: all(peer.gone for peer in peers), _ANSWER_SECONDS)
        self.crew.close()
        self._watcher.join(_ANSWER_SECONDS)

    # ---- reports ---------------------------------------------------------------------------------

    def _read(self, rank: int) -> None:
        peer = self._peers[rank]
        decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        while True:
            try:
                report = decoder.decode(peer.channel.receive())
            except (ChannelError, msgspec.DecodeError):
                with self._changed:
                    peer.gone = True
                    self._changed.notify_all()
                return
            with self._changed:
                peer.signs += 1
                match report:
                    case Progress():
                        peer.orders, peer.waits = report.orders, report.waits
                        peer.ended = report.ended
                    case Sampled():
                        self._results.append(report.result)
                        self._changed.notify_all()
                    case Compared():
                        self.agreement.hear(rank, report)
                    case Failed():
                        peer.last_words = report.error

    # ---- watch -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        clock = WatchClock()
        alive = self._encoder.encode(Alive())
        signs = {rank: _Watched(since=clock.now()) for rank in self._peers}
        oldest = _Watched(since=clock.now())
        beaten = -BEAT_SECONDS
        while not self._ended.wait(_LOOK_SECONDS):
            now = clock.now()
            if now - beaten >= BEAT_SECONDS:
                beaten = now
                self._beat(alive)
            lost = (
                self._fallen()
                or self._silent(signs, now)
                or self._overdue(oldest, now)
                or self.agreement.difference
            )
            if lost and not self._ended.is_set():
                self._judge(lost)
                return

    def _beat(self, frame: bytes) -> None:
        for peer in self._peers.values():
            with suppress(ChannelError):  # its reader finds out, or its silence does
                peer.channel.send(frame, BEAT_SECONDS)

    def _fallen(self) -> str | None:
        """Ranks that ended: those that could not say why, for their end is the others' reason."""
        if not any(peer.gone or peer.last_words for peer in self._peers.values()):
            return None
        self._ended.wait(_SYMPTOMS_SECONDS)
        silent = [r for r, peer in self._peers.items() if peer.gone and not peer.last_words]
        if silent:
            return f"{self._names(silent)} is gone"
        words = ((r, p.last_words) for r, p in self._peers.items() if p.last_words)
        return "; ".join(f"{self.crew.name(rank)} failed: {text}" for rank, text in words)

    def _silent(self, signs: dict[int, _Watched], now: float) -> str | None:
        limit = SILENCE_SECONDS if self.serving else START_SILENCE_SECONDS
        ages = {rank: signs[rank].age(peer.signs, now) for rank, peer in self._peers.items()}
        silent = [rank for rank, age in ages.items() if age > limit]
        # Those that fall silent together are lost together: a machine, or its link.
        silent = [rank for rank, age in ages.items() if silent and age > limit - BEAT_SECONDS]
        if not silent:
            return None
        return f"{self._names(silent)} has said nothing for {limit:.0f} s: frozen, or cut off"

    def _overdue(self, oldest: _Watched, now: float) -> str | None:
        """Which ranks keep the oldest step in flight beyond its deadline; None within it.

        Named are the first that applies: ranks that have not carried out an order and wait for no
        other rank, ranks that have not carried one out, ranks whose device has not ended the step.
        """
        flights = self._flights
        try:
            allowance: float | None = flights.allowances[0]
        except IndexError:
            allowance = None
        age = oldest.age((flights.collected, allowance is not None), now)
        if allowance is None or age <= allowance:
            return None
        behind = [r for r, peer in self._peers.items() if peer.orders < self._sent]
        stuck = [rank for rank in behind if not self._peers[rank].waits]
        own = self.crew.leader
        if self._own_orders < self._sent:
            behind.insert(0, own)
            if not self.activity.waits:
                stuck.insert(0, own)
        names = self._names(stuck or behind or self._unfinished())
        return f"{names} did not end a step within {allowance:.0f} s"

    def _unfinished(self) -> list[int]:
        """Ranks whose device has not ended the oldest step, once all have launched it.

        Of several pipeline stages the first one counts: later ones wait for it.
        """
        crew = self.crew
        ended = {crew.leader: self.steps_ended()}
        ended |= {rank: peer.ended for rank, peer in self._peers.items()}
        hanging = [rank for rank, steps in ended.items() if steps <= self._flights.collected]
        stages = {rank: crew.layout.place(rank).stage for rank in hanging}
        first = min(stages.values(), default=0)
        return [rank for rank in hanging if stages[rank] == first] or [crew.leader]

    def _judge(self, lost: str) -> None:
        with self._changed:
            self._verdict = lost
            self._changed.notify_all()
        deadline = time.monotonic() + _RETURN_SECONDS
        while time.monotonic() < deadline:
            if self._noticed or self._ended.wait(_LOOK_SECONDS):
                return
        self._give_up(lost)

    def _names(self, ranks: list[int]) -> str:
        return ", ".join(self.crew.name(rank) for rank in ranks)


class FollowerLink:
    """Another rank's end of its channel to its leader."""

    def __init__(self, crew: Crew, give_up: GiveUp) -> None:
        self.crew = crew
        self.activity = Activity()  # of the main thread; replaced once it has groups
        self.steps_ended: Callable[[], int] = _none  # on its device; replaced once it runs steps
        self._channel = crew.channels[crew.leader]
        self._give_up = give_up
        self._orders: SimpleQueue[Step | StorePlace | End | None] = SimpleQueue()
        self._encoder = msgspec.msgpack.Encoder()
        self._signs = 0
        self._done = 0
        self._started = False  # the first step has come
        self._lost: str | None = None
        self._ended = threading.Event()
        self._heard = threading.Event()  # the main thread knows that it is over
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, daemon=True).start()

    # ---- the main thread -------------------------------------------------------------------------

    def next_order(self, *, wait: bool = True) -> Step | StorePlace | None:
        """Rank 0's next order, or None when the group ends.

        Args:
            wait: until it comes.

        Raises:
            Empty: it has not come yet.
            RankMissing: rank 0 is lost.
        """
        order = self._orders.get(block=wait)
        if order is None:
            self._ended.set()
            raise RankMissing(self._lost)
        if isinstance(order, End):
            self._heard.set()
            return None
        self._started = self._started or isinstance(order, Step)
        return order

    def carried_out(self) -> None:
        self._done += 1

    def send_result(self, result: StepResult) -> None:
        """Raises ChannelError."""
        self._channel.send(self._encoder.encode(Sampled(result)), SEND_SECONDS)

    def compare(self, step: Compared) -> None:
        """Raises ChannelError."""
        self._channel.send(self._encoder.encode(step), SEND_SECONDS)

    def fail(self, error: Exception) -> None:
        """Say the last words."""
        with suppress(ChannelError):  # rank 0 is gone itself
            self._channel.send(self._encoder.encode(Failed(str(error))), _ANSWER_SECONDS)

    def close(self) -> None:
        self._ended.set()
        self._heard.set()
        self._channel.close()

    # ---- threads ---------------------------------------------------------------------------------

    def _read(self) -> None:
        decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
        while True:
            try:
                order = decoder.decode(self._channel.receive())
            except (ChannelError, msgspec.DecodeError) as error:
                self._lose(f"{self.crew.name(self.crew.leader)} is gone: {error}")
                return
            self._signs += 1
            if isinstance(order, End):
                self._end(order)
                return
            if not isinstance(order, Alive):
                self._orders.put(order)

    def _watch(self) -> None:
        clock = WatchClock()
        signs = _Watched(since=clock.now())
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(ChannelError):  # the reader finds out, or the silence does
                beat = Progress(self._done, self.activity.waits, self.steps_ended())
                self._channel.send(self._encoder.encode(beat), BEAT_SECONDS)
            limit = self._patience()
            if signs.age(self._signs, clock.now()) > limit:
                self._lose(f"{self.crew.name(self.crew.leader)} has said nothing for {limit:.0f} s")
                return

    def _patience(self) -> float:
        """Seconds that rank 0 may say nothing."""
        if not self._signs:
            return FIRST_WORD_SECONDS
        return SILENCE_SECONDS if self._started else START_SILENCE_SECONDS

    def _end(self, order: End) -> None:
        """Rank 0 ends the group, which it also does when another rank is lost."""
        self._ended.set()
        self._orders.put(order)
        if not self._heard.wait(_END_SECONDS):
            self._give_up("the group has ended, and a step here has not")

    def _lose(self, why: str) -> None:
        """Rank 0 is lost: end the main thread, with the process if it hears nothing any more."""
        if self._ended.is_set():
            return
        self._lost = why
        self._orders.put(None)
        if not self._ended.wait(_RETURN_SECONDS):
            self._give_up(why)

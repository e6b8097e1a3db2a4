"""The ranks of a member after their rendezvous, with a proven channel to each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from radixgrove.protocol.settings import WorkerSettings
from radixgrove.worker.parallel.channel import Channel
from radixgrove.worker.parallel.identity import Identity
from radixgrove.worker.parallel.layout import Layout, Place
from radixgrove.worker.parallel.rendezvous import (
    Gathering,
    MeetingPoint,
    Party,
    RankMissing,
    describe,
    join,
)


@dataclass(frozen=True, slots=True)
class Crew:
    """A rank, and its channels: the leader's to each of the others, theirs to the leader."""

    layout: Layout
    place: Place
    channels: dict[int, Channel]

    @property
    def leader(self) -> int:
        return self.layout.leader(self.place.member)

    def name(self, rank: int) -> str:
        """For people; with its machine, where there are several."""
        channel = self.channels.get(rank)
        return describe(rank, self.layout, channel.peer if channel is not None else "")

    @property
    def own_address(self) -> str:
        """On the network of the group; "" on one machine."""
        return next(iter(self.channels.values())).own_address

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


def meet(
    settings: WorkerSettings,
    model_dir: Path,
    directory: Path,
    rank: int,
    arrival: float | None = None,
) -> Crew:
    """Let all ranks of a member prove themselves to its leader, and it to them.

    Args:
        directory: the runtime directory, where ranks of one machine meet.
        arrival: seconds to wait for the others; None: as long as is usual.

    Raises:
        RankMissing: names the ranks that did not come in time.
        JoinRefused: this rank may not join.
        UnsupportedRanks: the ranks do not fit their machines.
    """
    layout = Layout.of(settings)
    place = layout.place(rank)
    point = MeetingPoint.of(directory, layout, settings.master, place.member)
    identity = Identity.of(settings, model_dir)
    seconds = point.arrival if arrival is None else arrival
    party = Party.of_member(layout, place.member)
    if not place.leads:
        leader = layout.leader(place.member)
        return Crew(layout, place, {leader: join(point, identity, rank, seconds, party)})
    try:
        channels = Gathering(point, identity, party).wait(seconds)
    except OSError as error:
        why = error.strerror or error  # a path that is too long has no number, and no text for it
        raise RankMissing(f"rank {rank} cannot listen at {point}: {why}") from error
    return Crew(layout, place, channels)

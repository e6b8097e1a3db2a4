"""Which groups a worker of this version runs, and how long their ranks wait for each other: the
worker and the operator ask the same questions."""

from __future__ import annotations

from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.words import counted

# Seconds that ranks have to come where they are on several machines: others may still pull their
# image.
ARRIVAL_SECONDS_APART = 600.0


class UnsupportedRanks(InvalidInput):
    """A group of which a worker would leave ranks idle, or which it cannot run."""


def check_places(*, tp: int, ranks: int, nodes: int) -> None:
    """Refuse ranks that do not fit their machines.

    Raises:
        UnsupportedRanks: the message names what would have to divide what.
    """
    if ranks % nodes:
        raise UnsupportedRanks(
            f"{counted(ranks, 'rank')} cannot be shared out evenly among {nodes} machines; nodes "
            "must divide tp * pp * dp"
        )
    if (ranks // nodes) % tp:
        raise UnsupportedRanks(
            f"{counted(ranks // nodes, 'rank')} on each of {counted(nodes, 'machine')} would "
            f"leave the tp {tp} ranks of a stage on two of them; tp must divide the ranks of a "
            "machine"
        )


def check_ranks(*, tp: int, pp: int, dp: int, ep: int, ranks: int, nodes: int) -> None:
    """Refuse a group of `ranks` on `nodes` that a worker with these settings does not run.

    Raises:
        UnsupportedRanks: the message names the group and what is wrong with it.
    """
    group = f"the group has {counted(ranks, 'rank')} on {counted(nodes, 'node')}"
    if ranks != tp * pp * dp:
        raise UnsupportedRanks(f"{group}, and tp {tp} * pp {pp} * dp {dp} is {tp * pp * dp}")
    check_places(tp=tp, ranks=ranks, nodes=nodes)
    sharing = tp * dp  # ranks that have a stage's experts among them
    if sharing % ep:
        possible = ", ".join(str(n) for n in range(1, sharing + 1) if sharing % n == 0)
        raise UnsupportedRanks(
            f"{group}, and ep {ep} does not divide tp * dp, which is {sharing}; possible: "
            f"{possible}"
        )
    if tp % ep:
        raise UnsupportedRanks(
            f"{group}, and ep {ep} does not divide tp {tp}: members share no experts"
        )
    if dp > 1 and (ranks // nodes) % (tp * pp):
        raise UnsupportedRanks(
            f"{group} in dp {dp} members, and {counted(ranks // nodes, 'rank')} on a machine make "
            f"no whole members of tp {tp} * pp {pp}: a member beside others is on one machine, so "
            "far"
        )

"""Where the ranks of a group stand: which machine, which member, which stage, which shard.

Ranks count up over the shards of a stage first, then over the stages of a member, then over the
members. So the `tp` ranks of a stage are neighbours, and on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixgrove.protocol.ranks import UnsupportedRanks, check_places
from radixgrove.protocol.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's."""

    rank: int  # of the group
    node: int
    local_rank: int  # on its machine, which is the index of its device
    member: int  # of `dp`
    stage: int  # of `pp`
    shard: int  # of `tp`

    @property
    def leads(self) -> bool:
        """Whether this rank has its member's scheduler, and sends orders to its other ranks."""
        return self.stage == 0 and self.shard == 0


@dataclass(frozen=True, slots=True)
class Layout:
    """`tp * pp * dp` ranks, equally many on each of `nodes` machines."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    nodes: int = 1

    def __post_init__(self) -> None:
        """Raises UnsupportedRanks."""
        check_places(tp=self.tp, ranks=self.size, nodes=self.nodes)

    @classmethod
    def of(cls, settings: WorkerSettings) -> Layout:
        """Raises UnsupportedRanks."""
        return cls(settings.tp, settings.pp, settings.dp, settings.nodes)

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def ranks_per_node(self) -> int:
        return self.size // self.nodes

    @property
    def ranks_per_member(self) -> int:
        return self.tp * self.pp

    def place(self, rank: int) -> Place:
        if not 0 <= rank < self.size:
            raise UnsupportedRanks(f"rank {rank} is not one of {self.size}")
        node, local_rank = divmod(rank, self.ranks_per_node)
        stages, shard = divmod(rank, self.tp)
        member, stage = divmod(stages, self.pp)
        return Place(rank, node, local_rank, member, stage, shard)

    def rank(self, member: int, stage: int, shard: int) -> int:
        return (member * self.pp + stage) * self.tp + shard

    @property
    def members_straddle(self) -> bool:
        """Whether members have ranks on several machines."""
        return self.ranks_per_member > self.ranks_per_node

    def members_of(self, node: int) -> range:
        """The members that a machine leads."""
        first, end = node * self.ranks_per_node, (node + 1) * self.ranks_per_node
        size = self.ranks_per_member
        return range(-(-first // size), -(-end // size))

    def ranks_of(self, node: int) -> range:
        """The ranks of a machine."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def ranks_of_member(self, member: int) -> range:
        """The ranks of a member, its leader first."""
        return range(member * self.ranks_per_member, (member + 1) * self.ranks_per_member)

    def leader(self, member: int) -> int:
        return self.rank(member, 0, 0)

    def shards(self, member: int) -> list[list[int]]:
        """The ranks of each stage of a member: they hold its shards, and sum over them."""
        ranks = self.ranks_of_member(member)
        return [list(ranks[first : first + self.tp]) for first in range(0, len(ranks), self.tp)]

    def last_stage(self, member: int) -> int:
        """The rank that gives the results of a member: the first shard of its last stage."""
        return self.rank(member, self.pp - 1, 0)


def lacks_device(local_rank: int, devices: int) -> str:
    """Why a rank has no device for itself on a machine with so many; "": it has one."""
    if local_rank < devices:
        return ""
    return (
        f"rank {local_rank} of this machine has no device: there are {devices}; lower tp, pp or "
        "dp, raise nodes, or let stages share devices with transport gloo"
    )

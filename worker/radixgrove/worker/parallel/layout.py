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

    def place(self, rank: int) -> Place:
        if not 0 <= rank < self.size:
            raise UnsupportedRanks(f"rank {rank} is not one of {self.size}")
        node, local_rank = divmod(rank, self.ranks_per_node)
        stages, shard = divmod(rank, self.tp)
        member, stage = divmod(stages, self.pp)
        return Place(rank, node, local_rank, member, stage, shard)

    def rank(self, member: int, stage: int, shard: int) -> int:
        return (member * self.pp + stage) * self.tp + shard

    def ranks_of(self, node: int) -> range:
        """The ranks of a machine."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def shards(self) -> list[list[int]]:
        """The ranks of each stage of each member: they hold its shards, and sum over them."""
        return [list(range(first, first + self.tp)) for first in range(0, self.size, self.tp)]

    def last_stage(self, member: int) -> int:
        """The rank that gives the results of a member: the first shard of its last stage."""
        return self.rank(member, self.pp - 1, 0)

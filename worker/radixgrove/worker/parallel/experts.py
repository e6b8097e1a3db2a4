"""Which experts the ranks of a stage hold."""

from __future__ import annotations

from dataclasses import dataclass

from radixgrove.worker.parallel.group import Shard


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Experts as the model numbers them (logical), and the places that ranks have for them
    (physical).

    The `tp` ranks of a stage are `ep` groups of neighbours. A group holds its places' experts
    whole, each of its ranks an equal part of their width, and sees all tokens: the sum over the
    stage's ranks, which tensor parallelism makes anyway, joins the results.

    Attributes:
        experts: logical, of each physical place; the groups' places follow each other, equally
            many each. An expert with several copies is computed by the first.
    """

    experts: tuple[int, ...]
    groups: int = 1

    @classmethod
    def even(cls, experts: int, ep: int) -> ExpertPlacement:
        """Every expert once, in order; `ep` divides them."""
        return cls(tuple(range(experts)), ep)

    def group_of(self, shard: Shard) -> tuple[int, Shard]:
        """A rank's group, and its part of each expert's width."""
        size = shard.size // self.groups
        return shard.rank // size, Shard(shard.rank % size, size)

    def held(self, group: int) -> tuple[int, ...]:
        """The logical experts of a group, in the order of its places."""
        size = len(self.experts) // self.groups
        return self.experts[group * size : (group + 1) * size]

    def places(self, group: int) -> list[int]:
        """Of each logical expert its place in the group, or -1: another group computes it."""
        size = len(self.experts) // self.groups
        first: dict[int, int] = {}
        for place, expert in enumerate(self.experts):
            first.setdefault(expert, place)
        here = range(group * size, (group + 1) * size)
        ordered = (first[expert] for expert in sorted(first))
        return [place - here.start if place in here else -1 for place in ordered]

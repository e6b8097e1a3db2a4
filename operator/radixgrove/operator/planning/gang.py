"""Groups are placed whole: two half-placed groups must never wait for each other's nodes. Pure.

Only groups that compete for the same nodes matter to each other:

- While a group is partly placed, no other one that competes with it gets pods, for at most
  `timeout` seconds: then it is stuck. One that gave way before, or has had pods without a node
  for so long already, is stuck as soon as it is partly placed.
- A stuck group keeps its pods: the pending ones show a node autoscaler what is missing. It holds up
  no other group, and gives up its pods for one that finds no node and could be placed whole if
  partly placed groups gave up theirs.
- Of two that could, the younger gives up its pods for the older.
- A group that gave up its pods gets pods again after a while, and not before the groups that could
  be placed in its stead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from radixgrove.operator.planning.demand import Node, NodeDemand

GangKey = tuple[str, str, int]  # namespace, service, group

_RETRY, _LONGEST_RETRY = 15.0, 60.0  # seconds


@dataclass(frozen=True)
class GangPlacement:
    """How far one group is placed. `order`: older groups sort first, and order never changes."""

    key: GangKey
    order: tuple[float, str, str, int]
    demand: NodeDemand
    nodes: int  # that it needs
    placed: int  # pods that have a node
    held: Collection[str] = ()  # names of those nodes
    partly_since: float | None = None
    starved_since: float | None = None  # its scheduler finds no node for one of its pods
    yields: int = 0  # times it has given up its pods

    @property
    def partly(self) -> bool:
        return 0 < self.placed < self.nodes

    @property
    def starved(self) -> bool:
        return self.starved_since is not None

    def seen_from(self, namespace: str) -> str:
        """Its service in a condition of that namespace, which names nothing of others."""
        own = self.key[0] == namespace
        return "/".join(self.key[:2]) if own else "a service of another namespace"


@dataclass(frozen=True)
class Contention:
    """All groups in sight and the nodes they want, at one time."""

    placements: Sequence[GangPlacement]
    nodes: Sequence[Node]
    now: float
    timeout: float  # seconds
    _by_name: dict[str, Node] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {node.name: node for node in self.nodes})

    def blocker(self, key: GangKey, demand: NodeDemand, yields: int = 0) -> GangPlacement | None:
        """The oldest group that a group without pods has to wait for.

        That is one which is just being placed. A group that gave up its pods `yields` times also
        waits for those that could be placed in its stead.
        """
        others = [
            p
            for p in self.placements
            if p.placed < p.nodes
            and p.key != key
            and demand.competes(p.demand, self.nodes)
            and ((p.partly and not self.stuck(p)) or self._goes_first(p, yields))
        ]
        return min(others, key=lambda p: p.order, default=None)

    def stuck(self, group: GangPlacement) -> bool:
        """Partly placed, and not to be completed on the nodes there are now."""
        known = group.yields > 0 or self._timed_out(group.starved_since)
        return group.partly and ((group.starved and known) or self._timed_out(group.partly_since))

    def yields_to(self, own: GangPlacement) -> GangPlacement | None:
        """The oldest group for which a partly placed one gives up its pods, if there is any."""
        if not own.partly:
            return None
        others = [
            p
            for p in self.placements
            if p.placed < p.nodes
            and p.key != own.key
            and own.demand.competes(p.demand, self.nodes)
            and self._precedes(p, own)
        ]
        return min(others, key=lambda p: p.order, default=None)

    def _precedes(self, other: GangPlacement, own: GangPlacement) -> bool:
        older = other.order < own.order
        if not self.stuck(own):
            short = other.starved or own.starved
            return older and other.partly and not self.stuck(other) and short
        if self.stuck(other):
            return self._may_complete(other) and (older or not self._may_complete(own))
        return other.starved and self._may_complete(other)

    def _goes_first(self, group: GangPlacement, yields: int) -> bool:
        """Before one that gave up its pods so often: nodes that were given up may not be free yet,
        and its scheduler has to find them."""
        hopeful = group.yields < yields and not self._timed_out(group.starved_since, 2)
        return yields > 0 and group.starved and (hopeful or self._may_complete(group))

    def _timed_out(self, since: float | None, times: int = 1) -> bool:
        return since is not None and self.now - since >= times * self.timeout

    def _may_complete(self, group: GangPlacement) -> bool:
        """Whether it could be placed whole if all that compete with it gave up their pods.

        Its scheduler has found no node elsewhere, so that only the nodes they hold count.
        """
        held = {
            name
            for p in self.placements
            if p.partly and p.key != group.key and group.demand.competes(p.demand, self.nodes)
            for name in p.held
        }
        known = [self._by_name[name] for name in held if name in self._by_name]
        room = len(held) - len(known) + sum(group.demand.pods_on(node) for node in known)
        return room >= group.nodes - group.placed


def retry_after(yields: int) -> float:
    """Seconds before a group that gave up its pods gets pods again."""
    return min(_RETRY * 2.0 ** min(yields, 10), _LONGEST_RETRY)

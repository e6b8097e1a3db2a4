"""Groups are placed whole, and hold up only those that want the same nodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixgrove.operator.planning import gang
from radixgrove.operator.planning.demand import Node, NodeDemand
from radixgrove.operator.planning.gang import Contention, GangPlacement
from tests.conftest import examples

GPUS = {"nvidia.com/gpu": 8}
NODES = [Node(f"n{number}", devices=GPUS) for number in range(4)]
ANY = NodeDemand(devices=GPUS)
TIMEOUT = 60.0


def group(age: float, placed: int, nodes: int = 2, **more: Any) -> GangPlacement:
    """The group made at `age`, on the first `placed` nodes."""
    name = f"s{age:g}"
    made = GangPlacement(
        ("ns", name, 0), (age, "ns", name, 0), ANY, nodes, placed,
        held=[f"n{number}" for number in range(placed)],
        partly_since=0.0 if 0 < placed < nodes else None,
        starved_since=0.0 if placed < nodes else None,
    )  # fmt: skip
    return replace(made, **more)


def contention(
    *groups: GangPlacement, now: float = 1.0, nodes: Sequence[Node] = NODES
) -> Contention:
    return Contention(groups, nodes, now, TIMEOUT)


# ---- who waits for whom --------------------------------------------------------------------------


def test_no_other_group_gets_pods_while_one_is_being_placed() -> None:
    half = group(1, 1)
    for key in (("ns", "older", 0), ("ns", "younger", 0)):
        assert contention(half).blocker(key, ANY) == half
    assert contention(half).blocker(half.key, ANY) is None
    assert contention(group(1, 2), group(2, 0)).blocker(("ns", "x", 0), ANY) is None


def test_a_group_that_cannot_be_placed_now_holds_up_others_for_the_timeout_at_most() -> None:
    half = group(1, 1)
    assert contention(half, now=TIMEOUT - 1).blocker(("ns", "x", 0), ANY) == half
    assert contention(half, now=TIMEOUT).blocker(("ns", "x", 0), ANY) is None


def test_one_that_gave_way_before_holds_up_others_only_while_its_scheduler_finds_nodes() -> None:
    again = group(1, 1, yields=1)
    assert contention(again).blocker(("ns", "x", 0), ANY) is None
    coming = replace(again, starved_since=None)
    assert contention(coming).blocker(("ns", "x", 0), ANY) == coming


# ---- who gives way to whom -----------------------------------------------------------------------


def test_of_two_that_are_being_placed_the_younger_gives_up() -> None:
    older, younger = group(1, 1), group(2, 1, held=["n1"])
    both = contention(older, younger)
    assert both.yields_to(younger) == older
    assert both.yields_to(older) is None


def test_two_that_are_being_placed_are_left_alone_as_long_as_nodes_are_found() -> None:
    older, younger = group(1, 1, starved_since=None), group(2, 1, held=["n1"], starved_since=None)
    assert contention(older, younger).yields_to(younger) is None


def test_a_stuck_group_keeps_its_pods_until_another_could_be_placed_on_its_nodes() -> None:
    stuck = group(1, 2, nodes=4)
    late = TIMEOUT + 1
    assert contention(stuck, now=late).yields_to(stuck) is None, "a node autoscaler sees its pods"
    fits, too_large = group(2, 0), group(3, 0, nodes=3)
    assert contention(stuck, fits, now=late).yields_to(stuck) == fits
    assert contention(stuck, fits, now=late - 2).yields_to(stuck) is None, "it may yet be placed"
    assert contention(stuck, too_large, now=late).yields_to(stuck) is None
    placing = replace(fits, starved_since=None)
    assert contention(stuck, placing, now=late).yields_to(stuck) is None, "free nodes will do"


def test_of_two_stuck_groups_the_one_that_could_be_placed_stays() -> None:
    older, younger = group(1, 1, nodes=4), group(2, 1, nodes=2, held=["n1"])
    both = contention(older, younger, now=TIMEOUT)
    assert both.yields_to(older) == younger
    assert both.yields_to(younger) is None
    equal = replace(older, nodes=2)
    both = contention(equal, younger, now=TIMEOUT)
    assert both.yields_to(younger) == equal
    assert both.yields_to(equal) is None


def test_a_whole_group_gives_way_to_none() -> None:
    whole = group(2, 2)
    assert contention(group(1, 1), whole, now=TIMEOUT).yields_to(whole) is None


# ---- who competes --------------------------------------------------------------------------------

TAINT: Any = {"key": "team", "value": "a", "effect": "NoSchedule"}
TOLERATION: Any = {"key": "team", "value": "a", "effect": "NoSchedule"}
H100, A100 = ({"nvidia.com/gpu.product": name} for name in ("H100", "A100"))
POOLS = [
    Node("h", labels=H100, devices=GPUS),
    Node("a", labels=A100, devices=GPUS),
    Node("t", labels=A100, devices=GPUS, taints=[TAINT]),
    Node("c"),
]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (ANY, ANY, True),
        (replace(ANY, selector=H100), ANY, True),
        (replace(ANY, selector=H100), replace(ANY, selector=A100), False),
        (replace(ANY, selector={"zone": "x"}), ANY, False),  # which no node has
        (ANY, NodeDemand(), False),
        (NodeDemand(), NodeDemand(), True),
        (ANY, NodeDemand(devices={"nvidia.com/gpu": 1}), True),
        (ANY, NodeDemand(devices={"nvidia.com/gpu": 16}), False),
        (ANY, replace(ANY, scheduler="volcano"), False),
        (replace(ANY, tolerations=[TOLERATION]), ANY, True),
        (replace(ANY, tolerations=[TOLERATION], selector=A100), replace(ANY, selector=H100), False),
    ],
)
def test_groups_compete_where_a_node_could_serve_either(
    one: NodeDemand, other: NodeDemand, same: bool
) -> None:
    assert one.competes(other, POOLS) is other.competes(one, POOLS) is same


def test_teams_with_tainted_nodes_of_their_own_do_not_compete() -> None:
    nodes = [
        Node(team, devices=GPUS, taints=[{"key": "team", "value": team, "effect": "NoExecute"}])
        for team in ("a", "b")
    ]
    of_a, of_b = (
        replace(ANY, tolerations=[{"key": "team", "operator": "Equal", "value": team}])
        for team in ("a", "b")
    )
    assert not of_a.competes(of_b, nodes)
    of_all = replace(ANY, tolerations=[{"operator": "Exists"}])
    assert of_all.competes(of_b, nodes)


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        (TOLERATION, True),
        ({"key": "team", "value": "a"}, True),
        ({"key": "team", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "team", "value": "b"}, False),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_tolerations_count_as_kubernetes_counts_them(toleration: Any, tolerated: bool) -> None:
    assert NodeDemand(tolerations=[toleration]).admits(Node("n", taints=[TAINT])) is tolerated
    soft: Any = TAINT | {"effect": "PreferNoSchedule"}
    assert NodeDemand().admits(Node("n", taints=[soft]))


def test_an_impossible_group_touches_none_that_wants_other_nodes() -> None:
    impossible = group(1, 1, nodes=9, demand=replace(ANY, selector=H100), held=["h"])
    other = group(2, 0, demand=replace(ANY, selector=A100))
    seen = contention(impossible, other, now=1000.0, nodes=POOLS)
    assert seen.blocker(other.key, other.demand) is None
    assert seen.yields_to(impossible) is None


# ---- all together --------------------------------------------------------------------------------


@dataclass
class Wanted:
    """A group in a simulated cluster; `on`: the node of each pod, "" while it is pending."""

    age: int
    nodes: int
    demand: NodeDemand
    on: list[str] | None = None  # None: it has no pods
    starved_since: float | None = None
    partly_since: float | None = None
    yields: int = 0
    retry_at: float = 0.0
    gave_up: list[float] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        return self.on is not None and "" not in self.on

    def placement(self) -> GangPlacement:
        held = [node for node in self.on or () if node]
        return group(
            self.age, len(held), self.nodes, demand=self.demand, held=held, yields=self.yields,
            partly_since=self.partly_since, starved_since=self.starved_since,
        )  # fmt: skip


class Cluster:
    """One pod of 8 GPUs a node; a scheduler that takes pods and nodes in any order."""

    def __init__(self, nodes: Sequence[Node], groups: list[Wanted], rng: random.Random) -> None:
        self.nodes, self.groups, self.rng, self.now = nodes, groups, rng, 0.0
        self._rooms: dict[int, list[str]] = {}  # by a group's age

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            if all(own.whole for own in self.groups):
                self.now = end  # nothing is left to change
                return
            self._operate()
            self._schedule()
            self.now += 10.0

    def taken(self, *, whole: bool = False) -> set[str]:
        return {n for g in self.groups if g.whole or not whole for n in g.on or () if n}

    def _operate(self) -> None:
        for own in self.rng.sample(self.groups, len(self.groups)):
            if own.whole or (own.on is None and self.now < own.retry_at):
                continue
            placement = own.placement()
            seen = [g.placement() for g in self.groups if g.on is not None and not g.whole]
            found = Contention(seen, self.nodes, self.now, TIMEOUT)
            if own.on is None:
                if not found.blocker(placement.key, own.demand, own.yields):
                    own.on = [""] * own.nodes
                continue
            if not placement.partly:
                own.partly_since = None
            elif own.partly_since is None:
                own.partly_since = self.now
            elif found.yields_to(placement) is not None:
                own.on, own.partly_since, own.starved_since = None, None, None
                own.retry_at = self.now + gang.retry_after(own.yields)
                own.yields += 1
                own.gave_up.append(self.now)

    def _schedule(self) -> None:
        pending = [(g, rank) for g in self.groups for rank, n in enumerate(g.on or ()) if not n]
        found = {own.age: own.starved_since for own in self.groups}
        for own in self.groups:
            own.starved_since = None
        for own, rank in self.rng.sample(pending, len(pending)):
            assert own.on is not None
            taken = self.taken()
            free = [node for node in self._room(own) if node not in taken]
            if free:
                own.on[rank] = self.rng.choice(free)
            else:
                before = found[own.age]
                own.starved_since = self.now if before is None else before

    def _room(self, own: Wanted) -> list[str]:
        if own.age not in self._rooms:
            admitted = [node.name for node in self.nodes if own.demand.admits(node)]
            self._rooms[own.age] = admitted
        return self._rooms[own.age]


DEMANDS = st.builds(
    lambda selector, tolerates: replace(
        ANY, selector=selector, tolerations=[TOLERATION] if tolerates else []
    ),
    st.sampled_from([{}, H100, A100]),
    st.booleans(),
)


@examples(40)
@given(
    st.lists(st.sampled_from(POOLS[:3]), min_size=2, max_size=7),
    st.lists(st.tuples(st.integers(1, 5), DEMANDS), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_in_the_end_what_fits_is_placed_and_all_others_show_their_pods(
    kinds: list[Node], wanted: list[tuple[int, NodeDemand]], rng: random.Random
) -> None:
    nodes = [replace(kind, name=f"n{number}") for number, kind in enumerate(kinds)]
    groups = [Wanted(age, size, demand) for age, (size, demand) in enumerate(wanted)]
    cluster = Cluster(nodes, groups, rng)
    cluster.run(1500)
    settled = cluster.now
    cluster.run(300)
    for own in groups:
        assert own.on is not None, "an autoscaler sees what is missing"
        assert not [when for when in own.gave_up if when >= settled], "and pods stay"
        if not own.whole:
            room = {node.name for node in nodes if own.demand.admits(node)}
            left = room - cluster.taken(whole=True)
            assert len(left) < own.nodes, "no group waits for nodes that would do"


@examples(40)
@given(st.integers(1, 6), st.integers(2, 6), st.randoms(use_true_random=False))
def test_impossible_groups_cost_a_newcomer_no_more_than_one_timeout(
    impossible: int, nodes: int, rng: random.Random
) -> None:
    groups = [Wanted(age, nodes + 1 + age, ANY) for age in range(impossible)]
    cluster = Cluster([Node(f"n{i}", devices=GPUS) for i in range(nodes)], groups, rng)
    cluster.run(rng.choice([10.0, 30.0, 600.0]))
    newcomer = Wanted(99, rng.randint(1, nodes), ANY)
    groups.append(newcomer)
    begin = cluster.now
    while not newcomer.whole and cluster.now < begin + 600:
        cluster.run(10)
    assert newcomer.whole


def test_the_wait_after_giving_up_grows_and_is_bounded() -> None:
    waits = [gang.retry_after(n) for n in range(20)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (15, 60)

"""Two half-placed groups never wait for each other."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from radixgrove.operator.planning import gang
from radixgrove.operator.planning.gang import GangPlacement


def placement(age: float, placed: int, nodes: int = 2, since: float | None = 0.0) -> GangPlacement:
    name = f"s{age:g}"
    return GangPlacement(("ns", name, 0), (age, "ns", name, 0), "cuda", nodes, placed, since)


def test_nobody_else_gets_pods_while_one_is_partly_placed() -> None:
    half = placement(1, 1)
    assert gang.blocker(("ns", "other", 0), "cuda", [half]) == half
    assert gang.blocker(("ns", "other", 0), "cpu", [half]) is None
    assert gang.blocker(half.key, "cuda", [half]) is None


def test_whole_and_unplaced_groups_block_nobody() -> None:
    assert gang.blocker(("ns", "x", 0), "cuda", [placement(1, 2), placement(2, 0)]) is None


def test_of_two_halves_the_younger_gives_up() -> None:
    older, younger = placement(1, 1), placement(2, 1)
    assert gang.yields_to(younger, [older, younger], False, 1.0, 60) == older
    assert gang.yields_to(older, [older, younger], False, 1.0, 60) is False


def test_a_half_that_never_completes_gives_up_for_those_who_wait() -> None:
    half = placement(1, 1, since=0.0)
    assert gang.yields_to(half, [half], True, 61.0, 60) is True
    assert gang.yields_to(half, [half], True, 59.0, 60) is False
    assert gang.yields_to(half, [half], False, 1000.0, 60) is False, "nobody waits"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(4, 8), st.randoms())
def test_groups_that_fit_alone_are_all_placed_in_the_end(
    sizes: list[int], nodes: int, rng: random.Random
) -> None:
    """A scheduler that places pods at random, groups that leave once whole: everyone has a turn."""
    waiting = dict(enumerate(sizes))
    placed = dict.fromkeys(waiting, 0)
    whole: list[int] = []
    for _ in range(2000):
        for age in [a for a in waiting if placed[a] == waiting[a]]:
            whole.append(age)
            placed[age] = 0
            del waiting[age]
        if not waiting:
            break
        all_of = [placement(a, placed[a], waiting[a]) for a in waiting]
        for own in all_of:
            if gang.yields_to(own, all_of, False, 0.0, 60):
                placed[int(own.order[0])] = 0
        if sum(placed[a] for a in waiting) < nodes:
            hungry = [a for a in waiting if placed[a] < waiting[a]]
            placed[rng.choice(hungry)] += 1
    assert not waiting


def test_the_wait_after_giving_up_grows_and_is_bounded() -> None:
    waits = [gang.retry_after(n) for n in range(20)]
    assert waits == sorted(waits)
    assert waits[-1] == 300

"""Which groups come and go, checked against the two budgets over random situations."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radixgrove.operator.planning.rollout import Slot, plan

NEW, OLD = "new", "old"


def ready(*revisions: str) -> list[Slot]:
    return [Slot(index, revision, ready=True) for index, revision in enumerate(revisions)]


slots = st.lists(
    st.builds(
        Slot,
        index=st.integers(0, 12),
        revision=st.sampled_from([NEW, OLD]),
        ready=st.booleans(),
        failing=st.booleans(),
        draining=st.booleans(),
    ),
    unique_by=lambda slot: slot.index,
    max_size=8,
)


@given(slots, st.integers(0, 6), st.integers(0, 3), st.integers(0, 3))
def test_the_budgets_hold_in_every_situation(
    slots: list[Slot], desired: int, unavailable: int, surge: int
) -> None:
    if unavailable + surge == 0:
        unavailable = 1
    moves = plan(slots, desired, NEW, unavailable, surge)
    by_index = {slot.index: slot for slot in slots}
    live = [slot for slot in slots if not slot.draining]
    serving = sum(slot.ready for slot in live)
    given_up = sum(by_index[index].ready for index in moves.drain)
    rolling = desired > 0 and any(slot.revision == OLD for slot in live)

    assert all(not by_index[index].draining for index in moves.drain)
    assert not set(moves.create) & set(by_index), "an index in use is not used again"
    # Ready groups are given up only while enough remain.
    if given_up and desired:
        assert serving - given_up >= min(desired - unavailable, serving)
    # Never more groups than allowed, unless that many were there already.
    after = len(live) - len(moves.drain) + len(moves.create)
    assert after <= max(desired + (surge if rolling else 0), 0)
    if moves.blocked:
        assert serving - given_up >= min(serving, desired)


def test_without_a_budget_one_group_is_replaced_at_a_time() -> None:
    assert plan(ready(OLD), 3, NEW, 0, 0).create == (1,)
    assert plan([*ready(OLD), Slot(1, NEW)], 3, NEW, 0, 0).create == ()
    broken = [Slot(0, OLD), Slot(1, OLD)]
    assert plan(broken, 2, NEW, 0, 0).drain == (0,)


def test_groups_that_start_are_a_part_of_the_batch() -> None:
    starting = [*ready(OLD, OLD, OLD), Slot(3, NEW)]
    assert plan(starting, 3, NEW, 0, 2).create == (4,)
    broken = [Slot(0, OLD), Slot(1, OLD), Slot(2, NEW)]
    assert plan(broken, 2, NEW, 1, 1).drain == (0,)


@given(slots, st.integers(1, 6), st.integers(0, 3), st.integers(0, 3))
def test_on_hold_no_ready_group_goes_that_is_wanted(
    slots: list[Slot], desired: int, unavailable: int, surge: int
) -> None:
    moves = plan(slots, desired, NEW, unavailable, surge, hold=True)
    ready_now = {slot.index for slot in slots if slot.ready and not slot.draining}
    left = ready_now - set(moves.drain)
    assert len(left) >= min(desired, len(ready_now))


def test_a_fresh_service_makes_all_its_groups() -> None:
    assert plan([], 3, NEW, 1, 0).create == (0, 1, 2)


def test_settled_groups_stay() -> None:
    moves = plan(ready(NEW, NEW), 2, NEW, 1, 0)
    assert (moves.create, moves.drain) == ((), ())


def test_surge_makes_before_it_breaks() -> None:
    assert plan(ready(OLD, OLD), 2, NEW, 0, 1).create == (2,)
    assert plan(ready(OLD, OLD), 2, NEW, 0, 1).drain == ()
    starting = [*ready(OLD, OLD), Slot(2, NEW)]
    assert (plan(starting, 2, NEW, 0, 1).create, plan(starting, 2, NEW, 0, 1).drain) == ((), ())
    assert len(plan(ready(OLD, OLD, NEW), 2, NEW, 0, 1).drain) == 1


def test_one_replica_rolls_with_surge() -> None:
    assert plan(ready(OLD), 1, NEW, 0, 1).create == (1,)
    assert plan(ready(OLD, NEW), 1, NEW, 0, 1).drain == (0,)


def test_without_surge_a_group_leaves_before_its_successor_comes() -> None:
    moves = plan(ready(OLD, OLD), 2, NEW, 1, 0)
    assert (len(moves.drain), moves.create) == (1, ())
    leaving = [Slot(0, OLD, ready=True), Slot(1, OLD, draining=True)]
    assert plan(leaving, 2, NEW, 1, 0).create == ()
    assert plan([Slot(0, OLD, ready=True)], 2, NEW, 1, 0).create == (1,)


def test_broken_old_groups_go_first_and_outside_the_budget() -> None:
    slots = [Slot(0, OLD, ready=True), Slot(1, OLD, ready=False)]
    assert plan(slots, 2, NEW, 0, 1).drain == (1,)


def test_a_rollout_over_broken_groups_alone_does_not_deadlock() -> None:
    slots = [Slot(0, OLD), Slot(1, OLD)]
    assert plan(slots, 2, NEW, 1, 0).drain


def test_a_failing_target_keeps_the_old_groups() -> None:
    slots = [*ready(OLD, OLD), Slot(2, NEW, failing=True)]
    moves = plan(slots, 2, NEW, 0, 1)
    assert (moves.create, moves.drain, moves.blocked) == ((), (), True)


def test_a_rollback_removes_the_failing_revision_at_once() -> None:
    slots = [*ready(OLD, OLD), Slot(2, NEW, failing=True)]
    moves = plan(slots, 2, OLD, 0, 1)
    assert (moves.drain, moves.blocked) == ((2,), False)


def test_scaling_down_takes_what_serves_least() -> None:
    slots = [Slot(0, NEW, ready=True), Slot(1, NEW), Slot(2, NEW, ready=True)]
    assert plan(slots, 2, NEW, 1, 0).drain == (1,)


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_every_rollout_ends_and_keeps_its_promise(
    before: int, desired: int, unavailable: int, surge: int, health: list[bool]
) -> None:
    """A simulated rollout in which all new groups start: it converges, within its budgets."""
    if unavailable + surge == 0:
        surge = 1
    groups = {i: Slot(i, OLD, ready=health[i]) for i in range(before)}
    floor = min(desired - unavailable, sum(slot.ready for slot in groups.values()))
    for _ in range(60):
        moves = plan(list(groups.values()), desired, NEW, unavailable, surge)
        groups = {i: slot for i, slot in groups.items() if i not in moves.drain}
        assert sum(slot.ready for slot in groups.values()) >= floor
        groups |= {index: Slot(index, NEW) for index in moves.create}
        assert len(groups) <= max(before, desired + surge)
        if not (moves.create or moves.drain) and all(slot.ready for slot in groups.values()):
            break
        starting = [i for i, s in groups.items() if s.revision == NEW and not s.ready]
        for index in starting[:1]:  # one at a time, the slowest way
            groups[index] = Slot(index, NEW, ready=True)
    assert len(groups) == desired
    assert all(slot.revision == NEW for slot in groups.values())

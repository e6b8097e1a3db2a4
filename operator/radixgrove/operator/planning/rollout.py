"""Which groups to make and which to drain, so that `desired` groups run the target revision.

Whole groups only. Rules, in order of weight:
- at least `desired - max_unavailable` groups stay ready, unless they broke by themselves;
- at most `desired + max_surge` groups exist;
- old groups that are not ready serve no request: they are replaced first, outside the budget;
- no old group is given up while a group of the target revision is failing, and no ready one while
  the rollout is on hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """One group as a rollout sees it; it may have no pods just now."""

    index: int
    revision: str
    ready: bool = False
    failing: bool = False  # it failed, or its pods cannot start, in its present form
    draining: bool = False


@dataclass(frozen=True)
class Moves:
    create: tuple[int, ...] = ()  # indexes of new groups of the target revision
    drain: tuple[int, ...] = ()
    blocked: bool = False  # the target revision fails: the old groups stay


def plan(
    slots: Sequence[Slot],
    desired: int,
    target: str,
    max_unavailable: int,
    max_surge: int,
    *,
    hold: bool = False,
) -> Moves:
    """`hold`: nothing is known yet of what would take the place of ready groups."""
    live = [slot for slot in slots if not slot.draining]
    old = [slot for slot in live if slot.revision != target]
    new = [slot for slot in live if slot.revision == target]
    if desired == 0:
        return Moves(drain=tuple(slot.index for slot in live))
    blocked = bool(old) and any(slot.failing and not slot.ready for slot in new)
    drain = _surplus(live, target, desired + (max_surge if old else 0))
    if not blocked:
        drain += _replaced(
            [slot for slot in live if slot.index not in drain],
            desired,
            target,
            0 if hold else max_unavailable,
            max_surge,
        )
    # Groups that leave count until they are gone: they still hold their GPUs.
    room = desired + (max_surge if old else 0) - len(slots)
    wanted = desired - len(new)
    if old:
        starting = sum(1 for slot in new if not slot.ready)
        wanted = 0 if blocked else min(wanted, max(max_unavailable + max_surge, 1) - starting)
    create = _free_indexes({slot.index for slot in slots}, max(min(room, wanted), 0))
    return Moves(tuple(create), tuple(drain), blocked)


def _surplus(live: Sequence[Slot], target: str, allowed: int) -> list[int]:
    """The least useful groups beyond the allowed number."""

    def usefulness(slot: Slot) -> tuple[bool, bool, int]:
        return (slot.ready, slot.revision == target, -slot.index)

    excess = max(len(live) - allowed, 0)
    return [slot.index for slot in sorted(live, key=usefulness)[:excess]]


def _replaced(
    live: Sequence[Slot], desired: int, target: str, max_unavailable: int, max_surge: int
) -> list[int]:
    old = [slot for slot in live if slot.revision != target]
    starting = sum(1 for slot in live if slot.revision == target and not slot.ready)
    ready = sum(1 for slot in live if slot.ready)
    batch = max(max_unavailable + max_surge, 1) - starting
    drain = [slot.index for slot in old if not slot.ready][: max(batch, 0)]
    spare = ready - max(desired - max_unavailable, 0)
    healthy = [slot.index for slot in reversed(old) if slot.ready]
    return drain + healthy[: max(spare, 0)]


def _free_indexes(used: set[int], count: int) -> list[int]:
    found: list[int] = []
    index = 0
    while len(found) < count:
        if index not in used:
            found.append(index)
        index += 1
    return found

"""Groups are placed whole: two half-placed groups must never wait for each other's nodes.

While a group is partly placed, no other group that wants the same kind of node gets pods. Of two
partly placed ones the younger gives up its pods; one that stays partly placed while others wait
gives up too, so that a group too large for the cluster cannot hold a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class GangPlacement:
    """How far one group is placed. `order`: older groups sort first, and order never changes."""

    key: tuple[str, str, int]  # namespace, service, group
    order: tuple[float, str, str, int]
    device: str
    nodes: int
    placed: int
    partly_since: float | None = None

    @property
    def partly(self) -> bool:
        return 0 < self.placed < self.nodes


def blocker(
    key: tuple[str, str, int], device: str, placements: Iterable[GangPlacement]
) -> GangPlacement | None:
    """The oldest partly placed group for whose sake this one gets no pods yet."""
    partly = [p for p in placements if p.partly and p.device == device and p.key != key]
    return min(partly, key=lambda p: p.order, default=None)


def yields_to(
    own: GangPlacement,
    placements: Iterable[GangPlacement],
    waiting: bool,
    now: float,
    timeout: float,
) -> GangPlacement | bool:
    """For whom a partly placed group gives up its pods; True: for whoever waits; False: nobody.

    `waiting`: some group of this kind was refused pods because of a partly placed one.
    """
    if not own.partly:
        return False
    others = [p for p in placements if p.device == own.device and p.key != own.key]
    older = [p for p in others if p.partly and p.order < own.order]
    if older:
        return min(older, key=lambda p: p.order)
    stuck = own.partly_since is not None and now - own.partly_since >= timeout
    return stuck and (waiting or any(p.placed < p.nodes for p in others))


def retry_after(yields: int) -> float:
    """Seconds before a group that gave up asks again."""
    return float(min(15 * 2 ** min(yields, 10), 300))

"""How many groups the load wants. Pure; the result is written through the scale subresource.

Upwards at once, downwards after `cooldown` of calm and one group at a time, to zero only when
nothing is queued, running or held. Without readings nothing moves: an unknown load is not an
idle one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from radixgrove.operator.api import times
from radixgrove.operator.api.spec import Autoscaling
from radixgrove.operator.api.status import AutoscalingStatus
from radixgrove.operator.api.values import seconds


@dataclass(frozen=True)
class Load:
    """Of one service, over all its ready replicas and all routers."""

    replicas: int  # that reported
    running: int
    waiting: int
    held: int  # by routers, because no replica can take them
    kv_used: float  # mean share of pages in use, 0 to 1
    slots: int = 0  # requests that one replica runs at once; 0: unknown


def decide(
    scaling: Autoscaling,
    current: int,
    load: Load | None,
    before: AutoscalingStatus,
    now: float,
) -> AutoscalingStatus:
    """The wanted number of groups in `desired`, and since when the load has been low."""
    bounded = min(max(current, scaling.min), scaling.max)
    if load is None:
        return AutoscalingStatus(desired=bounded, message="no readings of the load")
    if bounded != current:
        return AutoscalingStatus(desired=bounded, message="moved into its bounds")
    wanted = _wanted(scaling, current, load)
    if wanted > current:
        return AutoscalingStatus(desired=min(wanted, scaling.max), message=_describe(load))
    if wanted == current:
        return AutoscalingStatus(desired=current, message=_describe(load))
    low_since = times.from_text(before.low_since)
    if low_since is None or low_since > now:  # the latter: the clock was set back
        low_since = now
    if now - low_since < seconds(scaling.cooldown):
        return AutoscalingStatus(
            desired=current, low_since=times.to_text(low_since), message=_describe(load)
        )
    # The calm before the next step begins now.
    return AutoscalingStatus(
        desired=max(current - 1, scaling.min),
        low_since=times.to_text(now),
        message=_describe(load),
    )


def _wanted(scaling: Autoscaling, current: int, load: Load) -> int:
    """Groups at which every target holds, for the load as it is."""
    if current == 0:
        return 1 if load.held else 0
    if not (load.waiting or load.held or load.running):
        return scaling.min
    by_queue = math.ceil((load.waiting + load.held) / scaling.targets.queue)
    by_memory = math.ceil(load.replicas * load.kv_used * 100 / scaling.targets.kv_percent)
    # What runs now must have room on what is left, or the next queue would bring the group back.
    by_slots = min(math.ceil(load.running / load.slots), current) if load.slots else 0
    # A group that starts has reported nothing yet: it must not be asked for twice.
    return max(1, by_queue, by_memory, by_slots)


def _describe(load: Load) -> str:
    return (
        f"{load.waiting} waiting, {load.held} held by routers, {load.running} running, "
        f"{load.kv_used:.0%} of KV pages in use on {load.replicas} replicas"
    )

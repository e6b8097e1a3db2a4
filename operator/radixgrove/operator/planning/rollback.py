"""When the last good revision comes back by itself. Pure.

Only after an outage: the new revision's first start failed, and no group of another one is left. As
long as old groups are there, they stay instead (`RolloutBlocked`). What was given up is not tried
again, so only what speaks against the revision counts: a program that ended, or a refusal of the
cluster's that has had its time to pass; not a machine that was lost meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from radixgrove.operator.api import times
from radixgrove.operator.api.status import (
    MAX_DETAIL,
    GroupPhase,
    GroupStatus,
    InferenceServiceStatus,
)
from radixgrove.operator.planning.diagnosis import Problem, problem
from radixgrove.operator.planning.observed import Group


@dataclass(frozen=True)
class Rollback:
    """`revision` did not start, `because` of this; it is not tried again as it is."""

    revision: str
    because: str


def decide(
    target: str,
    before: InferenceServiceStatus,
    groups: Sequence[Group],
    known: Collection[str],
    now: float,
) -> Rollback | None:
    """Whether the revision asked for is given up for `before.good_revision`.

    `known`: revisions that groups can be made from. Another `target` is tried, whatever failed
    before.
    """
    good = before.good_revision
    if good in ("", target) or good not in known:
        return None
    if before.rolled_back == target:
        return Rollback(target, before.rolled_back_because)
    live = [group for group in groups if not group.draining]
    if any(group.ready or group.revision != target for group in live):
        return None
    records = {record.index: record for record in before.groups if record.revision == target}
    return _failed_start(target, records, {group.index: group for group in live}, now)


def _failed_start(
    target: str, records: Mapping[int, GroupStatus], groups: Mapping[int, Group], now: float
) -> Rollback | None:
    for index, record in sorted(records.items()):
        group = groups.get(index)
        if record.phase is GroupPhase.FAILED and not record.start_failed:
            continue  # recovery is off, and something took a pod away
        trouble = problem(group) if group is not None else None
        if failing(record, group) and not _may_pass(record, trouble, now):
            because = f"{trouble.reason}: {trouble.message}" if trouble else record.detail
            return Rollback(target, because[:MAX_DETAIL])
    return None


def _may_pass(record: GroupStatus, trouble: Problem | None, now: float) -> bool:
    """Whether the cluster may yet start what it has refused so far."""
    if trouble is None or record.start_failed or record.phase is GroupPhase.FAILED:
        return False
    since = times.from_text(record.hindered_since)
    return now < (now if since is None else since) + trouble.passes_within


def good_revision(target: str | None, before: InferenceServiceStatus, ready: Sequence[str]) -> str:
    """The revision to come back to, of which a group has been ready. `ready`: revisions of groups
    that are."""
    if target in ready:
        return str(target)
    return before.good_revision or next(iter(ready), "")


def failing(record: GroupStatus, group: Group | None) -> bool:
    """Whether a group, in its present form, failed before it was ever ready."""
    if record.phase is GroupPhase.FAILED or record.start_failed:
        return True
    if group is None or record.was_ready:
        return False
    trouble = problem(group)
    if trouble is None or not trouble.stuck:
        return False
    # Once all ranks ran, one may have ended for the want of another pod: recovery judges that.
    together = group.nodes > 1 and (record.all_ran or group.all_run)
    return trouble.passes_within > 0 or not together

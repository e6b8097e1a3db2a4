"""What to do with a service's groups: recovery, rollout and whole placement put together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from radixgrove.operator.api import names, times
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.status import MAX_DETAIL, GroupPhase, GroupStatus
from radixgrove.operator.planning import gang, recovery, rollout
from radixgrove.operator.planning.demand import NodeDemand
from radixgrove.operator.planning.diagnosis import Problem, problem
from radixgrove.operator.planning.observed import Group, Pod
from radixgrove.operator.planning.rollback import failing
from radixgrove.operator.planning.service_view import ServiceView

_LOOK_AGAIN = 5.0  # seconds between looks at groups that are not placed whole
REMOVED = "removed"  # the drained group does not come back
RECOVERY = "recovery"  # its next attempt takes over


@dataclass(frozen=True)
class PlanInput:
    """All that a plan depends on."""

    view: ServiceView
    unused_attempts: Collection[int]  # up to the last one, of which nothing was made
    placements: Sequence[gang.GangPlacement]  # of all groups in sight, this service's included
    demand: Callable[[str], NodeDemand]  # of groups of a revision
    holds_lease: Callable[[Group], bool]
    silent_nodes: Callable[[Sequence[Pod]], Collection[str]]  # of pods that do not answer
    config: OperatorConfig

    @property
    def contention(self) -> gang.Contention:
        nodes = list(self.view.observed.nodes.values())
        return gang.Contention(self.placements, nodes, self.view.now, self.config.gang_timeout)


@dataclass(frozen=True)
class NewAttempt:
    index: int
    attempt: int
    revision: str
    avoid: tuple[str, ...] = ()  # nodes it would rather not run on

    def name(self, service: str) -> str:
        return names.group_name(service, self.index, self.attempt)


@dataclass
class Plan:
    """Executed in this order: keep the records, inform routers, drain, delete, create.

    Attempts are counted for the service as a whole, and the count is written before the attempt is
    made, so that no name is used twice whenever the operator dies. A number of which nothing was
    made is used again.
    """

    serving: list[str] = field(default_factory=list)  # replica ids that routers may use
    drain: list[tuple[Group, str]] = field(default_factory=list)
    delete: list[Group] = field(default_factory=list)
    create: list[NewAttempt] = field(default_factory=list)
    records: list[GroupStatus] = field(default_factory=list)
    events: list[tuple[str, str, str]] = field(default_factory=list)  # type, reason, message
    last_attempt: int = 0
    waits_for: str = ""  # a partly placed group of this or another service
    blocked: bool = False  # the target revision fails; old groups are kept
    requeue_at: float | None = None

    def expected(self) -> set[int]:
        """Groups that have pods or will have them back: an eviction must not take the next one
        while one is still replaced. Not those that gave up their pods until there is room."""
        return {
            record.index
            for record in self.records
            if record.phase is not GroupPhase.DRAINING
            and not (record.phase is GroupPhase.WAITING and record.yields)
        }

    def leaving(self) -> set[str]:
        """Names of the groups that it drains or deletes."""
        return {group.name for group in self.delete} | {group.name for group, _ in self.drain}

    def not_made(self, new: NewAttempt, because: str) -> None:
        """The attempt's StatefulSet could not be created."""
        waiting = {"phase": GroupPhase.WAITING, "detail": because[:MAX_DETAIL]}
        self.records = [
            record.model_copy(update=waiting) if record.index == new.index else record
            for record in self.records
        ]

    def requeue_by(self, when: float) -> None:
        self.requeue_at = when if self.requeue_at is None else min(self.requeue_at, when)


def make_plan(given: PlanInput) -> Plan:
    plan = Plan(
        last_attempt=max(given.view.before.last_attempt, given.view.observed.highest_attempt)
    )
    live = _live_groups(given, plan)
    records = _known_records(given, live)
    for index in sorted(live):
        records[index] = _look_after(given, plan, records[index], live)
    _roll(given, plan, records, live)
    for index in sorted(records):
        if index not in live:
            records[index] = _start(given, plan, records[index])
    plan.serving = sorted(
        [names.replica_id(live[i].name) for i in live if _may_serve(records[i], live[i])]
        + [names.replica_id(new.name(given.view.service.name)) for new in plan.create]
    )
    plan.records = [
        _with_phase(records[i], live.get(i)) for i in sorted(records)
    ] + _leaving_records(given, records)
    return plan


def _may_serve(record: GroupStatus, group: Group) -> bool:
    """Not a group with an evicted pod either: routers learn it while the pod still answers."""
    leaving = any(pod.deleted_at is not None for pod in group.pods)
    return record.phase is not GroupPhase.FAILED and not leaving


def _live_groups(given: PlanInput, plan: Plan) -> dict[int, Group]:
    """The newest attempt of each group that is not draining; the others go when their time is up.

    An operator that died between two writes may have left two attempts of one group.
    """
    live: dict[int, Group] = {}
    for group in sorted(given.view.observed.groups, key=lambda g: g.attempt):
        if group.draining:
            _finish_draining(given, plan, group)
            continue
        if group.index in live:
            plan.delete.append(live[group.index])
        live[group.index] = group
    return live


def _finish_draining(given: PlanInput, plan: Plan, group: Group) -> None:
    if group.deleting:
        return
    end = (group.draining_since or 0.0) + given.config.drain_notice
    if given.view.now >= end:
        plan.delete.append(group)
    else:
        plan.requeue_by(end)


def _known_records(given: PlanInput, live: Mapping[int, Group]) -> dict[int, GroupStatus]:
    removed = {
        group.index
        for group in given.view.observed.groups
        if group.draining and group.draining_because == REMOVED and group.index not in live
    }
    records = {
        record.index: record
        for record in given.view.before.groups
        if record.phase is not GroupPhase.DRAINING and record.index not in removed
    }
    for index, group in live.items():
        fresh = GroupStatus(index=index, attempt=group.attempt, revision=group.revision)
        records.setdefault(index, fresh)
    return records


def _look_after(
    given: PlanInput, plan: Plan, record: GroupStatus, live: dict[int, Group]
) -> GroupStatus:
    """Recovery and whole placement of one group that has pods. May take it out of `live`."""
    group = live[record.index]
    if record.phase is GroupPhase.FAILED and record.attempt == group.attempt:
        return record
    settings, now = given.view.spec.recovery, given.view.now
    found = recovery.assess(
        group, record, given.view.observed.nodes, settings, given.holds_lease, now
    )
    if found.recheck_at is not None:
        plan.requeue_by(found.recheck_at)
    if found.fault is None:
        record = recovery.remember(group, record, settings, now)
        return _give_way(given, plan, record, live)
    suspects = [] if found.fault.drain else _suspects(given, group, found.fault)
    # Where a machine is lost, its peers' programs end for that, and are seen to end before it.
    fault = replace(found.fault, ended=found.fault.ended and not suspects)
    record = recovery.after_fault(record, fault, settings, now)
    if record.phase is GroupPhase.FAILED:
        plan.events.append(("Warning", "GroupFailed", f"group {record.index}: {record.detail}"))
        return record
    if not fault.drain:
        record = record.model_copy(update={"avoid": suspects})
    plan.events.append(("Warning", "GroupRecovery", f"group {record.index}: {fault.message}"))
    if fault.drain:
        plan.drain.append((group, RECOVERY))
        plan.requeue_by(now + given.config.drain_notice)
    else:
        plan.delete.append(group)
    del live[record.index]
    return record


def _suspects(given: PlanInput, group: Group, fault: recovery.Fault) -> list[str]:
    """Nodes that the next attempt avoids where it can.

    Kubernetes takes a machine that hangs for healthy for most of a minute, while its peers notice
    within seconds: so the pods are asked, too.
    """
    nodes = given.view.observed.nodes
    heard = [
        pod
        for pod in group.pods
        if pod.node in nodes and nodes[pod.node].reachable and pod.node != fault.node
    ]
    lost = {pod.node for pod in group.pods if pod.node} - {pod.node for pod in heard}
    return sorted(lost | set(given.silent_nodes(heard)))


def _give_way(
    given: PlanInput, plan: Plan, record: GroupStatus, live: dict[int, Group]
) -> GroupStatus:
    group = live[record.index]
    if not group.partly_placed:
        return record
    plan.requeue_by(given.view.now + _LOOK_AGAIN)
    winner = given.contention.yields_to(_placement(given.view, group, record))
    if winner is None:
        return record
    plan.delete.append(group)
    del live[record.index]
    again = given.view.now + gang.retry_after(record.yields)
    message = (
        f"gave up {group.placed} of {group.nodes} placed pods for "
        f"{winner.seen_from(given.view.service.namespace)}; its pods come back at "
        f"{times.to_seconds_text(again)}"
    )
    plan.events.append(("Normal", "GroupYielded", f"group {record.index} {message}"))
    return record.model_copy(
        update={
            "phase": GroupPhase.WAITING,
            "detail": message,
            "yields": record.yields + 1,
            "retry_at": times.to_text(again),
            "partly_since": None,
        }
    )


def _gang_key(view: ServiceView, index: int) -> gang.GangKey:
    return (view.service.namespace, view.service.name, index)


def _roll(
    given: PlanInput, plan: Plan, records: dict[int, GroupStatus], live: dict[int, Group]
) -> None:
    target = given.view.before.revision if given.view.target is None else given.view.target
    spec = given.view.spec.rollout
    slots = [
        rollout.Slot(
            index=index,
            revision=record.revision,
            ready=index in live and live[index].ready and _may_serve(record, live[index]),
            failing=failing(record, live.get(index)),
        )
        for index, record in sorted(records.items())
    ]
    slots += [
        rollout.Slot(index, "", draining=True)
        for index in {g.index for g in given.view.observed.groups if g.draining} - set(records)
    ]
    check = given.view.image_check
    moves = rollout.plan(
        slots, given.view.desired, target, spec.max_unavailable, spec.max_surge, hold=check.hold
    )
    plan.blocked = moves.blocked or check.problem is not None
    for index in moves.drain:
        del records[index]
        if index in live:
            plan.drain.append((live.pop(index), REMOVED))
            plan.requeue_by(given.view.now + given.config.drain_notice)
        else:
            plan.requeue_by(given.view.now)  # its place is free at the next look
    for index in moves.create if given.view.target is not None else ():
        records[index] = GroupStatus(index=index, revision=target)


def _start(given: PlanInput, plan: Plan, record: GroupStatus) -> GroupStatus:
    """A group without pods: its next attempt, unless something says not yet."""
    record = record.model_copy(update={"phase": GroupPhase.WAITING})
    if record.revision not in given.view.revisions:
        return record.model_copy(update={"detail": "its revision cannot be made yet"})
    retry_at = times.from_text(record.retry_at)
    if retry_at is not None and given.view.now < retry_at:
        plan.requeue_by(retry_at)
        return record
    key = _gang_key(given.view, record.index)
    ahead = given.contention.blocker(key, given.demand(record.revision), record.yields)
    if ahead is not None:
        plan.waits_for = ahead.seen_from(given.view.service.namespace)
        plan.requeue_by(given.view.now + _LOOK_AGAIN)
        return record.model_copy(update={"detail": f"waits until {plan.waits_for} is placed"})
    attempt = _attempt_number(given, plan, record)
    plan.last_attempt = max(plan.last_attempt, attempt)
    avoid = tuple(record.avoid)
    plan.create.append(NewAttempt(record.index, attempt, record.revision, avoid))
    return record.model_copy(
        update={
            "attempt": attempt,
            "retry_at": None,
            "all_ran": False,
            "was_ready": False,
            "hindered_since": None,
            "pods": [],
            "phase": GroupPhase.PENDING,
        }
    )


def _attempt_number(given: PlanInput, plan: Plan, record: GroupStatus) -> int:
    """The group's own number again if nothing was made of it, or another such, or the next."""
    unused = set(given.unused_attempts) - {new.attempt for new in plan.create}
    if record.attempt in unused:
        return record.attempt
    return min(unused, default=plan.last_attempt + 1)


def _with_phase(record: GroupStatus, group: Group | None) -> GroupStatus:
    if group is None or record.phase is GroupPhase.FAILED:
        return record
    trouble: Problem | None = problem(group)
    if group.ready:
        phase = GroupPhase.READY
    elif group.placed < group.nodes:
        phase = GroupPhase.PENDING
    else:
        phase = GroupPhase.STARTING
    detail = f"{trouble.reason}: {trouble.message}"[:MAX_DETAIL] if trouble else ""
    return record.model_copy(update={"phase": phase, "detail": detail})


def _leaving_records(given: PlanInput, records: Mapping[int, GroupStatus]) -> list[GroupStatus]:
    """Groups on their way out, for people to see; they are not read back."""
    return [
        GroupStatus(
            index=group.index,
            attempt=group.attempt,
            revision=group.revision,
            phase=GroupPhase.DRAINING,
        )
        for group in given.view.observed.groups
        if group.draining and group.index not in records
    ]


def as_placements(
    view: ServiceView, groups: Sequence[Group], records: Sequence[GroupStatus]
) -> list[gang.GangPlacement]:
    """A service's groups as the whole placement sees them.

    One that failed and is kept for diagnosis waits for nothing, so no group waits for it.
    """
    known = {record.index: record for record in records}
    placements = []
    for group in groups:
        record = known.get(group.index) or GroupStatus(index=group.index)
        kept = record.phase is GroupPhase.FAILED and record.attempt == group.attempt
        if not (group.draining or kept):
            placements.append(_placement(view, group, record))
    return placements


def _placement(view: ServiceView, group: Group, record: GroupStatus) -> gang.GangPlacement:
    key = _gang_key(view, group.index)
    starved = [pod.unplaced_since or view.now for pod in group.pods if pod.unschedulable]
    return gang.GangPlacement(
        key=key,
        order=(view.created, *key),
        demand=group.demand,
        nodes=group.nodes,
        placed=group.placed,
        held=frozenset(pod.node for pod in group.pods if pod.node),
        partly_since=times.from_text(record.partly_since),
        starved_since=min(starved, default=None),
        yields=record.yields,
    )

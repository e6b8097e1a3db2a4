"""When a group has failed, and when it may try again. Pure decisions.

A group lives and dies whole, and only positive evidence kills it: a pod replaced or restarted
after all ranks once ran, a pod that leaves, a pod on a node that does not answer. A pod that
runs has time to come back; one that has not begun has none. Pod UIDs and restart
counts are compared with recorded ones, because a StatefulSet may have replaced a pod in
between. A group of one pod is the kubelet's to restart: that is only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from radixgrove.operator.api import times
from radixgrove.operator.api.spec import Recovery, RecoveryPolicy
from radixgrove.operator.api.status import MAX_DETAIL, GroupPhase, GroupStatus, PodRecord
from radixgrove.operator.api.values import seconds
from radixgrove.operator.planning.demand import Node
from radixgrove.operator.planning.diagnosis import problem, waited_in_vain
from radixgrove.operator.planning.observed import Group, Pod

MAX_BACKOFF = 300.0


@dataclass(frozen=True)
class Fault:
    """Why an attempt is over. `drain`: rank 0 still answers, let it finish what it has. `node`:
    where a pod was lost. `ended`: its own program ended; else something took a pod away, which says
    nothing of what the pod runs."""

    message: str
    drain: bool = False
    node: str = ""
    ended: bool = False


@dataclass(frozen=True)
class Assessment:
    fault: Fault | None = None
    recheck_at: float | None = None  # a fault is certain then, unless something changes


def assess(
    group: Group,
    record: GroupStatus,
    nodes: Mapping[str, Node],
    recovery: Recovery,
    holds_lease: Callable[[Group], bool],
    now: float,
) -> Assessment:
    """Whether the attempt is over. `holds_lease` is asked only about pods that seem lost."""
    stranded = _stranded(group, nodes)
    if stranded is not None:
        return Assessment(stranded)
    lost = _lost(group, nodes, seconds(recovery.node_grace), now)
    if lost.fault is not None and holds_lease(group):
        lost = Assessment(recheck_at=now + 5.0)
    if lost.fault is not None or group.nodes == 1:
        return lost
    fault = _broken(group, record)
    return Assessment(fault) if fault else lost


def _stranded(group: Group, nodes: Mapping[str, Node]) -> Fault | None:
    """A pod bound to a node that was lost before the pod ran: its group has not served yet."""
    for pod in group.pods:
        node = nodes.get(pod.node)
        began = pod.running or pod.phase != "Pending"
        if pod.node and not began and not (node and node.reachable):
            return Fault(f"{pod.name} never ran on node {pod.node}, which is lost", node=pod.node)
    return None


def _lost(group: Group, nodes: Mapping[str, Node], grace: float, now: float) -> Assessment:
    """Pods on nodes that do not answer, and pods that do not end."""
    recheck: float | None = None
    for pod in group.pods:
        for since, message in _silences(pod, nodes):
            if now >= since + grace:
                return Assessment(Fault(f"{pod.name} {message}", node=pod.node))
            recheck = min(recheck or since + grace, since + grace)
    return Assessment(recheck_at=recheck)


def _silences(pod: Pod, nodes: Mapping[str, Node]) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    if pod.node and pod.node not in nodes:
        found.append((float("-inf"), f"was on node {pod.node}, which is gone"))
    elif pod.node and not nodes[pod.node].reachable:
        found.append((nodes[pod.node].since, f"is on node {pod.node}, which does not answer"))
    if pod.deleted_at is not None:
        found.append((pod.deleted_at, "does not end"))
    return found


def _broken(group: Group, record: GroupStatus) -> Fault | None:
    """A group of several pods of which one is not what it was."""
    for pod in group.pods:
        if pod.deleted_at is not None:
            return Fault(f"{pod.name} is leaving", drain=True)
    if not (record.all_ran or group.all_run):
        return None  # ranks still wait for each other: a slow image pull is no failure
    if len(group.pods) < group.nodes:
        return Fault(f"{group.nodes - len(group.pods)} of {group.nodes} pods are gone")
    # Where a pod was taken away, the programs of the others have ended for the want of it.
    return _taken(group, record) or _ended(group, record)


def _taken(group: Group, record: GroupStatus) -> Fault | None:
    for pod in group.pods:
        before = _before(pod, record)
        if record.all_ran and before is not None and before.uid != pod.uid:
            return Fault(f"{pod.name} was replaced")
        if pod.phase in ("Failed", "Succeeded"):
            # Containers of these pods are always restarted: only the kubelet ends a whole one.
            return Fault(f"{pod.name} ended: {pod.verdict or pod.exited or pod.phase}")
        if pod.cut_off and _restarted(pod, record):
            return Fault(f"{pod.name} restarted: its machine did, or lost its container")
    return None


def _ended(group: Group, record: GroupStatus) -> Fault | None:
    for pod in group.pods:
        if pod.never_began and not record.all_ran:
            continue  # no program of it has ended yet
        if _restarted(pod, record):
            words = pod.exited or "its container left no message"
            # Restarts of before all ranks ran show only now.
            in_vain = not record.all_ran and waited_in_vain(pod, group)
            return Fault(f"{pod.name} restarted: {words}", ended=not in_vain)
    return None


def _before(pod: Pod, record: GroupStatus) -> PodRecord | None:
    return next((known for known in record.pods if known.name == pod.name), None)


def _restarted(pod: Pod, record: GroupStatus) -> bool:
    before = _before(pod, record)
    return pod.restarts > (before.restarts if before else 0)


def remember(group: Group, record: GroupStatus, recovery: Recovery, now: float) -> GroupStatus:
    """The record of a group without a fault, brought up to what is seen now."""
    if record.attempt != group.attempt:
        record = record.model_copy(
            update={"all_ran": False, "was_ready": False, "pods": [], "ready_since": None}
        )
    before = {pod.uid: pod.restarts for pod in record.pods}
    restarts = record.restarts
    if group.nodes == 1:
        restarts += sum(max(pod.restarts - before.get(pod.uid, 0), 0) for pod in group.pods)
    ready_since = (record.ready_since or times.to_text(now)) if group.ready else None
    stable = ready_since and now - (times.from_text(ready_since) or now) >= seconds(
        recovery.stable_after
    )
    partly = (record.partly_since or times.to_text(now)) if group.partly_placed else None
    trouble = problem(group)
    hindered = trouble is not None and trouble.passes_within > 0
    return record.model_copy(
        update={
            "attempt": group.attempt,
            "revision": group.revision,
            "restarts": restarts,
            "failures": 0 if stable else record.failures,
            "program_failures": 0 if stable else record.program_failures,
            "start_failed": record.start_failed and not group.ready,
            "hindered_since": (record.hindered_since or times.to_text(now)) if hindered else None,
            "last_failure": "" if stable else record.last_failure,
            "yields": 0 if group.ready else record.yields,
            "retry_at": None,
            "ready_since": ready_since,
            "partly_since": partly,
            "was_ready": record.was_ready or group.ready,
            "all_ran": record.all_ran or group.all_run,
            "pods": _records(group, record),
        }
    )


def _records(group: Group, record: GroupStatus) -> list[PodRecord]:
    """Restarts before all ranks ran stay unrecorded: such a rank waits to be replaced."""
    count = group.nodes == 1
    known = {pod.uid: pod.restarts for pod in record.pods}
    return [
        PodRecord(
            name=pod.name, uid=pod.uid, restarts=pod.restarts if count else known.get(pod.uid, 0)
        )
        for pod in group.pods
    ]


def after_fault(record: GroupStatus, fault: Fault, recovery: Recovery, now: float) -> GroupStatus:
    """The record once an attempt is over: `Failed` when it must not try again.

    What took a pod away passes, however often it comes: only failures of programs are counted out.
    """
    failures, of_programs = record.failures + 1, record.program_failures + fault.ended
    known = {
        "failures": failures,
        "program_failures": of_programs,
        "start_failed": record.start_failed or (fault.ended and not record.was_ready),
    }
    detail = _fitting(fault.message)
    if recovery.policy is RecoveryPolicy.NONE:
        return record.model_copy(update=known | {"phase": GroupPhase.FAILED, "detail": detail})
    if of_programs > recovery.max_restarts:
        last = _fitting(
            f"{of_programs} failures of its programs in a row; the last: {fault.message}"
        )
        return record.model_copy(update=known | {"phase": GroupPhase.FAILED, "detail": last})
    return record.model_copy(
        update=known
        | {
            "phase": GroupPhase.WAITING,
            "restarts": record.restarts + 1,
            "retry_at": times.to_text(now + backoff(failures, seconds(recovery.backoff))),
            "detail": detail,
            "last_failure": detail,
            "ready_since": None,
            "partly_since": None,
            "hindered_since": None,
        }
    )


def _fitting(words: str) -> str:
    """Cut in the middle to what a status may hold: the message of a container is the end of its
    log, two kilobytes perhaps, and say most at their own end."""
    if len(words) <= MAX_DETAIL:
        return words
    begin, cut = MAX_DETAIL // 4, " … "
    return words[:begin] + cut + words[begin + len(cut) - MAX_DETAIL :]


def backoff(failures: int, base: float) -> float:
    """None before the second attempt's first failure repeats: 0, base, 2·base, … at most 300 s."""
    if failures <= 1:
        return 0.0
    return min(base * 2.0 ** min(failures - 2, 30), MAX_BACKOFF)

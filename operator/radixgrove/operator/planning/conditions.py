"""Conditions, counts and columns: what a person reads. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixgrove.operator.api import names, times
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.status import (
    AutoscalingStatus,
    Condition,
    GroupPhase,
    GroupStatus,
    InferenceServiceStatus,
    MemberStatus,
    ModelStatus,
)
from radixgrove.operator.api.values import duration
from radixgrove.operator.planning.demand import DEFAULT_SCHEDULER
from radixgrove.operator.planning.diagnosis import Problem, problem
from radixgrove.operator.planning.model_cache import CacheStep
from radixgrove.operator.planning.model_names import Grant
from radixgrove.operator.planning.observed import Group
from radixgrove.operator.planning.plan import Plan
from radixgrove.operator.planning.remedies import explained, is_about_template, of_pod, of_requests
from radixgrove.operator.planning.rollback import Rollback, good_revision
from radixgrove.operator.planning.service_view import ServiceView
from radixgrove.operator.render.group import MODEL_VOLUME

# Reasons that need no action; Events of all others are warnings.
_CALM = {
    "AsExpected", "Asleep", "Cached", "CheckingImage", "Downloading", "Draining",
    "ImageVolume", "NodePath", "Provided", "Recovering", "Resolving", "RollingOut",
    "ScaledToZero", "Serving", "Settled", "Starting", "Suspended",
}  # fmt: skip

_FETCHING = {"Resolving", "Downloading"}


@dataclass(frozen=True)
class ConditionDraft:
    """One condition before its transition time is known."""

    type: str
    value: bool
    reason: str
    message: str = ""


@dataclass(frozen=True)
class StatusInput:
    """Everything a status is computed from."""

    view: ServiceView
    plan: Plan
    groups: Sequence[Group]  # without those that the plan deletes
    config: OperatorConfig
    url: str
    autoscaling: AutoscalingStatus | None
    members: Mapping[int, list[MemberStatus]] = field(default_factory=dict)  # by group
    outdated: str = ""  # what an older CRD drops of this status
    phases: Sequence[str] = ()  # what starting workers report
    unregistered: Sequence[Group] = ()  # they count as ready, and routers do not know them
    shared: str = ""  # what the namespace has in common with others


def compute(facts: StatusInput) -> InferenceServiceStatus:
    """The new status; equal to the one before when nothing a person would notice has changed."""
    before, now = facts.view.before, facts.view.now
    records = facts.plan.records
    ready = [r for r in records if r.phase is GroupPhase.READY]
    present = [r for r in records if r.phase is not GroupPhase.WAITING]
    desired = facts.view.desired
    served = any(c.type == "Ready" and c.status == "True" for c in before.conditions)
    # Routers that cannot be reached do not know new groups, which are not ready for clients then.
    unregistered = {group.index for group in facts.unregistered}
    known = [r for r in ready if r.index not in unregistered]
    reached = len(known) if served or not facts.view.routers_behind else 0
    is_ready = _ready(facts, reached, desired)
    verdicts = [is_ready, _progressing(facts, len(ready), desired)]
    verdicts += [_model_cached(facts), _degraded(facts, is_ready)]
    if facts.shared:  # no news where nothing is
        verdicts.append(ConditionDraft("Isolated", False, "Shared", facts.shared))
    selector = names.labels(facts.view.service.name, names.WORKER) | {names.POD_INDEX: "0"}
    given_up = facts.view.rollback
    if facts.view.target is None and before.rolled_back:  # not known yet what is asked for now
        given_up = Rollback(before.rolled_back, before.rolled_back_because)
    return InferenceServiceStatus(
        observed_generation=facts.view.generation,
        operator=facts.config.installation,
        url=facts.url,
        summary=f"{len(known)}/{desired}",
        selector=names.selector(selector),
        replicas=len(present),
        desired_replicas=desired,
        ready_replicas=len(known),
        updated_replicas=sum(1 for r in known if r.revision == facts.view.target),
        served=desired > 0 and (before.served or before.ready_replicas > 0 or bool(known)),
        revision=facts.view.target or before.revision,
        good_revision=good_revision(facts.view.target, before, [r.revision for r in ready]),
        rolled_back=given_up.revision if given_up else "",
        rolled_back_because=given_up.because if given_up else "",
        parallelism=facts.view.spec.layout,
        model=_model(facts),
        groups=[_with_members(record, facts) for record in records],
        last_attempt=facts.plan.last_attempt,
        autoscaling=facts.autoscaling,
        conditions=[
            _condition(verdict, facts.view.generation, before, now) for verdict in verdicts
        ],
    )


def _with_members(record: GroupStatus, facts: StatusInput) -> GroupStatus:
    return record.model_copy(update={"members": facts.members.get(record.index, [])})


def _model(facts: StatusInput) -> ModelStatus:
    """With the names that it answers to."""
    model, granted = facts.view.model.status, facts.view.names
    if granted is None:
        return model
    first, *others = granted.listed
    return model.model_copy(update={"name": first, "aliases": others})


def starting(facts: StatusInput) -> int:
    """Groups on their way to their first readiness, without trouble, in the time they have."""
    desired = facts.view.desired
    records = {record.index: record for record in facts.plan.records}
    if not facts.view.model.ready:
        ready = sum(1 for r in records.values() if r.phase is GroupPhase.READY)
        return max(desired - ready, 0) if facts.view.model.reason in _FETCHING else 0
    groups = {group.index: group for group in facts.groups if not group.draining}
    return sum(
        1
        for record in records.values()
        if record.phase in (GroupPhase.PENDING, GroupPhase.STARTING)
        and record.failures == 0
        and not record.was_ready
        and _in_time(groups.get(record.index), facts.view.now)
    )


def _in_time(group: Group | None, now: float) -> bool:
    if group is None:  # made in this very look
        return True
    begins = [pod.started_at or group.created for pod in group.pods if not pod.ready]
    return problem(group) is None and now < max(begins, default=group.created) + group.startup


def _condition(
    verdict: ConditionDraft, generation: int, before: InferenceServiceStatus, now: float
) -> Condition:
    value = "True" if verdict.value else "False"
    previous = next((c for c in before.conditions if c.type == verdict.type), None)
    since = times.to_seconds_text(now)
    if previous is not None and previous.status == value:
        since = previous.last_transition_time
    return Condition(
        type=verdict.type,
        status=value,
        reason=verdict.reason,
        message=verdict.message[:4096],
        last_transition_time=since,
        observed_generation=generation,
    )


def transitions(
    before: InferenceServiceStatus, after: InferenceServiceStatus
) -> list[tuple[str, str, str]]:
    """Events of changed conditions: type of event, reason, message."""
    old = {c.type: (c.status, c.reason) for c in before.conditions}
    events = []
    for condition in after.conditions:
        if old.get(condition.type) == (condition.status, condition.reason):
            continue
        kind = "Normal" if condition.reason in _CALM else "Warning"
        text = f"{condition.type} is {condition.status}: {condition.message or condition.reason}"
        events.append((kind, condition.reason, text[:1024]))
    return events


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """A merge patch from one status to the other: whole fields, and what they lose inside."""
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    for key, value in changed.items():
        old = before.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            changed[key] = value | dict.fromkeys(old.keys() - value.keys())
    return changed | dict.fromkeys(before.keys() - after.keys())


def refused(
    generation: int, reason: str, message: str, before: InferenceServiceStatus, now: float
) -> dict[str, Any]:
    """What changes in a status when the resource is left alone as it is; groups stay in mind."""
    verdict = ConditionDraft("Ready", False, reason, message)
    condition = _condition(verdict, generation, before, now)
    return {
        "observedGeneration": generation,
        "conditions": [condition.model_dump(mode="json", by_alias=True)],
    }


# ---- the four conditions -------------------------------------------------------------------------


def _blocking(facts: StatusInput) -> ConditionDraft | None:
    """What keeps a service from running at all."""
    if facts.view.invalid:
        return ConditionDraft("Ready", False, facts.view.invalid.reason, str(facts.view.invalid))
    if facts.view.spec.suspend:
        return ConditionDraft("Ready", False, "Suspended", "spec.suspend is true")
    return None


def _ready(facts: StatusInput, ready: int, desired: int) -> ConditionDraft:
    blocking = _blocking(facts)
    if blocking is not None and (facts.view.spec.suspend or not ready):
        return blocking
    if ready and facts.view.router:
        return ConditionDraft("Ready", False, facts.view.router.reason, facts.view.router.message)
    if ready:
        return ConditionDraft("Ready", True, "Serving", f"{ready} of {desired} groups are ready")
    if desired == 0:
        asleep = facts.view.spec.autoscaling is not None
        reason = "Asleep" if asleep else "ScaledToZero"
        text = "the next request wakes it" if asleep else "replicas is 0"
        return ConditionDraft("Ready", asleep, reason, text)
    if not facts.view.model.ready and not _refused_for(facts):
        return ConditionDraft("Ready", False, facts.view.model.reason, facts.view.model.message)
    reason, message = _hindrance(facts)
    return ConditionDraft("Ready", False, reason, message)


def _refused_for(facts: StatusInput) -> bool:
    """Whether a refused request may be why a model is not there: its claim, say, for a quota."""
    pending = _FETCHING | {"PodRefused", "QuotaBlocked", "Unschedulable"}
    waits = facts.view.model.reason in pending
    return bool(facts.view.failures) and waits


def _hindrance(facts: StatusInput) -> tuple[str, str]:
    """The first thing that keeps groups from being ready."""
    if facts.view.failures:
        return "RequestRefused", _refused(facts)
    tried = facts.view.image_check.problem
    if tried is not None:
        mend = of_pod(tried, facts.view.spec, facts.config, "workers")
        return tried.reason, f"{tried.message} ({mend})" if mend else tried.message
    for record in facts.plan.records:
        if record.phase is GroupPhase.FAILED:
            return _failed(facts, record)
    for group in facts.groups:
        trouble = None if group.draining else problem(group)
        if trouble is not None:
            return _explained(facts, group, trouble)
    if facts.unregistered:
        return "NotRegistered", _not_registered(facts)
    if facts.plan.waits_for:
        # It waits for nodes that another group has begun to take.
        return "InsufficientGPUs", f"no pods until {facts.plan.waits_for} is placed"
    waiting = [r for r in facts.plan.records if r.phase is GroupPhase.WAITING]
    if waiting and waiting[0].yields:
        return "InsufficientGPUs", waiting[0].detail
    if waiting and waiting[0].retry_at:
        allowed = facts.view.spec.recovery.max_restarts
        count = f"failure {waiting[0].failures} in a row"
        if waiting[0].program_failures:
            count += f", {waiting[0].program_failures} of its programs, {allowed} allowed"
        return "BackOff", f"next attempt at {waiting[0].retry_at} ({count}): {waiting[0].detail}"
    for record in facts.plan.records:
        if record.last_failure and record.phase in (GroupPhase.PENDING, GroupPhase.STARTING):
            why = f"group {record.index} is made again, since {record.last_failure}"
            return "Recovering", f"{why}; {_starting(facts)}"
    return "Starting", _starting(facts)


def _refused(facts: StatusInput) -> str:
    """What the API server said, or Redis did not, and what would mend it."""
    said = "; ".join(facts.view.failures)
    mend = of_requests(facts.view.failures, facts.view.spec, facts.config)
    return f"{said} ({mend})" if mend else said


def _not_registered(facts: StatusInput) -> str:
    pods = ", ".join(names.replica_id(group.name) for group in facts.unregistered)
    return (
        f"routers do not know {pods}, though ready: no lease in Redis. Its log says why; a "
        "NetworkPolicy of the namespace may keep it from Redis"
    )


def _failed(facts: StatusInput, record: GroupStatus) -> tuple[str, str]:
    recovery = facts.view.spec.recovery
    afresh = f"set the annotation {names.RESTART} to a new value to start afresh"
    words = f"group {record.index}: {record.detail}"
    if record.failures > recovery.max_restarts:
        limit = f"recovery.maxRestarts is {recovery.max_restarts}"
        return "RestartBudgetExhausted", f"{words}; {limit}: {afresh}"
    return "GroupFailed", f"{words}; recovery.policy is {recovery.policy.value}: {afresh}"


def _explained(facts: StatusInput, group: Group, trouble: Problem) -> tuple[str, str]:
    """Reason and message, with what would mend it where the group is as the resource says."""
    view = facts.view
    if trouble.reason == "Unschedulable" and not view.model.present:
        return view.model.reason, view.model.message
    if group.revision != view.target or view.rollback is not None:
        return trouble.reason, trouble.message
    nodes = view.observed.nodes.values()
    return trouble.reason, explained(trouble, group, view.spec, facts.config, nodes)


def _starting(facts: StatusInput) -> str:
    """What workers report, what they wait for, and how long a start may take."""
    phases = "; ".join(facts.phases) or "groups are starting"
    phases += _unseen(facts)
    ends = [
        (pod.started_at + group.startup, group.startup)
        for group in facts.groups
        for pod in group.pods
        if not group.draining and not pod.ready and pod.started_at is not None
    ]
    if not ends:
        return phases
    end, allowed = min(ends)
    return f"{phases}; until {times.to_seconds_text(end)} (startup.timeout: {duration(allowed)})"


def _unseen(facts: StatusInput) -> str:
    """Pods that a scheduler of the user's own has said nothing of."""
    for group in facts.groups:
        scheduler = group.demand.scheduler
        waiting = [pod.name for pod in group.pods if not (pod.node or pod.unschedulable)]
        if waiting and scheduler != DEFAULT_SCHEDULER and not group.draining:
            return f"; the scheduler {scheduler} (schedulerName) has not looked at {waiting[0]} yet"
    return ""


def _progressing(facts: StatusInput, ready: int, desired: int) -> ConditionDraft:
    blocking, model, router = _blocking(facts), facts.view.model, facts.view.router
    if blocking is not None and not (facts.view.spec.suspend and facts.groups):
        return ConditionDraft("Progressing", False, blocking.reason, blocking.message)
    if facts.plan.blocked:
        _, message = _hindrance(facts)
        text = f"the new revision does not start, the old one stays: {message}"
        return ConditionDraft("Progressing", False, "RolloutBlocked", text)
    if desired and not model.ready:
        return ConditionDraft("Progressing", True, model.reason, model.message)
    old = [r for r in facts.plan.records if r.revision != facts.view.target]
    if old and desired and facts.view.image_check.hold:
        return ConditionDraft("Progressing", True, "CheckingImage", facts.view.image_check.message)
    if old and desired:
        reason, message = _hindrance(facts)
        text = f"{len(old)} groups are of an old revision"
        if reason == "Starting":
            return ConditionDraft("Progressing", True, "RollingOut", text)
        return ConditionDraft("Progressing", True, reason, f"{text}: {message}")
    if ready < desired:
        reason, message = _hindrance(facts)
        given_up = any(r.phase is GroupPhase.FAILED for r in facts.plan.records)
        return ConditionDraft("Progressing", not given_up, reason, message)
    if router and desired:
        return ConditionDraft("Progressing", True, router.reason, router.message)
    if facts.unregistered and desired:
        return ConditionDraft("Progressing", False, "NotRegistered", _not_registered(facts))
    if len(facts.plan.records) > desired:
        return ConditionDraft("Progressing", True, "Draining", "groups are leaving")
    if facts.view.rollback and desired:
        return ConditionDraft("Progressing", False, "RolledBack", _given_up(facts.view.rollback))
    return ConditionDraft("Progressing", False, "Settled", "")


def _given_up(rollback: Rollback) -> str:
    return (
        f"revision {rollback.revision} did not start, so the last good one runs again; a change of "
        f"the spec or of the restart annotation is tried anew. {rollback.because}"
    )


def _model_cached(facts: StatusInput) -> ConditionDraft:
    model = facts.view.model
    for group in facts.groups if model.ready else ():
        trouble = None if group.draining else problem(group)
        if trouble is not None and _is_about_the_model(trouble, model):
            return ConditionDraft("ModelCached", False, *_explained(facts, group, trouble))
    present = model.ready and model.present
    return ConditionDraft("ModelCached", present, model.reason, model.message)


def _is_about_the_model(trouble: Problem, model: CacheStep) -> bool:
    mount = trouble.reason == "VolumeNotMounted" and f'"{MODEL_VOLUME}"' in trouble.message
    image = model.at.image if model.at is not None else ""
    pull = trouble.reason == "ImagePull" and bool(image) and f'"{image}"' in trouble.message
    return mount or pull or (trouble.reason == "ModelUnusable" and not is_about_template(trouble))


def _degraded(facts: StatusInput, ready: ConditionDraft) -> ConditionDraft:
    """Also while the service is down for a reason that needs action."""
    if facts.view.failures:
        return ConditionDraft("Degraded", True, "RequestRefused", _refused(facts))
    if facts.outdated:
        return ConditionDraft("Degraded", True, "OutdatedCRD", facts.outdated)
    if facts.view.invalid and facts.groups:
        return ConditionDraft("Degraded", True, facts.view.invalid.reason, str(facts.view.invalid))
    if facts.view.rollback and facts.view.desired:
        return ConditionDraft("Degraded", True, "RolledBack", _given_up(facts.view.rollback))
    failed = any(r.phase is GroupPhase.FAILED for r in facts.plan.records)
    lost = any(
        (r.failures or r.restarts) and r.phase is not GroupPhase.READY for r in facts.plan.records
    )
    if failed or lost or facts.plan.blocked:
        reason, message = _hindrance(facts)
        return ConditionDraft("Degraded", True, reason, message)
    if facts.unregistered:
        return ConditionDraft("Degraded", True, "NotRegistered", _not_registered(facts))
    down = facts.view.before.served and facts.view.desired > 0
    if not ready.value and (down or ready.reason not in _CALM):
        return ConditionDraft("Degraded", True, ready.reason, ready.message)
    if facts.view.names and facts.view.names.problems:
        return ConditionDraft("Degraded", True, "ModelNameTaken", _names_missed(facts.view.names))
    return ConditionDraft("Degraded", False, "AsExpected", "")


def _names_missed(granted: Grant) -> str:
    """Names nothing of other namespaces: a condition is read by one tenant."""
    answers = ", ".join([*granted.bare, *granted.scoped])
    return (
        f"{'; '.join(granted.problems)}: set model.name or model.aliases otherwise. It answers to "
        f"{answers}"
    )

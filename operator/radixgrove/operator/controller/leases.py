"""Which of a service's groups hold leases in Redis.

Leases are read once in a look. When Redis does not answer it is not asked again in that look, since
each question would take the client's whole timeout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.status import GroupPhase, MemberStatus
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.controller.context import ReconcileContext
from radixgrove.operator.controller.store import Key
from radixgrove.operator.planning.observed import Group
from radixgrove.operator.planning.plan import Plan
from radixgrove.operator.render import group as render_group
from radixgrove.operator.render.revision import InvalidEngine
from radixgrove.protocol.registry import LeaseState
from radixgrove.service.redis_rules import RedisUnavailable

_REGISTRATION_SECONDS = 15.0  # that a ready group may take to register; Redis may restart
_REGISTRATION_EVERY = 5.0  # seconds between looks at one that has not
_STATES = {
    LeaseState.NOT_READY: "NotReady",
    LeaseState.READY: "Ready",
    LeaseState.DRAINING: "Draining",
}


@dataclass(frozen=True)
class _Missing:
    """A ready group without a lease. `overdue`: by the last answer of Redis, for too long."""

    since: float
    overdue: bool = False


class Leases:
    """Thread-safe for different services."""

    def __init__(self, redis_side: RedisStore, config: OperatorConfig) -> None:
        self._redis = redis_side
        self._config = config
        self._missing: dict[Key, dict[str, _Missing]] = {}  # by the groups' UIDs

    def forget(self, key: Key) -> None:
        self._missing.pop(key, None)

    def holds(self, context: ReconcileContext, group: Group) -> bool:
        """Whether the group's worker has renewed its lease; False when Redis does not answer."""
        if context.redis_away:
            return False
        try:
            return self._redis.holds_lease(context.service.key, names.replica_id(group.name))
        except RedisUnavailable:
            context.redis_away = True
            return False

    def members(
        self, context: ReconcileContext, groups: Sequence[Group]
    ) -> dict[int, list[MemberStatus]]:
        """By group, its members by their leases; none when Redis does not answer."""
        found = self._read(context) or {}
        return {
            group.index: [
                MemberStatus(name=name, state=_STATES[state])
                for name, state in found.get(names.replica_id(group.name), {}).items()
            ]
            for group in groups
        }

    def unregistered(self, context: ReconcileContext, plan: Plan) -> list[Group]:
        """Groups that count as ready for a while, and of which routers know nothing all the same.

        Of another worker than the chart's none. While Redis does not answer, those of its last
        answer; others have the whole time again once it does.
        """
        before = self._missing.pop(context.key, {})
        ready = _counted(context, plan)
        known = self._read(context) if ready else {}
        missing = {}
        for group in ready:
            last = before.get(group.uid)
            if known is None:
                if last is not None:
                    missing[group.uid] = last if last.overdue else _Missing(context.now)
            elif self._lacks(context, group, known):
                since = last.since if last is not None else context.now
                overdue = context.now - since >= _REGISTRATION_SECONDS
                missing[group.uid] = _Missing(since, overdue)
        if missing:
            self._missing[context.key] = missing
            plan.requeue_by(context.now + _REGISTRATION_EVERY)
        return [group for group in ready if group.uid in missing and missing[group.uid].overdue]

    def _read(self, context: ReconcileContext) -> Mapping[str, Mapping[str, LeaseState]] | None:
        """By group, the members that hold leases; None: Redis does not answer."""
        if context.leases is None and not context.redis_away:
            try:
                context.leases = self._redis.members(context.service.key)
            except RedisUnavailable:
                context.redis_away = True
        return context.leases

    def _lacks(
        self, context: ReconcileContext, group: Group, known: Mapping[str, Mapping[str, LeaseState]]
    ) -> bool:
        """Whether it runs the chart's worker, which registers, and has not."""
        revision = context.revisions.get(group.revision)
        if revision is None or names.replica_id(group.name) in known:
            return False
        try:
            rendered = render_group.stateful_set(context.service, revision, 0, 0, self._config)
        except InvalidEngine:  # of an older operator
            return False
        return render_group.is_own_worker(rendered["spec"]["template"]["spec"], revision)


def _counted(context: ReconcileContext, plan: Plan) -> list[Group]:
    """Groups that count as ready once the plan is carried out."""
    leaving = plan.leaving()
    ready = {record.index for record in plan.records if record.phase is GroupPhase.READY}
    return [
        group
        for group in context.observed.groups
        if group.ready and not group.draining and group.name not in leaving and group.index in ready
    ]

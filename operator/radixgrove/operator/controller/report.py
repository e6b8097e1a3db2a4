"""Says how a service stands: status, Events, metrics, and what its neighbours need to know."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixgrove.operator.api import metrics
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.status import AutoscalingStatus, InferenceServiceStatus, MemberStatus
from radixgrove.operator.cluster.worker_probe import WorkerProbe
from radixgrove.operator.controller.access import Access
from radixgrove.operator.controller.context import ReconcileContext
from radixgrove.operator.controller.leases import Leases
from radixgrove.operator.controller.status_writer import StatusWriter, as_json
from radixgrove.operator.controller.store import Key, Store
from radixgrove.operator.planning import conditions
from radixgrove.operator.planning.observed import Group
from radixgrove.operator.planning.plan import Plan, as_placements
from radixgrove.operator.render import router as render_router

_MEMBERS_SECONDS = 2.0  # until members without leases are looked at again


class Reporter:
    """Thread-safe for different services."""

    def __init__(
        self,
        store: Store,
        probe: WorkerProbe,
        access: Access,
        status: StatusWriter,
        config: OperatorConfig,
        autoscaling: Callable[[Key], AutoscalingStatus | None],
        enqueue: Callable[[Key], None],
        leases: Leases,
    ) -> None:
        self._store = store
        self._probe = probe
        self._access = access
        self._status = status
        self._config = config
        self._autoscaling = autoscaling
        self._enqueue = enqueue
        self._leases = leases

    def report(self, context: ReconcileContext, plan: Plan) -> None:
        """Raises KubeError when the status cannot be written."""
        leaving = {group.uid for group in plan.delete}
        groups = [group for group in context.observed.groups if group.uid not in leaving]
        placements = as_placements(context, groups, plan.records)
        for other in self._store.placed(context.key, placements, bool(plan.waits_for)):
            self._enqueue(other)
        own_router = render_router.router_url(context.service, self._config)
        facts = conditions.StatusInput(
            view=context,
            plan=plan,
            groups=groups,
            config=self._config,
            url=own_router if context.spec.router.dedicated else self._config.router.url,
            autoscaling=self._autoscaling(context.key),
            outdated=self._status.outdated(context.key),
            phases=self._probe.phases(groups, self._access.management_keys(context.key[0])),
            shared=_shared(context.key[0], self._config),
            members=self._members_of(context, plan, groups),
            unregistered=self._leases.unregistered(context, plan),
        )
        after = conditions.compute(facts)
        live = context.body.get("status") or {}
        body = self._status.lasting(context.key, live, conditions.difference(live, as_json(after)))
        if body:
            self._status.write(context.key, body)
        for kind, reason, message in [*plan.events, *conditions.transitions(context.before, after)]:
            with context.trying():
                self._status.event(context.body, kind, reason, message)
        _measure(context.key, plan, after, conditions.starting(facts))

    def _members_of(
        self, context: ReconcileContext, plan: Plan, groups: Sequence[Group]
    ) -> dict[int, list[MemberStatus]]:
        """Data-parallel members by the group's index, where groups have several."""
        several = context.spec.layout.dp
        ready = [group for group in groups if group.ready and not group.draining]
        if several == 1 or not ready:
            return {}
        found = self._leases.members(context, ready)
        if any(len(members) < several for members in found.values()):
            plan.requeue_by(context.now + _MEMBERS_SECONDS)  # no event says that they have come
        return found


def _shared(namespace: str, config: OperatorConfig) -> str:
    """What the namespace has in common with others; "": nothing."""
    if namespace == config.namespace:
        return (
            "services in the operator's own namespace hold the keys of the installation: "
            "everyone who may make pods there can answer for every model"
        )
    if not config.redis.users:
        return (
            "all namespaces come to Redis as one user (redis.users is false): their pods can "
            "change what routers know of the models and replicas of all"
        )
    return ""


def _measure(key: Key, plan: Plan, after: InferenceServiceStatus, starting: int) -> None:
    counts = (after.ready_replicas, after.desired_replicas, starting)
    for state, count in zip(metrics.GROUP_STATES, counts, strict=True):
        metrics.GROUPS.labels(*key, state).set(count)
    metrics.FIRST_START.labels(*key).set(starting > 0 and not after.served)
    recovered = sum(1 for _, reason, _ in plan.events if reason == "GroupRecovery")
    metrics.GROUP_RECOVERIES.labels(*key).inc(recovered)

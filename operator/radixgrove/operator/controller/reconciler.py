"""One reconciliation of one service: observe, prepare, decide, act, report.

Level-based: nothing depends on which event led here. When one request is refused, the others still
happen; the refusal is named in a condition and tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from radixgrove.operator.api import metrics, names, times
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import SERVICE, ServiceObject
from radixgrove.operator.api.spec import InferenceServiceSpec
from radixgrove.operator.api.status import AutoscalingStatus, GroupPhase, InferenceServiceStatus
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.cluster.worker_probe import WorkerProbe
from radixgrove.operator.controller.access import Access
from radixgrove.operator.controller.act import Actor
from radixgrove.operator.controller.context import ReconcileContext
from radixgrove.operator.controller.leases import Leases
from radixgrove.operator.controller.name_ledger import NameLedger
from radixgrove.operator.controller.observe import Observer
from radixgrove.operator.controller.prepare import Preparer
from radixgrove.operator.controller.report import Reporter
from radixgrove.operator.controller.status_writer import StatusWriter
from radixgrove.operator.controller.store import Key, Store, collision, other_service_of
from radixgrove.operator.kube.client import Kube
from radixgrove.operator.kube.ownership import Ownership
from radixgrove.operator.planning import conditions
from radixgrove.operator.planning.demand import NodeDemand, demand_of
from radixgrove.operator.planning.plan import Plan, PlanInput, as_placements, make_plan
from radixgrove.operator.render import group as render_group
from radixgrove.operator.render.common import Service
from radixgrove.operator.render.revision import InvalidEngine, first_mistake
from radixgrove.protocol.errors import Interrupted
from radixgrove.service.redis_rules import RedisUnavailable

logger = logging.getLogger(__name__)

_STARTING_EVERY = 5.0  # seconds between looks at what starts: no watch tells how far it is
_ELSEWHERE_EVERY = 60.0  # seconds between looks at what another installation looks after


class Incomplete(Interrupted):
    """Some requests failed; the look is repeated."""


class Reconciler:
    """Safe to call from several threads, for different services."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        access: Access,
        ledger: NameLedger,
        redis_side: RedisStore,
        probe: WorkerProbe,
        config: OperatorConfig,
        autoscaling: Callable[[Key], AutoscalingStatus | None],
        enqueue: Callable[[Key], None],
    ) -> None:
        """`enqueue`: another service, or this one, is to be looked at soon."""
        self._kube = kube
        self._store = store
        self._probe = probe
        self._config = config
        self._enqueue = enqueue
        self._ownership = Ownership(kube, config)
        self._status = StatusWriter(kube, enqueue)
        self._observer = Observer(kube, store)
        self._access = access
        self._preparer = Preparer(kube, store, access, ledger, config)
        self._leases = Leases(redis_side, config)
        self._actor = Actor(kube, redis_side, self._status, config)
        self._reporter = Reporter(
            store,
            probe,
            access,
            self._status,
            config,
            autoscaling,
            enqueue,
            self._leases,
        )
        self._elsewhere: dict[Key, str] = {}  # the installation that looks after it

    def serving(self, key: Key) -> Sequence[str]:
        """Replica ids of the service's groups that routers may use, as last decided."""
        return self._actor.serving(key)

    def reconcile(self, key: Key) -> float | None:
        """Seconds until the next look; None: when something happens.

        Raises Incomplete or KubeError when the look must be repeated soon, NotLeading.
        """
        body = self._kube.get(SERVICE, *key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._gone(key)
            return None
        holder = self._ownership.holder(body)
        if holder:
            self._leave(body, holder)
            return _ELSEWHERE_EVERY
        self._elsewhere.pop(key, None)
        context = self._begin(self._ownership.claim(body, known=self._actor.knows(key)))
        if context is None:
            return None
        self._observer.observe(context)
        self._preparer.prepare(context)
        plan = self._decide(context)
        self._actor.act(context, plan)
        self._reporter.report(context, plan)
        self._access.report(key, context.keys, settled=_is_settled(context, plan))
        if context.failures:
            raise Incomplete("; ".join(context.failures))
        return self._next_look(context, plan)

    def _gone(self, key: Key) -> None:
        """Its children go by garbage collection; routers and neighbours are informed."""
        for other in self._store.service_gone(key):
            self._enqueue(other)
        self._elsewhere.pop(key, None)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        self._status.forget(key)
        self._leases.forget(key)
        metrics.forget(*key)
        try:
            self._actor.forget(key)
        except RedisUnavailable as error:
            raise Incomplete(f"Redis does not answer: {error}") from error

    def _leave(self, body: ServiceObject, holder: str) -> None:
        """Two installations would undo each other's work: the second leaves, with one Event."""
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        self._forget(key)
        if self._elsewhere.get(key) == holder:
            return
        message = (
            f"the installation {holder} looks after it, so {self._config.installation} leaves it "
            "alone: give each installation namespaces of its own (operator.namespaces)"
        )
        logger.warning("%s/%s: %s", *key, message)
        self._status.event(body, "Warning", "ServedElsewhere", message)
        self._elsewhere[key] = holder

    def _begin(self, body: ServiceObject) -> ReconcileContext | None:
        """None for a resource that is left alone; its status then says why."""
        meta = body["metadata"]
        try:
            before = InferenceServiceStatus.model_validate(body.get("status") or {})
        except ValidationError:
            before = InferenceServiceStatus()  # damaged by hand: start from what is there
        try:
            spec = InferenceServiceSpec.model_validate(body.get("spec", {}))
        except ValidationError as error:
            # The API server's schema is that of another version of the operator.
            self._refuse(body, before, "InvalidSpec", f"spec.{first_mistake(error)}")
            return None
        own = other_service_of(body)
        taken = collision(own, self._store.services()) if own is not None else ""
        if taken:
            self._refuse(body, before, "NameCollides", taken)
            return None
        return ReconcileContext(
            body=body,
            service=Service(meta["namespace"], meta["name"], meta["uid"]),
            spec=spec,
            created=times.from_text(meta.get("creationTimestamp")) or 0.0,
            generation=meta.get("generation", 0),
            before=before,
            now=time.time(),
        )

    def _refuse(
        self, body: ServiceObject, before: InferenceServiceStatus, reason: str, message: str
    ) -> None:
        meta = body["metadata"]
        change = conditions.refused(meta.get("generation", 0), reason, message, before, time.time())
        old = body.get("status") or {}
        if any(old.get(key) != value for key, value in change.items()):
            logger.error("%s/%s: %s", meta["namespace"], meta["name"], message)
            self._kube.patch(
                names.KIND, meta["namespace"], meta["name"], {"status": change}, sub="status"
            )

    def _decide(self, context: ReconcileContext) -> Plan:
        own = as_placements(context, context.observed.groups, context.before.groups)
        return make_plan(
            PlanInput(
                view=context,
                unused_attempts=self._actor.unused_attempts(context.key),
                placements=[*own, *self._store.placements(besides=context.key)],
                demand=lambda revision: self._demand(context, revision),
                holds_lease=lambda group: self._leases.holds(context, group),
                silent_nodes=self._probe.silent_nodes,
                config=self._config,
            )
        )

    def _demand(self, context: ReconcileContext, revision: str) -> NodeDemand:
        try:
            rendered = render_group.stateful_set(
                context.service, context.revisions[revision], 0, 0, self._config
            )
        except InvalidEngine:  # which its creation reports
            return NodeDemand()
        return demand_of(rendered["spec"]["template"]["spec"])

    def _next_look(self, context: ReconcileContext, plan: Plan) -> float:
        """Seconds; pods, Jobs and the resource itself bring it about earlier when they change."""
        delay = self._config.resync
        names_due = context.names.retry_at if context.names else None
        for due in (plan.requeue_at, context.model.requeue_at, names_due):
            if due is not None:
                delay = min(delay, due - time.time())
        if any(r.phase in (GroupPhase.STARTING, GroupPhase.PENDING) for r in plan.records):
            delay = min(delay, _STARTING_EVERY)
        if context.image_check.unseen:
            delay = min(delay, _STARTING_EVERY)
        return max(delay, 0.05)


def _is_settled(context: ReconcileContext, plan: Plan) -> bool:
    """Whether all that is wanted runs, in the present revision."""
    ready = [r for r in plan.records if r.phase is GroupPhase.READY]
    return (
        not context.failures
        and context.router is None
        and len(ready) == len(plan.records) >= context.desired
        and all(record.revision == context.target for record in ready)
    )

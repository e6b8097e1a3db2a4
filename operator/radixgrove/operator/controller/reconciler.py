"""One look at one service: read what is there, decide, write what differs, say how it stands.

Level-based: nothing depends on which event led here. Whatever one request is refused, the others
still happen; the refusal is named in a condition and tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from radixgrove.operator.api import metrics, names, times
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.spec import InferenceServiceSpec
from radixgrove.operator.api.status import (
    AutoscalingStatus,
    GroupPhase,
    GroupStatus,
    InferenceServiceStatus,
)
from radixgrove.operator.cluster.redis_store import RedisAway, RedisStore
from radixgrove.operator.cluster.worker_probe import WorkerProbe
from radixgrove.operator.controller import dedicated_router
from radixgrove.operator.controller.context import ReconcileContext
from radixgrove.operator.controller.crd_skew import CrdSkew
from radixgrove.operator.controller.store import (
    Key,
    OtherService,
    Store,
    name_conflict,
    other_service_of,
)
from radixgrove.operator.kube.client import Kube, KubeError, controllers, covers
from radixgrove.operator.kube.events import event
from radixgrove.operator.kube.keys import Keys
from radixgrove.operator.kube.ownership import Ownership
from radixgrove.operator.planning import conditions, model_cache
from radixgrove.operator.planning.observed import (
    Group,
    JobState,
    Node,
    ObservedState,
    group_of,
    highest_attempt,
    job_of,
    node_of,
)
from radixgrove.operator.planning.plan import NewAttempt, Plan, PlanInput, as_placements, make_plan
from radixgrove.operator.render import group as render_group
from radixgrove.operator.render import models, policies
from radixgrove.operator.render import router as render_router
from radixgrove.operator.render.common import Service
from radixgrove.operator.render.revision import (
    InvalidEngine,
    first_mistake,
    revision_of,
    thaw,
)
from radixgrove.protocol.model_table import SHARED, ModelEntry

logger = logging.getLogger(__name__)

Object = dict[str, Any]

_STARTING_EVERY = 5.0  # seconds between questions to starting workers
_REFUSED_AFTER = 2.0  # seconds without pods before asking why
_ELSEWHERE_EVERY = 60.0  # seconds between looks at what another installation looks after


class Incomplete(Exception):
    """Some requests failed; the look is repeated."""


class Reconciler:
    """Safe to call from several threads, for different services."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        keys: Keys,
        redis_side: RedisStore,
        probe: WorkerProbe,
        config: OperatorConfig,
        autoscaling: Callable[[Key], AutoscalingStatus | None],
        enqueue: Callable[[Key], None],
    ) -> None:
        self._kube = kube
        self._store = store
        self._keys = keys
        self._redis = redis_side
        self._probe = probe
        self._config = config
        self._autoscaling = autoscaling
        self._enqueue = enqueue
        self._ownership = Ownership(kube, config)
        self._elsewhere: dict[Key, str] = {}  # the installation that looks after it
        self._serving: dict[Key, list[str]] = {}
        # Numbers of attempts of which the API server has made nothing. Only this process knows of
        # them, and the next one leaves them out.
        self._unused: dict[Key, set[int]] = {}
        self._outdated = CrdSkew(kube)

    def serving(self, key: Key) -> Sequence[str]:
        """Replica ids of the service's groups that routers may use, as last decided."""
        return self._serving.get(key, [])

    def reconcile(self, key: Key) -> float | None:
        """Seconds until the next look; None: when something happens.

        Raises Incomplete or KubeError when the look must be repeated soon, NotLeading.
        """
        body = self._kube.get(names.KIND, *key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._gone(key)
            return None
        holder = self._ownership.holder(body)
        if holder:
            self._leave(body, holder)
            return _ELSEWHERE_EVERY
        self._elsewhere.pop(key, None)
        context = self._begin(self._ownership.claim(body, known=key in self._serving))
        if context is None:
            return None
        self._observe(context)
        self._prepare(context)
        plan = self._decide(context)
        self._act(context, plan)
        self._report(context, plan)
        if context.failures:
            raise Incomplete("; ".join(context.failures))
        return self._next_look(context, plan)

    # ---- what is there ---------------------------------------------------------------------------

    def _gone(self, key: Key) -> None:
        """Children go by garbage collection; routers and neighbours are told."""
        for other in self._store.service_gone(key):
            self._enqueue(other)
        self._elsewhere.pop(key, None)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        self._serving.pop(key, None)
        self._unused.pop(key, None)
        self._outdated.forget(key)
        metrics.forget(*key)
        try:
            self._redis.drop(names.service_key(*key))
        except RedisAway as error:
            raise Incomplete(f"Redis does not answer: {error}") from error

    def _leave(self, body: Object, holder: str) -> None:
        """Two that served one service would undo each other's work: the second says so, once."""
        key = (body["metadata"]["namespace"], body["metadata"]["name"])
        self._forget(key)
        if self._elsewhere.get(key) == holder:
            return
        words = (
            f"the installation {holder} looks after it, so {self._config.installation} leaves it "
            "alone: give each installation namespaces of its own (operator.namespaces)"
        )
        logger.warning("%s/%s: %s", *key, words)
        self._event(body, "Warning", "ServedElsewhere", words)
        self._elsewhere[key] = holder

    def _begin(self, body: Object) -> ReconcileContext | None:
        meta = body["metadata"]
        try:
            before = InferenceServiceStatus.model_validate(body.get("status") or {})
        except ValidationError:
            before = InferenceServiceStatus()  # damaged by hand: start from what is there
        try:
            spec = InferenceServiceSpec.model_validate(body.get("spec", {}))
        except ValidationError as error:
            # The API server's schema is that of another version of the operator.
            self._refuse(body, before, f"spec.{first_mistake(error)}")
            return None
        service = Service(meta["namespace"], meta["name"], meta["uid"])
        created = times.from_text(meta.get("creationTimestamp")) or 0.0
        return ReconcileContext(body, spec, service, created, before, time.time())

    def _refuse(self, body: Object, before: InferenceServiceStatus, words: str) -> None:
        meta = body["metadata"]
        said = conditions.refused(meta.get("generation", 0), words, before, time.time())
        old = body.get("status") or {}
        if any(old.get(key) != value for key, value in said.items()):
            logger.error("%s/%s: %s", meta["namespace"], meta["name"], words)
            self._kube.patch(
                names.KIND, meta["namespace"], meta["name"], {"status": said}, sub="status"
            )

    def _observe(self, context: ReconcileContext) -> None:
        namespace = context.service.namespace
        labels = names.labels(context.service.name, names.WORKER)
        all_sets = self._kube.list("StatefulSet", namespace, labels)
        pods = self._kube.list("Pod", namespace, labels)
        context.sets = controllers(all_sets, context.service.uid)
        groups = []
        for stateful_set in context.sets:
            group = group_of(stateful_set, pods)
            if group is not None and len(group.pods) < group.nodes:
                group = group_of(stateful_set, pods, self._refusal(context, group))
            if group is not None:
                groups.append(group)
        context.observed = ObservedState(
            tuple(groups), self._nodes(groups), highest_attempt([*all_sets, *pods])
        )
        context.config_maps = sorted(
            controllers(self._kube.list("ConfigMap", namespace, labels), context.service.uid),
            key=lambda config_map: str(config_map["metadata"].get("creationTimestamp")),
        )
        for config_map in context.config_maps:
            try:
                revision = thaw(config_map.get("data") or {})
            except ValueError as error:
                logger.warning("%s: %s", config_map["metadata"]["name"], error)
                continue
            context.revisions[config_map["metadata"]["labels"].get(names.REVISION, "")] = revision

    def _refusal(self, context: ReconcileContext, group: Group) -> str:
        """Why a StatefulSet's pods are not admitted, in the API server's own words."""
        if group.deleting or context.now - group.created < _REFUSED_AFTER:
            return ""
        with context.trying():
            fields = f"involvedObject.name={group.name},reason=FailedCreate"
            events = self._kube.list("Event", context.service.namespace, fields=fields)
            own = [e for e in events if e.get("involvedObject", {}).get("uid") == group.uid]
            if own:
                last = max(own, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime")))
                return str(last.get("message", ""))[:1024]
        return ""

    def _nodes(self, groups: Sequence[Group]) -> dict[str, Node]:
        """The watch may lag behind a scheduler: a node it does not know is looked up."""
        known = self._store.nodes()
        for name in {pod.node for group in groups for pod in group.pods if pod.node} - set(known):
            for node in self._kube.list("Node", None, fields=f"metadata.name={name}"):
                known[name] = node_of(node)
        return known

    # ---- what does not depend on groups ----------------------------------------------------------

    def _prepare(self, context: ReconcileContext) -> None:
        """Model, revision and the service's own guards, before any group."""
        own = other_service_of(context.body)
        assert own is not None
        other_services = self._store.services()
        context.name_taken = name_conflict(own, other_services)
        same_namespace = [n for n in other_services if n.service.namespace == own.service.namespace]
        with context.trying():
            context.keys = self._give_keys(context, same_namespace, own)
        for child in self._guards(context):
            with context.trying():
                self._kube.apply_cached(child)
        if context.spec.router.dedicated:
            dedicated_router.keep(self._kube, context, self._config)
        else:
            dedicated_router.remove(self._kube, context, self._config)
        self._remove_policies(context)
        self._model(context, own, same_namespace)
        step = context.model
        # Groups of new keys would otherwise start with the old ones, and keep them.
        if step is None or step.at is None or context.name_taken or not context.keys:
            return
        restart = context.body["metadata"].get("annotations", {}).get(names.RESTART, "")
        target = revision_of(
            context.spec,
            context.service.name,
            step.at,
            restart,
            self._config,
            context.keys,
            step.size,
        )
        target = context.revisions.get(target.hash, target)  # as it was frozen
        try:
            render_group.stateful_set(context.service, target, 0, 0, self._config)
        except InvalidEngine as error:
            context.invalid = error
            return
        if step.ready:
            context.target = target
            context.revisions[target.hash] = target

    def _give_keys(
        self, context: ReconcileContext, other_services: list[OtherService], own: OtherService
    ) -> str:
        """The hash of the keys that the namespace's pods read.

        Read at every look: Secrets are not watched, and pods without their keys do not start.
        """
        namespace = context.service.namespace
        users = [n.service for n in other_services if n.key != own.key] + [context.service]
        if namespace != self._config.namespace:
            users.sort(key=lambda user: user.uid)
            self._kube.apply(self._keys.copy(namespace, users))
        return self._keys.digest()

    def _guards(self, context: ReconcileContext) -> Iterator[Object]:
        service, config = context.service, self._config
        yield policies.service_account(service)
        if config.network_policies.enabled:
            yield policies.worker_network_policy(service, context.spec.router.dedicated, config)

    def _remove_policies(self, context: ReconcileContext) -> None:
        """NetworkPolicies from before they were switched off in the chart."""
        if self._config.network_policies.enabled:
            return
        labels = {names.MANAGED_BY: names.MANAGER, names.SERVICE: context.service.name}
        with context.trying():
            for policy in self._kube.list("NetworkPolicy", context.service.namespace, labels):
                meta = policy["metadata"]
                self._kube.delete("NetworkPolicy", meta["namespace"], meta["name"], meta["uid"])

    def _model(
        self, context: ReconcileContext, own: OtherService, other_services: list[OtherService]
    ) -> None:
        namespace, known = context.service.namespace, context.before.model
        jobs: dict[str, JobState] = {}
        for name in model_cache.wanted_jobs(context.service, context.spec, known):
            job = self._kube.get("Job", namespace, name)
            if job is not None:
                pods = self._kube.list("Pod", namespace, {"job-name": name})
                jobs[name] = job_of(job, pods)
        found = {
            name: self._kube.get("PersistentVolumeClaim", namespace, name)
            for name in model_cache.wanted_claims(context.spec, known)
        }
        claims = {name: claim for name, claim in found.items() if claim is not None}
        users = sorted({n.key: n for n in [*other_services, own]}.values(), key=lambda n: n.age)
        cache = model_cache.Cache(
            jobs, claims, [models.User(n.service, n.spec.model.cache, n.claim) for n in users]
        )
        step = model_cache.decide(
            context.service, context.spec, known, cache, self._config, context.now
        )
        for child in step.apply:
            with context.trying():
                self._kube.apply_cached(child)
        for done in step.delete_jobs:
            with context.trying():
                self._kube.delete("Job", namespace, done.name, done.uid)
        context.model = step

    # ---- groups ----------------------------------------------------------------------------------

    def _decide(self, context: ReconcileContext) -> Plan:
        device = context.spec.hardware.device.value
        groups = context.observed.groups
        own = as_placements(context.service, context.created, device, groups, context.before.groups)
        return make_plan(
            PlanInput(
                service=context.service,
                spec=context.spec,
                created=context.created,
                records=context.before.groups,
                last_attempt=context.before.last_attempt,
                unused_attempts=self._unused.get(context.key, ()),
                observed=context.observed,
                target=context.target.hash if context.target else None,
                previous=context.before.revision,
                known_revisions=set(context.revisions),
                device=device,
                placements=[*own, *self._store.placements(besides=context.key)],
                others_wait=self._store.somebody_waits(device, besides=context.key),
                holds_lease=lambda group: self._holds_lease(context, group),
                silent_nodes=self._probe.silent_nodes,
                config=self._config,
                now=context.now,
            )
        )

    def _holds_lease(self, context: ReconcileContext, group: Group) -> bool:
        try:
            return self._redis.holds_lease(context.service.key, names.replica_id(group.name))
        except RedisAway:
            return False

    def _act(self, context: ReconcileContext, plan: Plan) -> None:
        """The plan's steps in its order; a step that fails stops those that rely on it."""
        namespace = context.service.namespace
        # An attempt whose number is written already needs no write before it is made.
        numbered = [new for new in plan.create if new.attempt > context.before.last_attempt]
        if numbered or plan.drain or plan.delete:
            records = {
                "groups": [_dump(record) for record in plan.records],
                "lastAttempt": plan.last_attempt,
            }
            self._write_status(context, records)
        with context.trying():
            self._tell_routers(context, plan)
        for group, because in plan.drain:
            with context.trying():
                annotations = {
                    names.DRAINING: times.to_text(context.now),
                    names.DRAIN_REASON: because,
                }
                body = {"metadata": {"uid": group.uid, "annotations": annotations}}
                self._kube.patch("StatefulSet", namespace, group.name, body)
        for group in plan.delete:
            with context.trying():
                self._kube.delete("StatefulSet", namespace, group.name, group.uid)
        for new in plan.create:
            with context.trying():
                self._create(context, plan, new)
        self._keep_groups(context, plan)
        self._remove_revisions(context, plan)

    def _tell_routers(self, context: ReconcileContext, plan: Plan) -> None:
        scaling = context.spec.autoscaling
        table = context.service.key if context.spec.router.dedicated else SHARED
        self._serving[context.key] = plan.serving
        if context.name_taken:
            self._redis.drop(context.service.key)
            return
        entry = ModelEntry(
            service=context.service.key,
            names=context.spec.model_names(context.service.name),
            attempts=plan.serving,
            desired=0 if context.spec.suspend else context.spec.replicas,
            wakes=scaling is not None and scaling.min == 0 and not context.spec.suspend,
        )
        context.untold = True
        self._redis.put(table, context.created, entry)
        context.untold = False

    def _create(self, context: ReconcileContext, plan: Plan, new: NewAttempt) -> None:
        service, config, revision = context.service, self._config, context.revisions[new.revision]
        unused = self._unused.setdefault(context.key, set())
        stateful_set = render_group.stateful_set(
            service, revision, new.index, new.attempt, config, new.avoid
        )
        unused.add(new.attempt)
        try:
            self._kube.apply_cached(render_group.revision_config_map(service, revision, config))
            unused.discard(new.attempt)
            made = self._kube.apply(stateful_set)
        except KubeError as error:
            if error.refused:
                unused.add(new.attempt)
            plan.not_made(new, str(error))
            raise
        self._companions(made)

    def _companions(self, stateful_set: Object) -> None:
        meta = stateful_set["metadata"]
        service = Service(meta["namespace"], meta["labels"][names.SERVICE], "")
        labels = {key: meta["labels"][key] for key in (
            *names.labels("", ""), names.GROUP_INDEX, names.ATTEMPT, names.REVISION
        )}  # fmt: skip
        self._kube.apply_cached(render_group.headless_service(service, labels, meta["uid"]))
        if self._config.network_policies.enabled:
            self._kube.apply_cached(render_group.group_network_policy(service, labels, meta["uid"]))

    def _keep_groups(self, context: ReconcileContext, plan: Plan) -> None:
        """Undoes what others did to live groups. A set rendered by another version stays as is."""
        leaving = {group.name for group in plan.delete} | {group.name for group, _ in plan.drain}
        avoid = {(record.index, record.attempt): record.avoid for record in plan.records}
        for stateful_set in context.sets:
            meta = stateful_set["metadata"]
            labels, annotations = meta["labels"], meta.get("annotations", {})
            if meta["name"] in leaving or "deletionTimestamp" in meta:
                continue
            with context.trying():
                self._companions(stateful_set)
            revision = context.revisions.get(labels.get(names.REVISION, ""))
            if revision is None or names.DRAINING in annotations:
                continue
            index, attempt = int(labels[names.GROUP_INDEX]), int(labels[names.ATTEMPT])
            with context.trying():
                desired = render_group.stateful_set(
                    context.service, revision, index, attempt, self._config,
                    avoid.get((index, attempt), ()),
                )  # fmt: skip
                same = (
                    annotations.get(names.RENDERED)
                    == desired["metadata"]["annotations"][names.RENDERED]
                )
                if same and not covers(stateful_set, desired):
                    self._kube.apply(desired)
        live = [g for g in context.observed.groups if not g.draining and g.name not in leaving]
        pods = sum(g.nodes for g in live)
        absent = plan.expected() - {g.index for g in live}
        pods += sum(
            context.revisions[record.revision].hardware.nodes
            for record in plan.records
            if record.index in absent and record.revision in context.revisions
        )
        with context.trying():
            self._kube.apply_cached(policies.pod_disruption_budget(context.service, pods))

    def _remove_revisions(self, context: ReconcileContext, plan: Plan) -> None:
        used = {record.revision for record in plan.records}
        used |= {context.target.hash if context.target else context.before.revision}
        mounted = {name for stateful_set in context.sets for name in _mounted(stateful_set)}
        newest = {c["metadata"]["labels"].get(names.REVISION): c for c in context.config_maps}
        for config_map in context.config_maps:
            meta = config_map["metadata"]
            revision = meta["labels"].get(names.REVISION)
            kept = revision in used and newest[revision] is config_map
            if not kept and meta["name"] not in mounted:
                with context.trying():
                    self._kube.delete("ConfigMap", meta["namespace"], meta["name"], meta["uid"])

    # ---- what people see -------------------------------------------------------------------------

    def _report(self, context: ReconcileContext, plan: Plan) -> None:
        device = context.spec.hardware.device.value
        leaving = {group.uid for group in plan.delete}
        groups = [group for group in context.observed.groups if group.uid not in leaving]
        placements = as_placements(context.service, context.created, device, groups, plan.records)
        for other in self._store.placed(context.key, placements, device if plan.waits_for else ""):
            self._enqueue(other)
        facts = self._facts(context, plan, groups)
        after = conditions.compute(facts, context.before, context.now)
        live = context.body.get("status") or {}
        body = self._outdated.lasting(context.key, live, conditions.difference(live, _dump(after)))
        if body:
            self._write_status(context, body)
        for kind, reason, message in [*plan.events, *conditions.transitions(context.before, after)]:
            with context.trying():
                self._event(context.body, kind, reason, message)
        _measure(context.key, plan, after, conditions.starting(facts, context.now))

    def _facts(
        self, context: ReconcileContext, plan: Plan, groups: Sequence[Group]
    ) -> conditions.StatusInput:
        assert context.model is not None
        own = render_router.router_url(context.service, self._config)
        return conditions.StatusInput(
            name=context.service.name,
            operator=self._config.installation,
            generation=context.body["metadata"].get("generation", 0),
            spec=context.spec,
            url=own if context.spec.router.dedicated else self._config.router.url,
            target=context.target.hash if context.target else None,
            plan=plan,
            groups=groups,
            model=context.model,
            autoscaling=self._autoscaling(context.key),
            name_taken=context.name_taken,
            router=context.router,
            untold=context.untold,
            outdated=self._outdated.words(context.key),
            invalid=context.invalid,
            failures=context.failures,
            phases=self._probe.phases(groups),
        )

    def _write_status(self, context: ReconcileContext, body: Object) -> None:
        """A CRD that is older than this operator drops what it does not know: that is told next."""
        before = self._outdated.words(context.key)
        answer = self._kube.patch(names.KIND, *context.key, {"status": body}, sub="status")
        self._outdated.learn(context.key, body, answer.get("status") or {})
        words = self._outdated.words(context.key)
        if words != before:
            logger.warning("%s/%s: %s", *context.key, words or "the CRD has been renewed")
            self._enqueue(context.key)

    def _event(self, resource: Object, kind: str, reason: str, message: str) -> None:
        try:
            self._kube.create(event(resource, kind, reason, message, time.time()))
        except KubeError as error:
            if error.status != 409:  # said already
                raise

    def _next_look(self, context: ReconcileContext, plan: Plan) -> float:
        delay = self._config.resync
        if plan.requeue_at is not None:
            delay = min(delay, plan.requeue_at - time.time())
        if context.model is not None and context.model.requeue_at is not None:
            delay = min(delay, context.model.requeue_at - time.time())
        unready = [r for r in plan.records if r.phase in (GroupPhase.STARTING, GroupPhase.PENDING)]
        if unready:
            delay = min(delay, _STARTING_EVERY)
        return max(delay, 0.05)


def _measure(key: Key, plan: Plan, after: InferenceServiceStatus, starting: int) -> None:
    counts = (after.ready_replicas, after.desired_replicas, starting)
    for state, count in zip(metrics.GROUP_STATES, counts, strict=True):
        metrics.GROUPS.labels(*key, state).set(count)
    metrics.FIRST_START.labels(*key).set(starting > 0 and not after.served)
    recovered = sum(1 for _, reason, _ in plan.events if reason == "GroupRecovery")
    metrics.GROUP_RECOVERIES.labels(*key).inc(recovered)


def _dump(model: InferenceServiceStatus | GroupStatus) -> Object:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def _mounted(stateful_set: Object) -> list[str]:
    """Names of the ConfigMaps that a group's pods read."""
    volumes = stateful_set["spec"]["template"]["spec"].get("volumes", [])
    return [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]

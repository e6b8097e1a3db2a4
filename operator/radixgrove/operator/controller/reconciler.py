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
from radixgrove.operator.cluster.redis import RedisAway, RedisSide
from radixgrove.operator.cluster.worker_probe import WorkerProbe
from radixgrove.operator.controller import dedicated_router
from radixgrove.operator.controller.context import Look
from radixgrove.operator.controller.crd_skew import Outdated
from radixgrove.operator.controller.store import Key, Neighbour, Store, name_conflict, neighbour_of
from radixgrove.operator.kube.client import Kube, KubeError, controllers, covers
from radixgrove.operator.kube.events import event
from radixgrove.operator.kube.keys import Keys
from radixgrove.operator.kube.ownership import Ownership
from radixgrove.operator.planning import conditions, model_cache
from radixgrove.operator.planning.observed import (
    Group,
    JobState,
    Node,
    World,
    group_of,
    highest_attempt,
    job_of,
    node_of,
)
from radixgrove.operator.planning.plan import NewAttempt, Plan, Situation, as_placements, make_plan
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
        redis_side: RedisSide,
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
        self._outdated = Outdated(kube)

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
        look = self._begin(self._ownership.claim(body, known=key in self._serving))
        if look is None:
            return None
        self._observe(look)
        self._prepare(look)
        plan = self._decide(look)
        self._act(look, plan)
        self._report(look, plan)
        if look.failures:
            raise Incomplete("; ".join(look.failures))
        return self._next_look(look, plan)

    # ---- what is there ---------------------------------------------------------------------------

    def _gone(self, key: Key) -> None:
        """Children go by garbage collection; routers and neighbours are told."""
        for other in self._store.service_gone(key):
            self._enqueue(other)
        self._elsewhere.pop(key, None)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        self._serving.pop(key, None)
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

    def _begin(self, body: Object) -> Look | None:
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
        return Look(body, spec, service, created, before, time.time())

    def _refuse(self, body: Object, before: InferenceServiceStatus, words: str) -> None:
        meta = body["metadata"]
        said = conditions.refused(meta.get("generation", 0), words, before, time.time())
        old = body.get("status") or {}
        if any(old.get(key) != value for key, value in said.items()):
            logger.error("%s/%s: %s", meta["namespace"], meta["name"], words)
            self._kube.patch(
                names.KIND, meta["namespace"], meta["name"], {"status": said}, sub="status"
            )

    def _observe(self, look: Look) -> None:
        namespace = look.service.namespace
        labels = names.labels(look.service.name, names.WORKER)
        all_sets = self._kube.list("StatefulSet", namespace, labels)
        pods = self._kube.list("Pod", namespace, labels)
        look.sets = controllers(all_sets, look.service.uid)
        groups = []
        for stateful_set in look.sets:
            group = group_of(stateful_set, pods)
            if group is not None and len(group.pods) < group.nodes:
                group = group_of(stateful_set, pods, self._refusal(look, group))
            if group is not None:
                groups.append(group)
        look.world = World(tuple(groups), self._nodes(groups), highest_attempt([*all_sets, *pods]))
        look.config_maps = sorted(
            controllers(self._kube.list("ConfigMap", namespace, labels), look.service.uid),
            key=lambda config_map: str(config_map["metadata"].get("creationTimestamp")),
        )
        for config_map in look.config_maps:
            try:
                revision = thaw(config_map.get("data") or {})
            except ValueError as error:
                logger.warning("%s: %s", config_map["metadata"]["name"], error)
                continue
            look.revisions[config_map["metadata"]["labels"].get(names.REVISION, "")] = revision

    def _refusal(self, look: Look, group: Group) -> str:
        """Why a StatefulSet's pods are not admitted, in the API server's own words."""
        if group.deleting or look.now - group.created < _REFUSED_AFTER:
            return ""
        with look.trying():
            fields = f"involvedObject.name={group.name},reason=FailedCreate"
            events = self._kube.list("Event", look.service.namespace, fields=fields)
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

    def _prepare(self, look: Look) -> None:
        """Model, revision and the service's own guards, before any group."""
        own = neighbour_of(look.body)
        assert own is not None
        neighbours = self._store.services()
        look.name_taken = name_conflict(own, neighbours)
        same_namespace = [n for n in neighbours if n.service.namespace == own.service.namespace]
        with look.trying():
            look.keys = self._give_keys(look, same_namespace, own)
        for child in self._guards(look):
            with look.trying():
                self._kube.apply_cached(child)
        if look.spec.router.dedicated:
            dedicated_router.keep(self._kube, look, self._config)
        else:
            dedicated_router.remove(self._kube, look, self._config)
        self._remove_policies(look)
        self._model(look, own, same_namespace)
        step = look.model
        # Groups of new keys would otherwise start with the old ones, and keep them.
        if step is None or step.at is None or look.name_taken or not look.keys:
            return
        restart = look.body["metadata"].get("annotations", {}).get(names.RESTART, "")
        target = revision_of(
            look.spec, look.service.name, step.at, restart, self._config, look.keys, step.size
        )
        target = look.revisions.get(target.hash, target)  # as it was frozen
        try:
            render_group.stateful_set(look.service, target, 0, 0, self._config)
        except InvalidEngine as error:
            look.invalid = error
            return
        if step.ready:
            look.target = target
            look.revisions[target.hash] = target

    def _give_keys(self, look: Look, neighbours: list[Neighbour], own: Neighbour) -> str:
        """The hash of the keys that the namespace's pods read.

        Read at every look: Secrets are not watched, and pods without their keys do not start.
        """
        namespace = look.service.namespace
        users = [n.service for n in neighbours if n.key != own.key] + [look.service]
        if namespace != self._config.namespace:
            users.sort(key=lambda user: user.uid)
            self._kube.apply(self._keys.copy(namespace, users))
        return self._keys.digest()

    def _guards(self, look: Look) -> Iterator[Object]:
        service, config = look.service, self._config
        yield policies.service_account(service)
        if config.network_policies.enabled:
            yield policies.worker_network_policy(service, look.spec.router.dedicated, config)

    def _remove_policies(self, look: Look) -> None:
        """NetworkPolicies from before they were switched off in the chart."""
        if self._config.network_policies.enabled:
            return
        labels = {names.MANAGED_BY: names.MANAGER, names.SERVICE: look.service.name}
        with look.trying():
            for policy in self._kube.list("NetworkPolicy", look.service.namespace, labels):
                meta = policy["metadata"]
                self._kube.delete("NetworkPolicy", meta["namespace"], meta["name"], meta["uid"])

    def _model(self, look: Look, own: Neighbour, neighbours: list[Neighbour]) -> None:
        namespace, known = look.service.namespace, look.before.model
        jobs: dict[str, JobState] = {}
        for name in model_cache.wanted_jobs(look.service, look.spec, known):
            job = self._kube.get("Job", namespace, name)
            if job is not None:
                pods = self._kube.list("Pod", namespace, {"job-name": name})
                jobs[name] = job_of(job, pods)
        found = {
            name: self._kube.get("PersistentVolumeClaim", namespace, name)
            for name in model_cache.wanted_claims(look.spec, known)
        }
        claims = {name: claim for name, claim in found.items() if claim is not None}
        users = sorted({n.key: n for n in [*neighbours, own]}.values(), key=lambda n: n.age)
        cache = model_cache.Cache(
            jobs, claims, [models.User(n.service, n.spec.model.cache, n.claim) for n in users]
        )
        step = model_cache.decide(look.service, look.spec, known, cache, self._config, look.now)
        for child in step.apply:
            with look.trying():
                self._kube.apply_cached(child)
        for done in step.delete_jobs:
            with look.trying():
                self._kube.delete("Job", namespace, done.name, done.uid)
        look.model = step

    # ---- groups ----------------------------------------------------------------------------------

    def _decide(self, look: Look) -> Plan:
        device = look.spec.hardware.device.value
        groups = look.world.groups
        own = as_placements(look.service, look.created, device, groups, look.before.groups)
        return make_plan(
            Situation(
                service=look.service,
                spec=look.spec,
                created=look.created,
                records=look.before.groups,
                last_attempt=look.before.last_attempt,
                world=look.world,
                target=look.target.hash if look.target else None,
                previous=look.before.revision,
                known_revisions=set(look.revisions),
                device=device,
                placements=[*own, *self._store.placements(besides=look.key)],
                others_wait=self._store.somebody_waits(device, besides=look.key),
                holds_lease=lambda group: self._holds_lease(look, group),
                silent_nodes=self._probe.silent_nodes,
                config=self._config,
                now=look.now,
            )
        )

    def _holds_lease(self, look: Look, group: Group) -> bool:
        try:
            return self._redis.holds_lease(look.service.key, names.replica_id(group.name))
        except RedisAway:
            return False

    def _act(self, look: Look, plan: Plan) -> None:
        """The plan's steps in its order; a step that fails stops those that rely on it."""
        namespace = look.service.namespace
        if plan.create or plan.drain or plan.delete:
            records = {
                "groups": [_dump(record) for record in plan.records],
                "lastAttempt": plan.last_attempt,
            }
            self._write_status(look, records)
        with look.trying():
            self._tell_routers(look, plan)
        for group, because in plan.drain:
            with look.trying():
                annotations = {names.DRAINING: times.to_text(look.now), names.DRAIN_REASON: because}
                body = {"metadata": {"uid": group.uid, "annotations": annotations}}
                self._kube.patch("StatefulSet", namespace, group.name, body)
        for group in plan.delete:
            with look.trying():
                self._kube.delete("StatefulSet", namespace, group.name, group.uid)
        for new in plan.create:
            with look.trying():
                self._create(look, new)
        self._keep_groups(look, plan)
        self._remove_revisions(look, plan)

    def _tell_routers(self, look: Look, plan: Plan) -> None:
        scaling = look.spec.autoscaling
        table = look.service.key if look.spec.router.dedicated else SHARED
        self._serving[look.key] = plan.serving
        if look.name_taken:
            self._redis.drop(look.service.key)
            return
        entry = ModelEntry(
            service=look.service.key,
            names=look.spec.model_names(look.service.name),
            attempts=plan.serving,
            desired=0 if look.spec.suspend else look.spec.replicas,
            wakes=scaling is not None and scaling.min == 0 and not look.spec.suspend,
        )
        look.untold = True
        self._redis.put(table, look.created, entry)
        look.untold = False

    def _create(self, look: Look, new: NewAttempt) -> None:
        service, config, revision = look.service, self._config, look.revisions[new.revision]
        self._kube.apply_cached(render_group.revision_config_map(service, revision, config))
        stateful_set = render_group.stateful_set(
            service, revision, new.index, new.attempt, config, new.avoid
        )
        made = self._kube.apply(stateful_set)
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

    def _keep_groups(self, look: Look, plan: Plan) -> None:
        """Undoes what others did to live groups. A set rendered by another version stays as is."""
        leaving = {group.name for group in plan.delete} | {group.name for group, _ in plan.drain}
        avoid = {(record.index, record.attempt): record.avoid for record in plan.records}
        for stateful_set in look.sets:
            meta = stateful_set["metadata"]
            labels, annotations = meta["labels"], meta.get("annotations", {})
            if meta["name"] in leaving or "deletionTimestamp" in meta:
                continue
            with look.trying():
                self._companions(stateful_set)
            revision = look.revisions.get(labels.get(names.REVISION, ""))
            if revision is None or names.DRAINING in annotations:
                continue
            index, attempt = int(labels[names.GROUP_INDEX]), int(labels[names.ATTEMPT])
            with look.trying():
                desired = render_group.stateful_set(
                    look.service, revision, index, attempt, self._config,
                    avoid.get((index, attempt), ()),
                )  # fmt: skip
                same = (
                    annotations.get(names.RENDERED)
                    == desired["metadata"]["annotations"][names.RENDERED]
                )
                if same and not covers(stateful_set, desired):
                    self._kube.apply(desired)
        live = [g for g in look.world.groups if not g.draining and g.name not in leaving]
        pods = sum(g.nodes for g in live)
        absent = plan.expected() - {g.index for g in live}
        pods += sum(
            look.revisions[record.revision].hardware.nodes
            for record in plan.records
            if record.index in absent and record.revision in look.revisions
        )
        with look.trying():
            self._kube.apply_cached(policies.pod_disruption_budget(look.service, pods))

    def _remove_revisions(self, look: Look, plan: Plan) -> None:
        used = {record.revision for record in plan.records}
        used |= {look.target.hash if look.target else look.before.revision}
        mounted = {name for stateful_set in look.sets for name in _mounted(stateful_set)}
        newest = {c["metadata"]["labels"].get(names.REVISION): c for c in look.config_maps}
        for config_map in look.config_maps:
            meta = config_map["metadata"]
            revision = meta["labels"].get(names.REVISION)
            kept = revision in used and newest[revision] is config_map
            if not kept and meta["name"] not in mounted:
                with look.trying():
                    self._kube.delete("ConfigMap", meta["namespace"], meta["name"], meta["uid"])

    # ---- what people see -------------------------------------------------------------------------

    def _report(self, look: Look, plan: Plan) -> None:
        device = look.spec.hardware.device.value
        leaving = {group.uid for group in plan.delete}
        groups = [group for group in look.world.groups if group.uid not in leaving]
        placements = as_placements(look.service, look.created, device, groups, plan.records)
        for other in self._store.placed(look.key, placements, device if plan.waits_for else ""):
            self._enqueue(other)
        facts = self._facts(look, plan, groups)
        after = conditions.compute(facts, look.before, look.now)
        live = look.body.get("status") or {}
        body = self._outdated.lasting(look.key, live, conditions.difference(live, _dump(after)))
        if body:
            self._write_status(look, body)
        for kind, reason, message in [*plan.events, *conditions.transitions(look.before, after)]:
            with look.trying():
                self._event(look.body, kind, reason, message)
        _measure(look.key, plan, after, conditions.starting(facts, look.now))

    def _facts(self, look: Look, plan: Plan, groups: Sequence[Group]) -> conditions.Facts:
        assert look.model is not None
        own = render_router.router_url(look.service, self._config)
        return conditions.Facts(
            name=look.service.name,
            operator=self._config.installation,
            generation=look.body["metadata"].get("generation", 0),
            spec=look.spec,
            url=own if look.spec.router.dedicated else self._config.router.url,
            target=look.target.hash if look.target else None,
            plan=plan,
            groups=groups,
            model=look.model,
            autoscaling=self._autoscaling(look.key),
            name_taken=look.name_taken,
            router=look.router,
            untold=look.untold,
            outdated=self._outdated.words(look.key),
            invalid=look.invalid,
            failures=look.failures,
            phases=self._probe.phases(groups),
        )

    def _write_status(self, look: Look, body: Object) -> None:
        """A CRD that is older than this operator drops what it does not know: that is told next."""
        before = self._outdated.words(look.key)
        answer = self._kube.patch(names.KIND, *look.key, {"status": body}, sub="status")
        self._outdated.learn(look.key, body, answer.get("status") or {})
        words = self._outdated.words(look.key)
        if words != before:
            logger.warning("%s/%s: %s", *look.key, words or "the CRD has been renewed")
            self._enqueue(look.key)

    def _event(self, resource: Object, kind: str, reason: str, message: str) -> None:
        try:
            self._kube.create(event(resource, kind, reason, message, time.time()))
        except KubeError as error:
            if error.status != 409:  # said already
                raise

    def _next_look(self, look: Look, plan: Plan) -> float:
        delay = self._config.resync
        if plan.requeue_at is not None:
            delay = min(delay, plan.requeue_at - time.time())
        if look.model is not None and look.model.requeue_at is not None:
            delay = min(delay, look.model.requeue_at - time.time())
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

"""Carries a plan out: informs routers, drains, deletes, creates, and keeps what stays as it was."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import cast

from radixgrove.operator.api import names, times
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import StatefulSetObject
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.controller.context import ReconcileContext
from radixgrove.operator.controller.status_writer import StatusWriter, as_json
from radixgrove.operator.controller.store import Key
from radixgrove.operator.kube.client import Kube, KubeError, covers, is_rendering
from radixgrove.operator.planning.plan import NewAttempt, Plan
from radixgrove.operator.render import group as render_group
from radixgrove.operator.render import policies
from radixgrove.operator.render.common import Service
from radixgrove.protocol.model_table import SHARED, ModelEntry


class Actor:
    """Thread-safe for different services."""

    def __init__(
        self, kube: Kube, redis_side: RedisStore, status: StatusWriter, config: OperatorConfig
    ) -> None:
        self._kube = kube
        self._redis = redis_side
        self._status = status
        self._config = config
        self._serving: dict[Key, list[str]] = {}
        # Numbers of attempts of which the API server has made nothing. Only this process knows of
        # them, and the next one leaves them out.
        self._unused: dict[Key, set[int]] = {}

    def knows(self, key: Key) -> bool:
        """Whether it has acted for the service."""
        return key in self._serving

    def serving(self, key: Key) -> Sequence[str]:
        """Replica ids of the service's groups that routers may use, as last decided."""
        return self._serving.get(key, [])

    def unused_attempts(self, key: Key) -> Collection[int]:
        return self._unused.get(key, ())

    def forget(self, key: Key) -> None:
        """Takes a service from the routers. Raises RedisUnavailable."""
        self._serving.pop(key, None)
        self._unused.pop(key, None)
        self._redis.drop(names.service_key(*key))

    def act(self, context: ReconcileContext, plan: Plan) -> None:
        """The plan's steps in its order; a step that fails stops those that rely on it.

        Raises KubeError when the records that must be written first cannot be.
        """
        namespace = context.service.namespace
        # An attempt needs no write before it is made if its number is written already.
        numbered = [new for new in plan.create if new.attempt > context.before.last_attempt]
        if numbered or plan.drain or plan.delete:
            records = {
                "groups": [as_json(record) for record in plan.records],
                "lastAttempt": plan.last_attempt,
            }
            self._status.write(context.key, records)
        with context.trying():
            self._inform_routers(context, plan)
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
        self._keep_disruption_budget(context, plan)
        self._remove_revisions(context, plan)

    def _inform_routers(self, context: ReconcileContext, plan: Plan) -> None:
        scaling = context.spec.autoscaling
        table = context.service.key if context.spec.router.dedicated else SHARED
        self._serving[context.key] = plan.serving
        context.routers_behind = True
        if context.names is None:
            return
        entry = ModelEntry(
            service=context.service.key,
            names=context.names.listed,
            scoped=context.names.unlisted,
            attempts=plan.serving,
            desired=context.desired,
            namespace=context.service.namespace,
            urls=self._urls(context, plan.serving),
            wakes=scaling is not None and scaling.min == 0 and not context.spec.suspend,
        )
        self._redis.put(table, context.created, entry)
        context.routers_behind = False

    def _urls(self, context: ReconcileContext, serving: Collection[str]) -> dict[str, str]:
        """Where the replicas may register: at their pods of rank 0."""
        found = {}
        for group in context.observed.groups:
            first = next((pod.address for pod in group.pods if pod.rank == 0), "")
            if first and names.replica_id(group.name) in serving:
                found[names.replica_id(group.name)] = names.pod_url(first, names.API_PORT)
        return found

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
        self._companions(cast(StatefulSetObject, made))

    def _companions(self, stateful_set: StatefulSetObject) -> None:
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
        leaving = plan.leaving()
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
                if not is_rendering(stateful_set, desired):
                    continue
                # Without it no pod of the group starts again.
                frozen = render_group.revision_config_map(context.service, revision, self._config)
                self._kube.apply_cached(frozen)
                if not covers(stateful_set, desired):
                    self._kube.apply(desired)

    def _keep_disruption_budget(self, context: ReconcileContext, plan: Plan) -> None:
        """Over the pods of live groups, and those of groups that come back."""
        leaving = plan.leaving()
        live = [g for g in context.observed.groups if not g.draining and g.name not in leaving]
        absent = plan.expected() - {g.index for g in live}
        pods = sum(g.nodes for g in live) + sum(
            context.revisions[record.revision].hardware.nodes
            for record in plan.records
            if record.index in absent and record.revision in context.revisions
        )
        with context.trying():
            self._kube.apply_cached(policies.pod_disruption_budget(context.service, pods))

    def _remove_revisions(self, context: ReconcileContext, plan: Plan) -> None:
        used = {record.revision for record in plan.records}
        used |= {context.target or context.before.revision, context.before.good_revision}
        mounted = {name for stateful_set in context.sets for name in _mounted(stateful_set)}
        newest = {c["metadata"]["labels"].get(names.REVISION): c for c in context.config_maps}
        for config_map in context.config_maps:
            meta = config_map["metadata"]
            revision = meta["labels"].get(names.REVISION)
            kept = revision in used and newest[revision] is config_map
            if not kept and meta["name"] not in mounted:
                with context.trying():
                    self._kube.delete("ConfigMap", meta["namespace"], meta["name"], meta["uid"])


def _mounted(stateful_set: StatefulSetObject) -> list[str]:
    """Names of the ConfigMaps that a group's pods read."""
    volumes = stateful_set["spec"]["template"]["spec"].get("volumes", [])
    return [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]

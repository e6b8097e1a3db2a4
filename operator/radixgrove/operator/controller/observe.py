"""Reads a service's groups, their nodes and their revisions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from radixgrove.operator.api import names
from radixgrove.operator.api.objects import (
    CONFIG_MAP,
    NODE,
    POD,
    STATEFUL_SET,
)
from radixgrove.operator.controller.context import ReconcileContext
from radixgrove.operator.controller.pod_events import not_admitted, with_mounts
from radixgrove.operator.controller.store import Store
from radixgrove.operator.kube.client import Kube, controllers
from radixgrove.operator.planning.demand import Node
from radixgrove.operator.planning.observed import (
    Group,
    ObservedState,
    group_of,
    highest_attempt,
    node_of,
)
from radixgrove.operator.render.revision import thaw

logger = logging.getLogger(__name__)

_REFUSED_AFTER = 2.0  # seconds without pods before asking why
_MOUNTED_AFTER = 10.0  # seconds without volumes before asking why


class Observer:
    """Thread-safe for different services."""

    def __init__(self, kube: Kube, store: Store) -> None:
        self._kube = kube
        self._store = store

    def observe(self, context: ReconcileContext) -> None:
        """Fills `sets`, `observed`, `config_maps` and `revisions`. Raises KubeError."""
        namespace = context.service.namespace
        labels = names.labels(context.service.name, names.WORKER)
        all_sets = self._kube.list(STATEFUL_SET, namespace, labels)
        pods = self._kube.list(POD, namespace, labels)
        context.sets = controllers(all_sets, context.service.uid)
        groups = []
        for stateful_set in context.sets:
            group = group_of(stateful_set, pods)
            if group is not None and len(group.pods) < group.nodes:
                group = group_of(stateful_set, pods, self._refusal(context, group))
            if group is not None:
                groups.append(self._with_mounts(context, group))
        context.observed = ObservedState(
            tuple(groups), self._nodes(groups), highest_attempt([*all_sets, *pods])
        )
        context.config_maps = sorted(
            controllers(self._kube.list(CONFIG_MAP, namespace, labels), context.service.uid),
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
        """Why a StatefulSet's pods are not admitted, as the API server puts it."""
        if group.deleting or context.now - group.created < _REFUSED_AFTER:
            return ""
        with context.trying():
            return not_admitted(self._kube, context.service.namespace, group.name, group.uid)
        return ""

    def _with_mounts(self, context: ReconcileContext, group: Group) -> Group:
        """With what keeps pods that have a node from their volumes, which only Events say."""
        late = context.now - group.created >= _MOUNTED_AFTER and not group.draining
        stuck = [pod for pod in group.pods if late and pod.creating]
        for pod in stuck[:1]:  # the others mount the same
            with context.trying():
                found = with_mounts(self._kube, context.service.namespace, pod)
                return replace(group, pods=tuple(found if p is pod else p for p in group.pods))
        return group

    def _nodes(self, groups: Sequence[Group]) -> dict[str, Node]:
        """The watch may lag behind a scheduler: a node it does not know is looked up."""
        known = self._store.nodes()
        for name in {pod.node for group in groups for pod in group.pods if pod.node} - set(known):
            for node in self._kube.list(NODE, None, fields=f"metadata.name={name}"):
                known[name] = node_of(node)
        return known

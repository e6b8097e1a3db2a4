"""A service's own router: kept while the resource asks for one, removed afterwards."""

from __future__ import annotations

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import DEPLOYMENT, POD
from radixgrove.operator.api.spec import NO_FIELDS, Router
from radixgrove.operator.controller.context import ReconcileContext
from radixgrove.operator.kube.client import Kube, controllers
from radixgrove.operator.planning.diagnosis import Problem, pod_problem
from radixgrove.operator.planning.observed import is_available, pod_of
from radixgrove.operator.render.router import InvalidRouter, router_name, router_objects


def keep(kube: Kube, context: ReconcileContext, config: OperatorConfig) -> None:
    """As the resource says; one that runs stays as it is while its settings are wrong."""
    try:
        # Without keys in its namespace a new pod would read none, or old ones for ever.
        children = (
            router_objects(
                context.service,
                context.spec.router,
                config,
                context.keys,
                context.spec.pods.routers or NO_FIELDS,
            )
            if context.keys
            else []
        )
    except InvalidRouter as error:
        context.invalid, children = error, []
    for child in children:
        with context.trying():
            kube.apply_cached(child)
    with context.trying():
        context.router = _trouble(kube, context)


def _trouble(kube: Kube, context: ReconcileContext) -> Problem | None:
    """Why it does not answer; None when it does, or that is not known."""
    service = context.service
    deployment = kube.get(DEPLOYMENT, service.namespace, router_name(service))
    if deployment is not None and is_available(deployment):
        return None
    if context.invalid is not None:
        return Problem(context.invalid.reason, str(context.invalid))
    if deployment is None:
        return None
    labels = names.labels(service.name, names.ROUTER)
    pods = map(pod_of, kube.list(POD, service.namespace, labels))
    found = next(filter(None, map(pod_problem, pods)), None)
    words = found.message if found else "it starts"
    return Problem("RouterNotReady", f"its own router does not answer: {words}")


def remove(kube: Kube, context: ReconcileContext, config: OperatorConfig) -> None:
    """One that is not wanted any more."""
    service = context.service
    with context.trying():
        deployment = kube.get(DEPLOYMENT, service.namespace, router_name(service))
        if deployment is None or not controllers([deployment], service.uid):
            return
        # The Deployment goes last: as long as it exists, this runs again.
        for child in reversed(router_objects(service, Router(), config, "")):
            meta = child["metadata"]
            live = kube.get(child["kind"], meta["namespace"], meta["name"])
            if live is not None and controllers([live], service.uid):
                uid = live["metadata"]["uid"]
                kube.delete(child["kind"], meta["namespace"], meta["name"], uid)

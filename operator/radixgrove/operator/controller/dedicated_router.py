"""A service's own router: kept while the resource asks for one, removed afterwards."""

from __future__ import annotations

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import (
    DEPLOYMENT,
    POD,
    SCALER,
    ChildObject,
    DeploymentObject,
    KindName,
    Object,
)
from radixgrove.operator.api.spec import NO_FIELDS, Router
from radixgrove.operator.controller.context import ReconcileContext
from radixgrove.operator.controller.pod_events import with_mounts
from radixgrove.operator.kube.client import Kube, controllers
from radixgrove.operator.planning.diagnosis import Problem, pod_problem, refusal
from radixgrove.operator.planning.observed import is_available, pod_of
from radixgrove.operator.planning.remedies import of_pod
from radixgrove.operator.render.common import Service
from radixgrove.operator.render.router import InvalidRouter, router_name, router_objects


def keep(kube: Kube, context: ReconcileContext, config: OperatorConfig) -> None:
    """As the resource says; one that runs stays as it is while its settings are wrong."""
    # Without keys in its namespace a new pod would read none, or old ones for ever.
    if context.keys:
        with context.trying():
            for child in _wanted(kube, context, config):
                with context.trying():
                    kube.apply_cached(child)
    if context.spec.router.autoscaling is None:
        with context.trying():
            _delete(kube, context.service, SCALER, router_name(context.service))
    with context.trying():
        context.router = _trouble(kube, context, config)


def _wanted(kube: Kube, context: ReconcileContext, config: OperatorConfig) -> list[Object]:
    service, router = context.service, context.spec.router
    running = None
    if router.autoscaling is not None:
        deployment = kube.get(DEPLOYMENT, service.namespace, router_name(service))
        running = deployment.get("spec", {}).get("replicas") if deployment is not None else None
    fields = context.spec.pods.routers or NO_FIELDS
    try:
        return router_objects(service, router, config, context.keys, fields, running)
    except InvalidRouter as error:
        context.invalid = error
        return []


def _trouble(kube: Kube, context: ReconcileContext, config: OperatorConfig) -> Problem | None:
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
    mounted = (with_mounts(kube, service.namespace, pod) for pod in pods)
    found = next(filter(None, map(pod_problem, mounted)), None) or _refused(deployment)
    words = "it starts"
    if found is not None:
        mend = of_pod(found, context.spec, config, "routers")
        words = f"{found.message} ({mend})" if mend else found.message
    return Problem("RouterNotReady", f"its own router does not answer: {words}")


def _refused(deployment: DeploymentObject) -> Problem | None:
    """Pods that the API server does not admit."""
    for found in deployment.get("status", {}).get("conditions", []):
        if found["type"] == "ReplicaFailure" and found["status"] == "True":
            return refusal(found.get("message", ""))
    return None


def remove(kube: Kube, context: ReconcileContext, config: OperatorConfig) -> None:
    """One that is not wanted any more."""
    service = context.service
    with context.trying():
        deployment = kube.get(DEPLOYMENT, service.namespace, router_name(service))
        if deployment is None or not controllers([deployment], service.uid):
            return
        _delete(kube, service, SCALER, router_name(service))
        # The Deployment goes last: as long as it exists, this runs again.
        for child in reversed(router_objects(service, Router(), config, "")):
            _delete(kube, service, KindName[ChildObject](child["kind"]), child["metadata"]["name"])


def _delete(kube: Kube, service: Service, kind: KindName[ChildObject], name: str) -> None:
    """An object of the service's, if there is one."""
    live = kube.get(kind, service.namespace, name)
    if live is not None and controllers([live], service.uid):
        kube.delete(kind, service.namespace, name, live["metadata"]["uid"])

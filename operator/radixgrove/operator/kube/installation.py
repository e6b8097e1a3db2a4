"""What belongs to the installation as a whole, and leaves with it."""

from __future__ import annotations

from typing import Any

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import DEPLOYMENT, Object
from radixgrove.operator.kube.client import Kube, KubeError


def owners(kube: Kube, config: OperatorConfig) -> list[dict[str, Any]]:
    """Owner references to the operator's own Deployment; none when it runs outside a chart.

    Raises KubeError when the Deployment is not there (any more).
    """
    name = config.owner_deployment
    if name is None:
        return []
    found = kube.get(DEPLOYMENT, config.namespace, name)
    if found is None:
        what = f"deployments/{config.namespace}/{name}"
        raise KubeError("get", what, 404, "the operator's own Deployment is not there")
    uid = found["metadata"]["uid"]
    return [{"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": uid}]


def metadata(kube: Kube, config: OperatorConfig, name: str, component: str) -> Object:
    """Of an object in the operator's own namespace. Raises KubeError, as `owners`."""
    found: Object = {
        "name": name,
        "namespace": config.namespace,
        "labels": {names.MANAGED_BY: names.MANAGER, names.COMPONENT: component},
    }
    if references := owners(kube, config):
        found["ownerReferences"] = references
    return found

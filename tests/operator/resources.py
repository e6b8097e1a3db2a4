"""Services on a control plane: what their kubectl output, children and model table show."""

from __future__ import annotations

from typing import Any

from radixgrove.operator.api import names
from radixgrove.protocol.model_table import ModelEntry, ModelTable, table_key
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kubectl import condition
from tests.conftest import RedisServer

RGSVC = f"{names.PLURAL}.{names.GROUP}"


def service(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    """With a worker of which nothing is known: pods on pretended nodes register with no router."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"source": "pvc://models/demo"}, "image": "example.com/other:1"} | spec,
    }


def ready(resource: dict[str, Any]) -> bool:
    """Of its present spec, with the very groups that the status lists: it is written in steps."""
    status = resource.get("status", {})
    phases = [group["phase"] for group in status.get("groups", [])]
    return (
        condition(resource, "Ready") == "True"
        and status["observedGeneration"] == resource["metadata"]["generation"]
        and status["readyReplicas"] == phases.count("Ready") == resource["spec"]["replicas"]
    )


def wait_ready(plane: ControlPlane, name: str, namespace: str) -> dict[str, Any]:
    """The service, once it is `ready`."""
    return plane.kubectl.wait_for(RGSVC, name, "-n", namespace, that=ready, what="is ready")


def reason(resource: dict[str, Any], kind: str = "Ready") -> str:
    conditions = resource.get("status", {}).get("conditions", [])
    return next((c["reason"] for c in conditions if c["type"] == kind), "")


def sets(plane: ControlPlane, namespace: str) -> list[str]:
    found = plane.kubectl.items("statefulsets", "-n", namespace)
    return sorted(item["metadata"]["name"] for item in found)


def routable(server: RedisServer, service: str) -> list[str]:
    """The attempts of a service that routers may use; a table may follow the status."""
    entry = table(server).get(service)
    return sorted(entry.attempts) if entry else []


def table(server: RedisServer) -> dict[str, ModelEntry]:
    data = server.client.get(table_key("radixgrove", "shared"))
    if data is None:
        return {}
    return {entry.service: entry for entry in ModelTable.decode(data).entries}  # type: ignore[arg-type]

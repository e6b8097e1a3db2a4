"""What many services cost: time to serve them, memory, requests at rest and as they are deleted."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import psutil

from radixgrove.operator.api import names
from tests.cluster.harness.audit import Request
from tests.cluster.harness.control_plane import ControlPlane
from tests.cluster.harness.kubectl import condition
from tests.cluster.harness.waiting import wait_until
from tests.operator.operator_process import ACCOUNT, NAMESPACE, OperatorProcess

USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
_RESOURCE = f"{names.PLURAL}.{names.GROUP}"
_LEASES = "coordination.k8s.io/leases"


@dataclass(frozen=True)
class Scale:
    """Of `services` services, the operator starting when they and the nodes are there."""

    services: int
    ready_seconds: float  # from the operator's start until all are Ready
    cpu_seconds: float  # of the operator until then
    memory_bytes: int  # resident, of the operator, at the end
    writes: int  # until all were Ready, without its lease
    rest_seconds: float
    rest_writes: int  # without its lease
    rest_reads: int  # watches that the server ended and were begun again included
    rest_reads_of_services: int  # of those: of a service, or of what belongs to one
    rest_reads_of_one: int  # of the object that was read most often by its name
    delete_requests: int  # from the deletion of all services at once until it rests

    @property
    def reads_a_service_and_minute(self) -> float:
        return self.rest_reads / self.services / (self.rest_seconds / 60)


def measure(
    plane: ControlPlane, operator: OperatorProcess, namespace: str, services: int, rest: float
) -> Scale:
    """Creates services of two 8-GPU nodes each, starts the operator, watches it at rest.

    Args:
        operator: not started yet.
        rest: seconds to count requests for once it has nothing more to do.
    """
    plane.kubectl.apply(*(_service(f"s{index}", namespace) for index in range(services)))
    plane.audit.read()
    begin = time.monotonic()
    operator.start()
    assert operator.process is not None
    process = psutil.Process(operator.process.pid)
    wait_until(
        lambda: _count_ready(plane, namespace) == services,
        f"{services} services are Ready",
        timeout=600,
        interval=2.0,
    )
    ready = time.monotonic() - begin
    times = process.cpu_times()
    writes = len([r for r in plane.audit.read(USER) if r.writes and r.resource != _LEASES])
    _wait_for_rest(plane)
    memory = process.memory_info().rss
    began = time.monotonic()
    counted = _requests_at_rest(plane, rest)
    rested = time.monotonic() - began
    reads = [request for request in counted if not request.writes]
    by_name = Counter((r.resource, r.namespace, r.name) for r in reads if r.name)
    plane.kubectl.delete(_RESOURCE, "--all", "-n", namespace, wait=False)
    return Scale(
        services=services,
        ready_seconds=ready,
        cpu_seconds=times.user + times.system,
        memory_bytes=memory,
        writes=writes,
        rest_seconds=rested,
        rest_writes=len(counted) - len(reads),
        rest_reads=len(reads),
        rest_reads_of_services=sum(1 for request in reads if request.namespace == namespace),
        rest_reads_of_one=max(by_name.values(), default=0),
        delete_requests=_wait_for_rest(plane),
    )


def _service(name: str, namespace: str) -> dict[str, object]:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"source": "pvc://models/demo", "name": f"model-{name}"},
            "hardware": {"nodes": 2, "gpusPerNode": 8},
            "image": "example.com/of-groups:1",
        },
    }


def _count_ready(plane: ControlPlane, namespace: str) -> int:
    found = plane.kubectl.items(_RESOURCE, "-n", namespace)
    return sum(condition(resource, "Ready") == "True" for resource in found)


def _wait_for_rest(plane: ControlPlane) -> int:
    """Until ten seconds have passed in which it asked for nothing but its lease and one list.

    Returns the requests until then.
    """
    requests = 0
    last = time.monotonic()

    def rested() -> bool:
        nonlocal requests, last
        new = [r for r in plane.audit.read(USER) if r.resource != _LEASES and r.verb != "watch"]
        requests += len(new)
        if len(new) > 1:
            last = time.monotonic()
        return time.monotonic() - last > 10.0

    wait_until(rested, "the operator is at rest", timeout=300, interval=1.0)
    return requests


def _requests_at_rest(plane: ControlPlane, seconds: float) -> list[Request]:
    """Those of about that many seconds, without its lease."""
    plane.audit.read()
    time.sleep(seconds)  # the measurement itself, not a wait for anything
    return [r for r in plane.audit.read(USER) if r.resource != _LEASES]


def summary(scale: Scale) -> dict[str, tuple[float, str]]:
    """Figures by metric, with their units."""
    return {
        "ready": (round(scale.ready_seconds, 1), "s"),
        "cpu": (round(scale.cpu_seconds, 1), "s"),
        "memory": (round(scale.memory_bytes / 2**20, 1), "MiB"),
        "writes": (scale.writes / scale.services, "writes/service"),
        "delete_requests": (scale.delete_requests / scale.services, "requests/service"),
        "rest_writes": (scale.rest_writes, "writes"),
        "rest_reads": (round(scale.reads_a_service_and_minute, 3), "reads/service/min"),
    }

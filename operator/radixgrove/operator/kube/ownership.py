"""Which installation looks after a service that several can see.

The first one writes its name into the service's status, and the others leave the service alone as
long as that one's leader renews its Lease.
"""

from __future__ import annotations

from typing import cast

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import LEASE, LeaseSpec, ServiceObject
from radixgrove.operator.kube.client import Kube
from radixgrove.operator.kube.renewals import Renewals


class Ownership:
    """Thread-safe."""

    def __init__(self, kube: Kube, config: OperatorConfig) -> None:
        self._kube = kube
        self._own = config.installation
        self._renewals = Renewals(config.election.duration)  # of other installations

    def holder(self, service: ServiceObject) -> str:
        """The other installation that looks after it; "" when this one may."""
        name = str((service.get("status") or {}).get("operator") or "")
        return name if name not in ("", self._own) and self._lives(name) else ""

    def claim(self, service: ServiceObject, *, known: bool = False) -> ServiceObject:
        """The service once it is ours. Raises KubeError, status 409: another one was faster.

        `known`: it was ours. Should its status have been wiped, the next one says so again.
        """
        named = (service.get("status") or {}).get("operator")
        if named == self._own or (known and not named):
            return service
        meta = service["metadata"]
        body = {
            "metadata": {"resourceVersion": meta["resourceVersion"]},
            "status": {"operator": self._own},
        }
        claimed = self._kube.patch(names.KIND, meta["namespace"], meta["name"], body, sub="status")
        return cast(ServiceObject, claimed)

    def _lives(self, installation: str) -> bool:
        namespace, _, lease_name = installation.partition("/")
        lease = self._kube.get(LEASE, namespace, lease_name) if lease_name else None
        spec = (lease.get("spec") if lease is not None else None) or LeaseSpec()
        return bool(spec) and not self._renewals.are_overdue(installation, spec)

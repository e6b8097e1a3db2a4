"""An InferenceService on a cluster, as a test applies, changes and watches it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.waiting import wait_until

KIND = "inferenceservice"
SERVICE_LABEL = "serving.radixgrove.io/service"


@dataclass(frozen=True)
class Served:
    """One service by its name; nothing is kept here, all of it is asked of the API server."""

    kubectl: Kubectl
    namespace: str
    name: str

    def apply(self, spec: Mapping[str, Any]) -> None:
        """Server-side apply of the whole spec."""
        manifest = {
            "apiVersion": "serving.radixgrove.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": self.name},
            "spec": spec,
        }
        self.kubectl.apply(manifest, namespace=self.namespace)

    def patch(self, spec: Mapping[str, Any]) -> None:
        """Merges a change into the spec."""
        self.kubectl.patch(KIND, self.name, "-n", self.namespace, body={"spec": spec})

    def scale(self, replicas: int) -> None:
        """Through the scale subresource, as `kubectl scale` and an HPA do it."""
        self.kubectl.run(
            "scale", KIND, self.name, "-n", self.namespace, f"--replicas={replicas}"
        )  # fmt: skip

    def delete(self) -> None:
        """Deletes it and waits until its pods are gone too."""
        self.kubectl.delete(KIND, self.name, "-n", self.namespace)
        wait_until(lambda: not self.pods(), f"the pods of {self.name} are gone")

    def read(self) -> dict[str, Any]:
        """The resource as it is."""
        found: dict[str, Any] = self.kubectl.json("get", KIND, self.name, "-n", self.namespace)
        return found

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.read().get("status", {})
        return status

    def pods(self) -> dict[str, str]:
        """UIDs of its worker pods by name, leaving ones included."""
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in self._worker_pods()}

    def staying_pods(self) -> list[dict[str, Any]]:
        """Its worker pods that are not leaving."""
        return [pod for pod in self._worker_pods() if "deletionTimestamp" not in pod["metadata"]]

    def is_present(self, status: Mapping[str, Any]) -> bool:
        """Whether a status speaks of the very pods that stay: it may be of an attempt before."""
        named = {pod["uid"] for group in status.get("groups", []) for pod in group.get("pods", [])}
        return named == {pod["metadata"]["uid"] for pod in self.staying_pods()}

    def wait(
        self, that: Callable[[dict[str, Any]], object], what: str, *, timeout: float = 300
    ) -> dict[str, Any]:
        """Waits until the status satisfies `that`, for the present spec; returns the status."""
        deadline = time.monotonic() + timeout
        while True:
            found = self.read()
            status: dict[str, Any] = found.get("status", {})
            current = status.get("observedGeneration") == found["metadata"]["generation"]
            if current and that(status):
                return status
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{self.name}: not within {timeout:g} s: {what}; its status: {status}"
                )
            time.sleep(0.3)

    def wait_until_ready(self, replicas: int, *, timeout: float = 480) -> dict[str, Any]:
        """Waits until exactly `replicas` groups exist, all ready and of the newest revision."""
        return self.wait(
            lambda status: (
                status.get("replicas") == status.get("readyReplicas") == replicas
                and status.get("updatedReplicas") == replicas
                and len(status.get("groups", [])) == replicas
                and self.is_present(status)
            ),
            f"{replicas} groups are ready and up to date",
            timeout=timeout,
        )

    def _worker_pods(self) -> list[dict[str, Any]]:
        selector = f"--selector={SERVICE_LABEL}={self.name},app.kubernetes.io/component=worker"
        return self.kubectl.items("pods", "-n", self.namespace, selector)


def reason(status: Mapping[str, Any], condition: str) -> str:
    """`False/RolloutBlocked`: a condition's status and reason; empty when it is not there."""
    for found in status.get("conditions", []):
        if found["type"] == condition:
            return f"{found['status']}/{found['reason']}"
    return ""


def message(status: Mapping[str, Any], condition: str) -> str:
    """The words of a condition; empty when it is not there."""
    conditions = status.get("conditions", [])
    return next((str(c["message"]) for c in conditions if c["type"] == condition), "")

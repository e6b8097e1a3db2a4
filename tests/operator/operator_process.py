"""The operator as a process against a control plane, with the rights of its service account."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from radixgrove.operator.api import crd, names
from radixgrove.operator.kube import admission, rbac
from tests.cluster.harness.control_plane import ControlPlane
from tests.ports import find_free_port

NAMESPACE = "radixgrove"
ACCOUNT = "radixgrove-operator"
REPLACEMENTS = {
    rbac.KEYS_SECRET: "radixgrove-keys",
    rbac.NAMES_CONFIG_MAP: "radixgrove-names",
    rbac.REDIS_POLICY: "radixgrove-redis-namespaces",
    rbac.LEASE: "radixgrove-operator",
    rbac.OWNER: "radixgrove-operator",
}

_REDIS = {"labels": {"app.kubernetes.io/component": "redis"}}
HOST_PATHS = "['/models']"


def roles(
    namespaces: list[str],
    home: str = NAMESPACE,
    permissions: Sequence[rbac.Permission] = rbac.PERMISSIONS,
) -> list[dict[str, Any]]:
    """Roles and bindings as the chart makes them; no namespaces: cluster mode.

    `home` is the operator's own namespace.
    """
    subject = [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": home}]

    def role(name: str, scope: rbac.Scope, namespace: str | None) -> list[dict[str, Any]]:
        kind = "Role" if namespace else "ClusterRole"
        meta = {"name": name} | ({"namespace": namespace} if namespace else {})
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name}
        version = "rbac.authorization.k8s.io/v1"
        return [
            {"apiVersion": version, "kind": kind, "metadata": meta,
             "rules": rbac.rules(scope, REPLACEMENTS, permissions)},
            {"apiVersion": version, "kind": f"{kind}Binding", "metadata": meta,
             "roleRef": reference, "subjects": subject},
        ]  # fmt: skip

    objects = role("rg-own", rbac.Scope.OWN, home)
    objects += role(f"rg-nodes-{home}", rbac.Scope.CLUSTER, None)
    for namespace in namespaces:
        objects += role("rg-served", rbac.Scope.SERVED, namespace)
    if not namespaces:
        objects += role(f"rg-served-{home}", rbac.Scope.SERVED, None)
    return objects


def account(home: str = NAMESPACE) -> list[dict[str, Any]]:
    """The operator's own namespace and service account."""
    meta = {"name": ACCOUNT, "namespace": home}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": home}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
    ]


def install(plane: ControlPlane, namespaces: list[str], home: str = NAMESPACE) -> None:
    """What the chart would install before the operator starts."""
    plane.kubectl.apply(crd.custom_resource_definition())
    plane.kubectl.wait_established(f"{names.PLURAL}.{names.GROUP}")
    plane.kubectl.apply(*account(home), *roles(namespaces, home), *policies(home))


def policies(home: str = NAMESPACE) -> list[dict[str, Any]]:
    """The admission policies, as the chart makes them."""
    user = f"system:serviceaccount:{home}:{ACCOUNT}"
    return admission.policies(
        f"{ACCOUNT}-{home}", user, REPLACEMENTS[rbac.KEYS_SECRET], "['reader']", HOST_PATHS
    )


def namespace_with_models(name: str, labels: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """A namespace with a claim `models`, bound to a volume of the namespace's name."""
    size = {"storage": "1Gi"}
    volume = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    bound = {
        "capacity": size,
        "hostPath": {"path": "/nonexistent"},
        "claimRef": {"name": "models", "namespace": name},
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": labels or {}},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": volume | bound,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", "namespace": name},
            "spec": volume | {"resources": {"requests": size}, "volumeName": name},
        },
    ]


@dataclass
class OperatorProcess:
    """`start`, `ensure`, `kill`, `stop`; its log lies in `log`.

    One pod: each of its processes comes after the end of the one before.
    """

    plane: ControlPlane
    directory: Path
    redis_port: int
    namespaces: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    home: str = NAMESPACE
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.health_port = find_free_port()
        self.log = self.directory / f"operator-{self.health_port}.log"

    def start(self) -> None:
        config: dict[str, Any] = {
            "namespace": self.home,
            "namespaces": self.namespaces,
            "images": {"worker": "rg/worker:1", "router": "rg/router:1", "operator": "rg/op:1"},
            "redis": {"url": f"redis://127.0.0.1:{self.redis_port}/0"} | _REDIS,
            "router": {
                "url": "http://router/v1",
                "labels": {"app.kubernetes.io/component": "router"},
            },
            "election": {"duration": 10.0, "renew_every": 1.0},
            "drain_notice": 1.0,
            "gang_timeout": 10.0,
            "name_hold": 0.0,  # tests of other namespaces come with names of their own choice
            "autoscale_every": 0.5,
            "health_port": self.health_port,
        }
        path = self.directory / f"operator-{self.health_port}.yaml"
        path.write_text(yaml.safe_dump(config | self.settings))
        kubeconfig = self.plane.service_account_kubeconfig(self.home, ACCOUNT)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "radixgrove.operator", "--config", str(path)],
                env={
                    **os.environ,
                    "KUBECONFIG": str(kubeconfig),
                    "OMP_NUM_THREADS": "1",
                    "POD_NAME": f"operator-{self.health_port}",
                },
                stdout=log,
                stderr=log,
            )

    def ensure(self) -> None:
        """Starts it unless it runs."""
        if self.process is None or self.process.poll() is not None:
            self.start()

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None

    def stop(self) -> None:
        """As the kubelet would: SIGTERM, and its exit code."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            code = self.process.wait(120)
            self.process = None
            assert code == 0, self.log.read_text()[-3000:]

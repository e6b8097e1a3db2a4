"""Volumes made by hand: directories of this machine that pods may claim.

The cluster has no provisioner, and pods under `restricted` may not name host paths themselves. All
nodes see the same file system, so such a volume can be read and written from every node at once.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.harness.kubectl import Kubectl

_CHECKOUT = Path(__file__).resolve().parents[3]
# Where the image of `images/environment` keeps its interpreter.
_ENVIRONMENT_PYTHON = (3, 11)


def claim_directory(
    kubectl: Kubectl, namespace: str, claim: str, path: Path, *, read_only: bool = True
) -> None:
    """Makes a claim in a namespace that is bound to a directory of this machine.

    `path` must not lie below /run or /var, where every node has its own files.
    """
    modes = ["ReadOnlyMany"] if read_only else ["ReadWriteMany", "ReadWriteOnce"]
    volume = _volume(f"{namespace}-{claim}", path, modes)
    volume["spec"]["claimRef"] = {"namespace": namespace, "name": claim}
    kubectl.apply(
        volume,
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {
                "accessModes": modes[:1],
                "storageClassName": "",
                "volumeName": f"{namespace}-{claim}",
                "resources": {"requests": {"storage": "1Gi"}},
            },
        },
    )
    kubectl.wait_for(
        "pvc", claim, "-n", namespace,
        that=lambda found: found["status"].get("phase") == "Bound", what="is bound",
    )  # fmt: skip


def offer_volumes(kubectl: Kubectl, directory: Path, count: int, *, capacity: str = "20Gi") -> None:
    """Makes empty volumes that any claim without a storage class may bind, each once."""
    for index in range(count):
        path = directory / f"volume-{index}"
        path.mkdir(parents=True)
        path.chmod(0o777)  # pods run under any user, and fsGroup does not reach a host path
        name = f"{directory.parent.name}-{path.name}"
        kubectl.apply(_volume(name, path, ["ReadWriteMany", "ReadWriteOnce"], capacity))


@dataclass(frozen=True)
class Mounts:
    """What to add to a pod: its volumes, and the mounts of each container."""

    volumes: list[Mapping[str, Any]]
    volume_mounts: list[Mapping[str, Any]]


def claim_environment(kubectl: Kubectl, namespace: str) -> Mounts:
    """Lets a namespace's pods use this Python environment and checkout, at their own paths.

    For containers of the environment image, which finds installed packages there. The environment
    must be of the image's Python version: compiled packages fit no other.
    """
    if sys.version_info[:2] != _ENVIRONMENT_PYTHON:
        needed = ".".join(map(str, _ENVIRONMENT_PYTHON))
        raise RuntimeError(f"only an environment of Python {needed} can be mounted into pods")
    mounts = Mounts([], [])
    for claim, path in _environment_directories().items():
        claim_directory(kubectl, namespace, claim, path)
        source = {"claimName": claim, "readOnly": True}
        mounts.volumes.append({"name": claim, "persistentVolumeClaim": source})
        mounts.volume_mounts.append({"name": claim, "mountPath": str(path), "readOnly": True})
    return mounts


def environment_site_packages() -> Path:
    """Where the running interpreter's packages are installed."""
    return Path(sysconfig.get_path("purelib"))


def _environment_directories() -> dict[str, Path]:
    directories = {"checkout": _CHECKOUT}
    prefix = Path(sys.prefix)
    if not prefix.is_relative_to(_CHECKOUT):
        directories["environment"] = prefix
    return directories


def _volume(name: str, path: Path, modes: list[str], capacity: str = "1Gi") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": capacity},
            "accessModes": modes,
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }

"""Volumes made by hand: directories of this machine that pods may claim.

The cluster has no provisioner, and pods under `restricted` may not name host paths themselves. All
nodes see the same file system, so such a volume can be read and written from every node at once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkout import ROOT
from tests.cluster.harness.kubectl import Kubectl

IMAGE_PYTHON = (3, 11)  # of the base image


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
    """Makes more empty volumes that any claim without a storage class may bind, each once."""
    offered = len(list(directory.glob("volume-*")))
    for index in range(offered, offered + count):
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

    For containers of `images.environment`.
    """
    mounts = Mounts([], [])
    for claim, path in environment_directories().items():
        claim_directory(kubectl, namespace, claim, path)
        source = {"claimName": claim, "readOnly": True}
        mounts.volumes.append({"name": claim, "persistentVolumeClaim": source})
        mounts.volume_mounts.append({"name": claim, "mountPath": str(path), "readOnly": True})
    return mounts


def environment_directories() -> dict[str, Path]:
    """What this interpreter runs from, by claim name; none lies within another.

    An interpreter of the system itself cannot be mounted: the image's must then be its equal.
    """
    directories = {
        "checkout": ROOT,
        "environment": Path(sys.prefix),
        "interpreter": Path(sys.base_prefix),
    }
    outer = {
        claim: path
        for claim, path in directories.items()
        if path != Path("/usr")
        and not any(path != other and path.is_relative_to(other) for other in directories.values())
    }
    if "interpreter" not in outer and sys.version_info[:2] != IMAGE_PYTHON:
        needed = ".".join(map(str, IMAGE_PYTHON))
        raise RuntimeError(f"pods can use the system's Python only if it is {needed}")
    return outer


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

"""The project on a cluster: images from its own Dockerfiles, and its chart by the Helm CLI."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.checkout import ROOT
from tests.cluster.harness import build, images, pods
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.images import Recipe
from tests.cluster.harness.volumes import Mounts

CHART = ROOT / "helm" / "radixgrove"
NAMESPACE = "radixgrove"
REGISTRY = "localhost"
TAG = "test"


class HelmError(RuntimeError):
    """Helm ended with an error; the message is what it said."""


def image(part: str) -> str:
    """The name of a part's image on the cluster: operator, router, worker or redis."""
    return f"{REGISTRY}/radixgrove/{part}:{TAG}"


def recipes() -> list[Recipe]:
    """Operator and router from the project's Dockerfiles, Redis from the distribution.

    The worker's image is the mounted environment (`worker_overrides`): its own is five gigabytes
    because of CUDA.
    """
    redis = images.FOLDER / "redis"
    return [
        Recipe(image("operator"), ROOT / "operator" / "Dockerfile", ROOT),
        Recipe(image("router"), ROOT / "router" / "Dockerfile", ROOT),
        Recipe(image("redis"), redis / "Dockerfile", redis),
        images.environment(image("worker")),
    ]


def build_images(cluster: Cluster) -> None:
    """All of `recipes`, on every node."""
    cluster.build_images(*recipes())


def values() -> dict[str, Any]:
    """Chart values that name the images built here."""
    return {
        "image": {
            "registry": REGISTRY,
            "tag": TAG,
            "pullPolicy": "Never",
            "redis": {"repository": "radixgrove/redis", "tag": TAG},
        },
        # A namespace's names are the next test's at once.
        "operator": {"nameHold": 0, "hostPaths": ["/models"]},
        # Two nodes share the cores of one machine, and so may a worker that a request wakes.
        "router": {
            "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
            "settings": {"queue_timeout": 60},
        },
    }


def install(
    cluster: Cluster,
    more_values: Mapping[str, Any] | None = None,
    *,
    name: str = "radixgrove",
    namespace: str = NAMESPACE,
    chart: Path = CHART,
    timeout: int = 480,
) -> None:
    """`helm upgrade --install` into a `restricted` namespace; waits until all of it is ready.

    `more_values` are merged over `values` by Helm. Raises `HelmError`.
    """
    pods.make_namespace(cluster.kubectl, namespace)
    files = []
    for index, content in enumerate((values(), more_values or {})):
        file = cluster.control_plane.path / f"{namespace}-{name}-values-{index}.json"
        file.write_text(json.dumps(content))
        files.append(f"--values={file}")
    try:
        helm(
            cluster, "upgrade", "--install", name, str(chart), f"--namespace={namespace}", *files,
            "--wait", f"--timeout={timeout}s",
        )  # fmt: skip
    except HelmError as error:
        found = cluster.kubectl.run("get", "pods", "-n", namespace)
        raise HelmError(f"{error}\n{found}") from error


def uninstall(cluster: Cluster, name: str = "radixgrove", namespace: str = NAMESPACE) -> None:
    """`helm uninstall`; waits until what it deletes is gone. No release is no error."""
    helm(
        cluster, "uninstall", name, f"--namespace={namespace}", "--ignore-not-found",
        "--cascade=foreground", "--wait", "--timeout=300s",
    )  # fmt: skip


def is_installed(cluster: Cluster, name: str = "radixgrove", namespace: str = NAMESPACE) -> bool:
    """Whether the release is there, and its last installation or upgrade went well."""
    listed = json.loads(helm(cluster, "list", "-n", namespace, "--deployed", "--output=json"))
    return any(found["name"] == name for found in listed)


def helm(cluster: Cluster, *arguments: str) -> str:
    """Runs the Helm CLI as the cluster's administrator. Raises `HelmError`."""
    home = cluster.control_plane.path / "helm"
    kinds = ("CACHE", "CONFIG", "DATA")
    environment = {**os.environ, **{f"HELM_{k}_HOME": str(home / k.lower()) for k in kinds}}
    program = build.ensure((build.HELM,)) / build.HELM.name
    outcome = subprocess.run(
        [str(program), f"--kubeconfig={cluster.kubeconfig}", *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    if outcome.returncode != 0:
        raise HelmError(f"helm {' '.join(arguments)}: {outcome.stderr.strip()}")
    return outcome.stdout


def worker_overrides(mounts: Mounts) -> dict[str, Any]:
    """`podOverrides` that let the workers of a namespace run this checkout's code."""
    container = {"name": "worker", "volumeMounts": mounts.volume_mounts}
    return {"spec": {"containers": [container], "volumes": mounts.volumes}}

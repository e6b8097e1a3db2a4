"""The Job that runs a new worker's image, without GPUs, on the nodes where it is to take over."""

from __future__ import annotations

from collections.abc import Sequence

from radixgrove.operator.api import names
from radixgrove.operator.api.objects import Object
from radixgrove.operator.render.common import Service, metadata
from radixgrove.operator.render.group import MODEL_VOLUME, REQUIRED, WORKER_CONTAINER

_LEFT_OUT = ("config", MODEL_VOLUME)  # volumes that `--version` needs none of
_OF_THE_IMAGE = ("image", "imagePullPolicy", "env", "securityContext")
_OF_THE_POD = (
    "serviceAccountName", "automountServiceAccountToken", "enableServiceLinks", "securityContext",
    "imagePullSecrets",
)  # fmt: skip
_DEADLINE = 1800  # seconds; then it is begun anew
_KEPT = 300  # seconds that an ended one stays


def image_check_name(service: Service, image: str, nodes: Sequence[str]) -> str:
    return f"{service.name}-image-{names.digest([image, list(nodes)])}"


def image_check_job(service: Service, pod: Object, nodes: Sequence[str]) -> Object:
    """`pod`: the spec of the worker's pods as they would be. One pod on each of `nodes`."""
    (worker,) = (c for c in pod["containers"] if c["name"] == WORKER_CONTAINER)
    labels = names.labels(service.name, names.IMAGE_CHECK)
    container = {key: worker[key] for key in _OF_THE_IMAGE if key in worker} | {
        "name": WORKER_CONTAINER,
        "args": ["radixgrove", "--version"],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [m for m in worker.get("volumeMounts", []) if m["name"] not in _LEFT_OUT],
    }
    terms = [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        for node in nodes
    ]
    name = image_check_name(service, worker["image"], nodes)
    # Of this Job alone: a pod that waits for another image must not keep its pods from the nodes.
    selector = {"matchLabels": {"job-name": name}}
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": selector}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(service, name, names.IMAGE_CHECK),
        "spec": {
            "parallelism": len(nodes),
            "completions": len(nodes),
            "backoffLimit": 1,
            "activeDeadlineSeconds": _DEADLINE,
            "ttlSecondsAfterFinished": _KEPT,
            "template": {
                "metadata": {"labels": labels},
                "spec": {key: pod[key] for key in _OF_THE_POD if key in pod}
                | {
                    "restartPolicy": "Never",
                    "tolerations": [{"operator": "Exists"}],  # those nodes run the service now
                    "affinity": {
                        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}},
                        "podAntiAffinity": {REQUIRED: [apart]},
                    },
                    "containers": [container],
                    "volumes": [v for v in pod.get("volumes", []) if v["name"] not in _LEFT_OUT],
                },
            },
        },
    }

"""Names, labels and annotations of everything the operator makes.

A group attempt's name is the fencing token: it is never used twice while its pods can exist, and
the router serves only the attempts that the operator lists.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

GROUP = "serving.radixgrove.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"
SHORT_NAME = "rgsvc"
FIELD_MANAGER = "radixgrove-operator"

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "radixgrove"
COMPONENT = "app.kubernetes.io/component"
SERVICE = f"{GROUP}/service"  # name of the InferenceService
GROUP_INDEX = f"{GROUP}/group"  # number of the worker group
ATTEMPT = f"{GROUP}/attempt"  # number of the group's attempt
REVISION = f"{GROUP}/revision"  # hash of the spec that the group runs
MODEL_CACHE_NAME = "model-cache"
POD_INDEX = "apps.kubernetes.io/pod-index"

RESTART = f"{GROUP}/restart"  # on the resource: a new value rolls every group
DRAINING = f"{GROUP}/draining-since"  # on a StatefulSet: RFC 3339, no new requests since then
DRAIN_REASON = f"{GROUP}/draining-because"
RENDERED = f"{GROUP}/rendered"  # on what is applied: hash of the rendered object
KEYS = f"{GROUP}/keys"  # on a router's pods: hash of the installation's keys
SOURCE = f"{GROUP}/source"
RESOLVED = f"{GROUP}/resolved-revision"
INTENDED = f"{GROUP}/intended"  # on a download Job: hash of what the model must be fit for
GPU_PRODUCT = "nvidia.com/gpu.product"  # on a node: the type of its GPUs
GPU_MEMORY = "nvidia.com/gpu.memory"  # on a node: MiB of one of its GPUs

WORKER = "worker"
ROUTER = "router"
DOWNLOAD = "model-download"
RESOLVE = "model-resolve"
IMAGE_CHECK = "image-check"

API_PORT = 8100
MANAGEMENT_PORT = 8101
RENDEZVOUS_PORT = 29500
ROUTER_PORT = 8000
ROUTER_MANAGEMENT_PORT = 8001


def digest(value: Any, length: int = 10) -> str:
    """Hash of a JSON value in its canonical form, for names of immutable objects."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def group_name(service: str, index: int, attempt: int) -> str:
    """Name of the StatefulSet and headless Service of one attempt of one group."""
    return f"{service}-{index}-a{attempt}"


def revision_name(service: str, revision: str, content: str) -> str:
    """Name of a revision's ConfigMap; `content` tells what one operator and the next make of it."""
    return f"{service}-{revision}-{content}"


def cache_name(source: str, revision: str) -> str:
    """Name of the claim that holds one revision of one model, shared by all its users."""
    return f"model-{digest([source, revision], 16)}"


def replica_id(group: str) -> str:
    """The name under which an attempt registers with routers: its pod of rank 0."""
    return f"{group}-0"


def pod_url(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{port}"


def service_key(namespace: str, name: str) -> str:
    """The service's name in Redis and in the routers' tables; at most 63 characters."""
    key = f"{namespace}.{name}"
    return key if len(key) <= 63 else f"{key[:52]}.{digest(key)}"


def collide(one: str, other: str) -> bool:
    """Whether objects of two services of one namespace would have the same name: the router's of
    one, or a group's, and those that bear the other service's own name."""
    short, long = sorted((one, other), key=len)
    rest = long.removeprefix(short)
    return rest != long and bool(re.fullmatch(r"-router|-\d+-a\d+", rest))


def labels(service: str, component: str) -> dict[str, str]:
    return {MANAGED_BY: MANAGER, COMPONENT: component, SERVICE: service}


def selector(items: dict[str, str]) -> str:
    """Label selector in the query syntax of the API server."""
    return ",".join(f"{key}={value}" for key, value in sorted(items.items()))

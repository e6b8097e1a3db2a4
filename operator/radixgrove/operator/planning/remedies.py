"""What would mend a group, in the fields of its service and the values of the chart. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any, Literal

from radixgrove.operator.api import names
from radixgrove.operator.api.spec import ENGINE_FIELDS, InferenceServiceSpec, Network, Parallelism
from radixgrove.operator.planning.demand import Node, NodeDemand
from radixgrove.operator.planning.diagnosis import Problem
from radixgrove.operator.planning.observed import Group
from radixgrove.operator.render.group import MODEL_VOLUME
from radixgrove.operator.render.revision import CHAT_TEMPLATE_DIRECTORY

_SHAPE = {name: f"parallelism.{name}" for name in Parallelism.model_fields}


def explained(
    trouble: Problem, group: Group, spec: InferenceServiceSpec, nodes: Collection[Node]
) -> str:
    """The problem's message and what to change; `spec` is the one that the group was made from."""
    mend = _remedy(trouble, group, spec, nodes)
    return f"{trouble.message} ({mend})" if mend else trouble.message


def _remedy(
    trouble: Problem, group: Group, spec: InferenceServiceSpec, nodes: Collection[Node]
) -> str:
    match trouble.reason:
        case "InsufficientGPUs" | "Unschedulable" if "PersistentVolumeClaim" not in trouble.message:
            return _wishes(group.demand, spec, nodes)
        case "OutOfMemory":
            return f"raise hardware.memory: {spec.hardware.memory or 'not set'}"
        case "EngineFailed" if "is not installed" in trouble.message:
            return f"the image is named by {_image_field(spec)}: a worker's is needed"
        case "EngineFailed":
            return ", ".join(
                f"{name} is {field} of the service"
                for name, field in (ENGINE_FIELDS | _SHAPE).items()
                if re.search(rf"\b{name}\b", trouble.message)
            )
        case "ModelUnusable" if is_about_template(trouble) and spec.model.chat_template:
            return f"model.chatTemplate.configMap: {spec.model.chat_template.config_map}"
        case "ModelUnusable":
            return f"model.source: {spec.model.source}"
        case "VolumeNotMounted" if f'"{MODEL_VOLUME}"' in trouble.message:
            return f"model.source: {spec.model.source}"
        case "QuotaBlocked":
            return "raise that ResourceQuota, or ask for less: hardware, replicas"
        case "PodRefused" if "failed quota" in trouble.message:
            return (
                "set it in podOverrides, for the container `worker`, or for all pods of the "
                "namespace by a LimitRange"
            )
        case "PodRefused" if "violates PodSecurity" in trouble.message:
            return f"{_asking(spec)} asks for it; a namespace of a laxer standard would admit it"
        case "PodRefused" if re.search(r"(max|min)imum \S+ usage per", trouble.message):
            return "a LimitRange of the namespace: change hardware, or that LimitRange"
        case "ContainerConfig" if "exec" in trouble.message:
            return f"the image is named by {_image_field(spec)}, its command by podOverrides"
    return of_pod(trouble, spec, "workers")


def is_about_template(trouble: Problem) -> bool:
    """Whether a chat template in place of the model's own is what is wrong."""
    return f"'{CHAT_TEMPLATE_DIRECTORY}/" in trouble.message


def of_pod(
    trouble: Problem,
    spec: InferenceServiceSpec,
    kind: Literal["workers", "routers", "downloads"],
) -> str:
    """What would mend a pod of any kind: the field that names what is not there, say."""
    fields = ", ".join(_naming(trouble.message, spec, kind))
    if fields and trouble.reason in ("ContainerConfig", "VolumeNotMounted", "PodRefused"):
        return f"named by {fields}: make it, or name another one"
    if spec.router.auth is not None and "API key file" in trouble.message:
        return f"router.auth.keysSecret: {spec.router.auth.keys_secret}, under its key api-keys"
    match trouble.reason:
        case "ImagePull" if kind == "workers":
            return _image(trouble, spec)
        case "ImagePull":
            part = "router" if kind == "routers" else "operator"
            return f"named by {_image_of(part)}; {_secrets_of(kind)}"
        case "InsufficientGPUs" | "Unschedulable" if "PersistentVolumeClaim" not in trouble.message:
            return f"pods.{kind} of the service and pods of the chart say which nodes it may use"
        case "QuotaBlocked":
            return "raise that ResourceQuota"
        case "PodRefused" if "PriorityClass" in trouble.message:
            return "named by pods.priorityClassName of the chart: make it, or name another one"
        case "PodRefused" if "failed quota" in trouble.message:
            return "set it for all pods of the namespace by a LimitRange"
        case "PodRefused":
            over = " and podOverrides" if kind == "workers" else ""
            return f"pods.{kind}{over} may add what is asked for"
    return ""


# Fields that hold names of other objects, or keys in them.
_NAMES = {
    "claimName", "configMap", "credentialsSecret", "key", "keysSecret", "name", "priorityClassName",
    "runtimeClassName", "secretName", "serviceAccountName", "tokenSecret",
}  # fmt: skip
_OWN_NAMES = re.compile(r"(env|volumes|[mM]ounts|[cC]ontainers)\[\d+\]\.name$|^model\.name$")


def _naming(message: str, spec: InferenceServiceSpec, kind: str) -> Iterator[str]:
    """Fields of the service that name what a message is about."""
    words = set(re.findall(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?", message))
    for path, value in _leaves(spec.model_dump(mode="json", by_alias=True, exclude_none=True)):
        of_others = path.startswith("pods.") and not path.startswith(f"pods.{kind}.")
        of_others |= path.startswith("podOverrides.") and kind != "workers"
        is_name = path.rpartition(".")[2] in _NAMES and not _OWN_NAMES.search(path)
        if value in words and is_name and not of_others:
            yield path


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Texts by where they are: `pods.workers.env[0].valueFrom.secretKeyRef.name`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    elif isinstance(value, str):
        yield path, value


def _asking(spec: InferenceServiceSpec) -> str:
    """The field for which a pod is less restricted than others."""
    if spec.model.source.startswith("file://"):
        return f"model.source: {spec.model.source}"
    if spec.hardware.network in (Network.ROCE, Network.IB):
        return f"hardware.network: {spec.hardware.network.value}"
    return "podOverrides"


def _image(trouble: Problem, spec: InferenceServiceSpec) -> str:
    reference = spec.model.source.removeprefix("oci://")
    if reference != spec.model.source and reference in trouble.message:
        return f"model.source: {spec.model.source}; its Secrets: pods.workers.imagePullSecrets"
    return f"named by {_image_field(spec)}; {_secrets_of('workers')}"


def _image_field(spec: InferenceServiceSpec) -> str:
    return "image" if spec.image else _image_of("worker")


def _image_of(part: str) -> str:
    return f"image.registry, image.{part} and image.tag of the chart"


def _secrets_of(kind: str) -> str:
    return f"Secrets of its registry: pods.{kind}.imagePullSecrets"


def _wishes(demand: NodeDemand, spec: InferenceServiceSpec, nodes: Collection[Node]) -> str:
    """What a pod wants of its node, and what of that no node has."""
    hardware, together = spec.hardware, spec.topology_key
    wishes = []
    for name, count in demand.devices.items():
        most = max((node.devices.get(name, 0) for node in nodes), default=count)
        lacking = f" (no node has more than {most})" if most < count else ""
        wishes.append(f"{count} {name}{lacking}")
    wishes += [f"{hardware.cpu} CPUs"] if hardware.cpu else []
    wishes += [f"{hardware.memory} of memory"] if hardware.memory else []
    cache = spec.engine.worker_settings().get("host_cache_gib", 0) / hardware.nodes
    wishes += [f"{cache:g}Gi of memory for engine.hostCacheGib"] if cache else []
    for name, value in demand.selector.items():
        lacking = " (no node has it)" if _lacks(nodes, name, value) else ""
        wishes.append(f"the label {name}={value}{lacking}")
    if together and hardware.nodes > 1:
        lacking = "" if any(together in node.labels for node in nodes) else " (no node has it)"
        wishes.append(f"the label {together}, as all of its group have it{lacking}")
    pods = "its pod asks" if hardware.nodes == 1 else f"each of its {hardware.nodes} pods asks"
    if not wishes:
        return ""
    fields = "hardware, or engine.hostCacheGib" if cache else "hardware"
    if demand.selector.keys() - {names.GPU_PRODUCT}:
        fields += ", or pods.workers and podOverrides"
    fields += ", or topologyKey" if together and hardware.nodes > 1 else ""
    return f"{pods} its node for {', '.join(wishes)}: change {fields}, or add nodes"


def _lacks(nodes: Collection[Node], label: str, value: str) -> bool:
    return bool(nodes) and all(node.labels.get(label) != value for node in nodes)

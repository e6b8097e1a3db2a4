"""What would mend a group, in the fields of its service and the values of the chart. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

from radixgrove.operator.api.spec import ENGINE_FIELDS, Hardware, InferenceServiceSpec, Network
from radixgrove.operator.planning.demand import Node, NodeDemand
from radixgrove.operator.planning.diagnosis import Problem
from radixgrove.operator.planning.observed import Group
from radixgrove.operator.render.group import MODEL_VOLUME


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
            return _wishes(group.demand, spec.hardware, nodes)
        case "ImagePull":
            return _image(trouble, spec)
        case "OutOfMemory":
            return f"raise hardware.memory: {spec.hardware.memory or 'not set'}"
        case "EngineFailed":
            return ", ".join(
                f"{name} is {field} of the service"
                for name, field in ENGINE_FIELDS.items()
                if re.search(rf"\b{name}\b", trouble.message)
            )
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
    return ""


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
    given = "image" if spec.image else "image.registry, image.worker and image.tag of the chart"
    return f"named by {given}; Secrets of its registry: pods.workers.imagePullSecrets"


def _wishes(demand: NodeDemand, hardware: Hardware, nodes: Collection[Node]) -> str:
    """What a pod wants of its node, and what of that no node has."""
    wishes = []
    for name, count in demand.devices.items():
        most = max((node.devices.get(name, 0) for node in nodes), default=count)
        lacking = f" (no node has more than {most})" if most < count else ""
        wishes.append(f"{count} {name}{lacking}")
    wishes += [f"{hardware.cpu} CPUs"] if hardware.cpu else []
    wishes += [f"{hardware.memory} of memory"] if hardware.memory else []
    for name, value in demand.selector.items():
        lacking = " (no node has it)" if _lacks(nodes, name, value) else ""
        wishes.append(f"the label {name}={value}{lacking}")
    pods = "its pod asks" if hardware.nodes == 1 else f"each of its {hardware.nodes} pods asks"
    if not wishes:
        return ""
    return f"{pods} its node for {', '.join(wishes)}: change hardware, or add nodes"


def _lacks(nodes: Collection[Node], label: str, value: str) -> bool:
    return bool(nodes) and all(node.labels.get(label) != value for node in nodes)

"""What would mend a group, in the fields of its service and the values of the chart. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.spec import (
    ENGINE_FIELDS,
    NO_FIELDS,
    InferenceServiceSpec,
    Network,
    Parallelism,
)
from radixgrove.operator.planning.demand import Node, NodeDemand
from radixgrove.operator.planning.diagnosis import Problem
from radixgrove.operator.planning.named import PodKind, claims, naming
from radixgrove.operator.planning.observed import Group
from radixgrove.operator.render.group import MODEL_VOLUME
from radixgrove.operator.render.revision import CHAT_TEMPLATE_DIRECTORY

_SHAPE = {name: f"parallelism.{name}" for name in Parallelism.model_fields}
# What the scheduler says of claims and their volumes.
_CLAIMS = re.compile(
    r"persistent ?volume|pvc\(s\)|volume (zone|node affinity|to be created)|free storage", re.I
)

# What the API server says of containers that are not as a LimitRange wants them.
_LIMITS = re.compile(
    r"(max|min)imum \S+ usage per|limit to request ratio|less than or equal to \S+ limit"
)


def explained(
    trouble: Problem,
    group: Group,
    spec: InferenceServiceSpec,
    config: OperatorConfig,
    nodes: Collection[Node],
) -> str:
    """The problem's message and what to change; `spec` is the one that the group was made from."""
    mend = _remedy(trouble, group, spec, config, nodes)
    return f"{trouble.message} ({mend})" if mend else trouble.message


def _remedy(
    trouble: Problem,
    group: Group,
    spec: InferenceServiceSpec,
    config: OperatorConfig,
    nodes: Collection[Node],
) -> str:
    match trouble.reason:
        case "InsufficientGPUs" | "Unschedulable" if not _CLAIMS.search(trouble.message):
            return _wishes(trouble, group.demand, spec, config, nodes)
        case "InsufficientGPUs" | "Unschedulable" if "not found" not in trouble.message:
            return _claims_elsewhere(trouble, spec, config)
        case "VolumeNotMounted" if "Multi-Attach" in trouble.message:
            return _claims_elsewhere(trouble, spec, config)
        case "OutOfMemory":
            return f"raise hardware.memory: {spec.hardware.memory or 'not set'}"
        case "EngineFailed" if "is not installed" in trouble.message:
            return f"the image is named by {_image_field(spec)}: a worker's is needed"
        case "EngineFailed":
            return of_settings(trouble.message)
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
        case "ContainerConfig" if "exec" in trouble.message:
            return f"the image is named by {_image_field(spec)}, its command by podOverrides"
    return of_pod(trouble, spec, config, "workers")


def _claims_elsewhere(trouble: Problem, spec: InferenceServiceSpec, config: OperatorConfig) -> str:
    """Claims that are there, with volumes that this pod cannot have."""
    fields = claims(spec, config)
    if not fields:
        return ""
    named = f"its claims are named by {fields}"
    if re.search("ReadWriteOncePod|Multi-Attach", trouble.message):
        return f"{named}: one that several pods read must be ReadOnlyMany or ReadWriteMany"
    return f"{named}: each needs a volume, on a node that the pod may run on"


def of_requests(failures: Sequence[str], spec: InferenceServiceSpec, config: OperatorConfig) -> str:
    """What would mend requests that the API server refused, or that Redis left without an answer;
    "" where the words say it."""
    known = list(_requests(spec, config))
    mends = [
        next((mend for pattern, mend in known if re.search(pattern, said)), "") for said in failures
    ]
    return "; ".join(dict.fromkeys(filter(None, mends)))


def _requests(spec: InferenceServiceSpec, config: OperatorConfig) -> Iterator[tuple[str, str]]:
    """By a pattern of what is said, the more special first."""
    given = {
        "pods.workers": spec.pods.workers,
        "pods.workers of the chart": config.pods.workers != NO_FIELDS,
        "podOverrides": spec.pod_overrides,
    }
    if fields := " and ".join(name for name, value in given.items() if value):
        mismade = r"statefulsets/.*( is invalid: |not declared in schema)"
        yield mismade, f"see {fields}; the worker's container is called worker"
    size = "model.cache.size of the service, or modelCache.size of the chart"
    yield "exceeded quota.*requests.storage", f"raise that ResourceQuota, or ask for less: {size}"
    yield "exceeded quota", "raise that ResourceQuota"
    limit = f"a LimitRange of the namespace: change {size}, or that LimitRange"
    yield "usage per PersistentVolumeClaim", limit
    policy = (
        f"a policy of the cluster: exempt what has the label {names.MANAGED_BY}={names.MANAGER}, "
        "or meet it by pods and podOverrides where it is about pods"
    )
    yield "denied( the)? request: (?!the operator)", policy  # the chart's own say what would do
    own = f"it is the chart's, in the namespace {config.namespace}"
    yield "Redis does not answer", own if config.redis.own else "redis.url of the chart names it"


def of_settings(said: str) -> str:
    """The fields behind the worker's settings that a message names."""
    return ", ".join(
        f"{name} is {field} of the service"
        for name, field in (ENGINE_FIELDS | _SHAPE).items()
        if re.search(rf"\b{name}\b", said)
    )


def is_about_template(trouble: Problem) -> bool:
    """Whether a chat template in place of the model's own is what is wrong."""
    return f"'{CHAT_TEMPLATE_DIRECTORY}/" in trouble.message


def of_pod(
    trouble: Problem, spec: InferenceServiceSpec, config: OperatorConfig, kind: PodKind
) -> str:
    """What would mend a pod of any kind: the field that names what is not there, say."""
    about_claims = bool(_CLAIMS.search(trouble.message))
    if trouble.reason in ("ContainerConfig", "VolumeNotMounted", "PodRefused") or about_claims:
        fields = naming(trouble.message, spec, config, kind)
        if fields:
            return f"named by {fields}: make it, or name another one"
    if spec.router.auth is not None and "API key file" in trouble.message:
        return f"router.auth.keysSecret: {spec.router.auth.keys_secret}, under its key api-keys"
    match trouble.reason:
        case "ImagePull" if kind == "workers":
            return _image(trouble, spec)
        case "ImagePull":
            part = "router" if kind == "routers" else "operator"
            return f"named by {_image_of(part)}; {_secrets_of(kind)}"
        case "InsufficientGPUs" | "Unschedulable" if not about_claims:
            return f"pods.{kind} of the service and pods of the chart say which nodes it may use"
        case "QuotaBlocked":
            return "raise that ResourceQuota"
        case "PodRefused" if "failed quota" in trouble.message:
            return "set it for all pods of the namespace by a LimitRange"
        case "PodRefused" if _LIMITS.search(trouble.message):
            own = "hardware, or " if kind == "workers" else ""
            return f"a LimitRange of the namespace: change {own}that LimitRange"
        case "PodRefused":
            over = " and podOverrides" if kind == "workers" else ""
            return f"pods.{kind}{over} may add what is asked for"
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
        return f"model.source: {spec.model.source}; {_secrets_of('workers')}"
    return f"named by {_image_field(spec)}; {_secrets_of('workers')}"


def _image_field(spec: InferenceServiceSpec) -> str:
    return "image" if spec.image else _image_of("worker")


def _image_of(part: str) -> str:
    return f"image.registry, image.{part} and image.tag of the chart"


def _secrets_of(kind: str) -> str:
    return (
        f"Secrets of its registry, in this namespace: pods.{kind}.imagePullSecrets, or "
        "image.pullSecrets of the chart"
    )


def _wishes(
    trouble: Problem,
    demand: NodeDemand,
    spec: InferenceServiceSpec,
    config: OperatorConfig,
    nodes: Collection[Node],
) -> str:
    """What a pod wants of its node, what of that no node has, and the fields that say so."""
    wishes = [*_capacity(demand, spec, nodes), *_labels(demand, spec, config, nodes)]
    fields = [field for _, field in wishes]
    if "untolerated taint" in trouble.message:
        fields += _tolerations(demand, nodes)
    if "node affinity/selector" in trouble.message and not demand.selector:
        fields.append("pods.workers.affinity")
    if not fields:
        return ""
    count = spec.hardware.nodes
    pods = "its pod asks" if count == 1 else f"each of its {count} pods asks"
    asked = f"{pods} its node for {', '.join(words for words, _ in wishes)}: " if wishes else ""
    return f"{asked}change {', or '.join(dict.fromkeys(fields))}, or add nodes"


def _capacity(
    demand: NodeDemand, spec: InferenceServiceSpec, nodes: Collection[Node]
) -> Iterator[tuple[str, str]]:
    """Wishes that use something up, each with its field."""
    hardware = spec.hardware
    for name, count in demand.devices.items():
        most = max((node.devices.get(name, 0) for node in nodes), default=count)
        lacking = f" (no node has more than {most})" if most < count else ""
        yield f"{count} {name}{lacking}", "hardware"
    if hardware.cpu:
        yield f"{hardware.cpu} CPUs", "hardware"
    if hardware.memory:
        yield f"{hardware.memory} of memory", "hardware"
    cache = spec.engine.worker_settings().get("host_cache_gib", 0) / hardware.nodes
    if cache:
        yield f"{cache:g}Gi of memory for engine.hostCacheGib", "engine.hostCacheGib"


def _labels(
    demand: NodeDemand, spec: InferenceServiceSpec, config: OperatorConfig, nodes: Collection[Node]
) -> Iterator[tuple[str, str]]:
    """Wishes for labels, each with its field."""
    for name, value in demand.selector.items():
        there = not nodes or any(node.labels.get(name) == value for node in nodes)
        lacking = "" if there else " (no node has it)"
        yield f"the label {name}={value}{lacking}", _selecting(name, spec, config)
    if spec.topology_key and spec.hardware.nodes > 1:
        there = any(spec.topology_key in node.labels for node in nodes)
        lacking = "" if there else " (no node has it)"
        words = f"the label {spec.topology_key}, as all of its group have it{lacking}"
        yield words, "topologyKey"


def _tolerations(demand: NodeDemand, nodes: Collection[Node]) -> Iterator[str]:
    """The field for taints that its pods do not bear, which the scheduler does not name; not for
    those of nodes that are not ready or closed, or would not do without them either."""
    taints = {
        f"{taint['key']}={taint.get('value', '')}".removesuffix("=")
        for node in nodes
        if demand.fits(node)
        for taint in demand.kept_off_by(node)
    }
    meant = sorted(taint for taint in taints if not taint.startswith("node.kubernetes.io/"))
    if meant or not any(demand.kept_off_by(node) for node in nodes):
        yield "pods.workers.tolerations" + (f" (of {', '.join(meant)})" if meant else "")


def _selecting(label: str, spec: InferenceServiceSpec, config: OperatorConfig) -> str:
    """The field or value that asks for a label of nodes."""
    workers = spec.pods.workers or NO_FIELDS
    if label in workers.node_selector:
        return "pods.workers.nodeSelector"
    if label in config.pods.workers.node_selector:
        return "pods.workers.nodeSelector of the chart"
    if label in config.pods.node_selector:
        return "pods.nodeSelector of the chart"
    return "hardware" if label == names.GPU_PRODUCT else "podOverrides"

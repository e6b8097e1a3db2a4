"""One attempt of one worker group: StatefulSet, headless Service, its NetworkPolicy, ConfigMap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import Object, PodSpec
from radixgrove.operator.api.spec import ConfigMapFile, DeviceKind, Network
from radixgrove.operator.api.values import quantity
from radixgrove.operator.render.common import (
    Service,
    container_security_context,
    field_env,
    http_probe,
    key_env,
    metadata,
    pod_security_context,
    resource_env,
    with_pod_defaults,
)
from radixgrove.operator.render.merge import CannotMerge, strategic_merge
from radixgrove.operator.render.pods import with_fields
from radixgrove.operator.render.revision import (
    CHAT_TEMPLATE_DIRECTORY,
    CHAT_TEMPLATE_FILE,
    DRAIN_TIMEOUT,
    MODEL_DIRECTORY,
    InvalidOverrides,
    Revision,
    UnsupportedShape,
    config_map_data,
    host_cache,
    shared_memory,
)
from radixgrove.protocol.model.fit import Intended
from radixgrove.protocol.ranks import UnsupportedRanks, check_ranks
from radixgrove.protocol.settings import DType, Quantize, WorkerSettings

WORKER_CONTAINER = "worker"
MODEL_VOLUME = "model"
CHAT_TEMPLATE_VOLUME = "chat-template"
_ARGUMENTS = ["radixgrove", "worker", "--config", "/etc/radixgrove/worker.yaml"]
_PROBE_PERIOD = 5
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def revision_config_map(service: Service, revision: Revision, config: OperatorConfig) -> Object:
    """Immutable: a group restarted in the middle of a rollout still reads its own.

    The name holds a hash of the content: after an upgrade of the operator the same revision may
    read otherwise, and groups from before the upgrade keep what they were started with.
    """
    data = config_map_data(revision, service.key, config)
    name = names.revision_name(service.name, revision.hash, names.digest(data, 8))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, name, names.WORKER, {names.REVISION: revision.hash}),
        "immutable": True,
        "data": data,
    }


def group_labels(service: Service, revision: Revision, index: int, attempt: int) -> dict[str, str]:
    return {
        **names.labels(service.name, names.WORKER),
        names.GROUP_INDEX: str(index),
        names.ATTEMPT: str(attempt),
        names.REVISION: revision.hash,
    }


def stateful_set(
    service: Service,
    revision: Revision,
    index: int,
    attempt: int,
    config: OperatorConfig,
    avoid: Sequence[str] = (),
) -> Object:
    """The pods of one attempt, all started at once; no template change restarts them.

    `avoid`: nodes on which they run only if there are no others. Raises InvalidEngine.
    """
    name = names.group_name(service.name, index, attempt)
    labels = group_labels(service, revision, index, attempt)
    spec = _pod_spec(service, revision, name, config, avoid)
    template: Object = {"metadata": {"labels": labels}, "spec": spec}
    counted = names.labels(service.name, names.WORKER)
    template = with_fields(template, WORKER_CONTAINER, counted, config.pods.workers, revision.pods)
    template = _overridden(template, revision)
    template["metadata"]["labels"] = {**template["metadata"].get("labels", {}), **labels}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(service, name, names.WORKER, labels),
        "spec": {
            "replicas": revision.hardware.nodes,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 1,
            "selector": {
                "matchLabels": {
                    key: labels[key] for key in (names.SERVICE, names.GROUP_INDEX, names.ATTEMPT)
                }
            },
            "template": template,
        },
    }


def check(service: Service, revision: Revision, config: OperatorConfig) -> PodSpec:
    """Refuse what its worker would refuse when it starts, as far as that is known before.

    Returns the pod spec of its groups. Raises InvalidEngine.
    """
    rendered = stateful_set(service, revision, 0, 0, config)
    pod: PodSpec = rendered["spec"]["template"]["spec"]
    if not is_own_worker(pod, revision):
        return pod
    hardware = revision.hardware
    ranks = hardware.nodes * hardware.gpus_per_node
    try:
        check_ranks(
            tp=revision.parallelism.tp,
            pp=revision.parallelism.pp,
            dp=revision.parallelism.dp,
            ep=revision.parallelism.ep,
            ranks=ranks,
            nodes=hardware.nodes,
        )
    except UnsupportedRanks as error:
        raise UnsupportedShape(f"hardware and parallelism: {error}") from error
    return pod


def is_own_worker(pod: PodSpec, revision: Revision) -> bool:
    """Whether the pods run the chart's worker. Of another image or command nothing is known."""
    own = {"image": revision.frozen_image, "args": _ARGUMENTS, "command": None}
    return all(
        container.get(key) == value
        for container in pod.get("containers", [])
        if container["name"] == WORKER_CONTAINER
        for key, value in own.items()
    )


def own_image(service: Service, revision: Revision, config: OperatorConfig) -> str:
    """The image of its groups; "" where they run another command than the worker's."""
    pod = stateful_set(service, revision, 0, 0, config)["spec"]["template"]["spec"]
    (worker,) = (c for c in pod["containers"] if c["name"] == WORKER_CONTAINER)
    own = worker.get("args") == _ARGUMENTS and not worker.get("command")
    return str(worker["image"]) if own else ""


def intended(revision: Revision, pod: PodSpec, gpu_bytes: int) -> Intended:
    """What a model must be fit for in such pods. `gpu_bytes`: of the largest GPU it may get; 0: not
    known.

    Each of the group's members (`dp`) has the whole model over its tp * pp ranks.
    """
    hardware, layout = revision.hardware, revision.parallelism
    asked = WorkerSettings.model_validate(revision.engine.worker_settings())
    dtype = "" if asked.dtype is DType.AUTO else asked.dtype.value
    memory = int(layout.tp * layout.pp * gpu_bytes * asked.memory_fraction)
    if hardware.device is DeviceKind.CPU:
        dtype = dtype or DType.FLOAT32.value
        memory = int(_memory_for_weights(pod, revision) * hardware.nodes / layout.dp)
    return Intended(
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        dtype=dtype,
        quantize="" if asked.quantize is Quantize.NONE else asked.quantize.value,
        max_model_len=asked.max_model_len,
        memory=memory,
    )


def _memory_for_weights(pod: PodSpec, revision: Revision) -> float:
    """Bytes of a pod's limit that its host cache leaves, what /dev/shm may take included; 0: there
    is no limit, or none that can be read."""
    (worker,) = (c for c in pod.get("containers", []) if c["name"] == WORKER_CONTAINER)
    try:
        limit = quantity(str(worker.get("resources", {}).get("limits", {})["memory"]))
    except (KeyError, ValueError):
        return 0.0
    return max(limit - host_cache(revision), 1.0)


def _overridden(template: Object, revision: Revision) -> Object:
    overrides = revision.pod_overrides
    wrong = sorted(key for key in ("metadata", "spec") if overrides.get(key, {}) is None)
    wrong += sorted(overrides.keys() - {"metadata", "spec"})
    if wrong:
        raise InvalidOverrides(f"podOverrides.{wrong[0]}: metadata and spec are objects, no more")
    try:
        return strategic_merge(template, overrides, "podOverrides")
    except CannotMerge as error:
        raise InvalidOverrides(str(error)) from error


def _owned_by_set(service: Service, set_name: str, set_uid: str, labels: dict[str, str]) -> Object:
    """An attempt's companions leave with its StatefulSet, by garbage collection."""
    return {
        "name": set_name,
        "namespace": service.namespace,
        "labels": labels,
        "ownerReferences": [
            {
                "apiVersion": "apps/v1",
                "kind": "StatefulSet",
                "name": set_name,
                "uid": set_uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def headless_service(service: Service, labels: dict[str, str], set_uid: str) -> Object:
    """Names of the group's pods, published before they are ready: they rendezvous by them."""
    index, attempt = int(labels[names.GROUP_INDEX]), int(labels[names.ATTEMPT])
    name = names.group_name(service.name, index, attempt)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _owned_by_set(service, name, set_uid, labels),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _selector(labels),
            "ports": [
                {"name": "http", "port": names.API_PORT, "targetPort": "http"},
                {"name": "management", "port": names.MANAGEMENT_PORT, "targetPort": "management"},
            ],
        },
    }


def group_network_policy(service: Service, labels: dict[str, str], set_uid: str) -> Object:
    """Ranks reach each other on every port, because NCCL and Gloo choose theirs."""
    index, attempt = int(labels[names.GROUP_INDEX]), int(labels[names.ATTEMPT])
    name = names.group_name(service.name, index, attempt)
    peers = {"podSelector": {"matchLabels": _selector(labels)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _owned_by_set(service, name, set_uid, labels),
        "spec": {
            "podSelector": {"matchLabels": _selector(labels)},
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [peers]}],
        },
    }


def _selector(labels: dict[str, str]) -> dict[str, str]:
    return {key: labels[key] for key in (names.SERVICE, names.GROUP_INDEX, names.ATTEMPT)}


# ---- the pod -------------------------------------------------------------------------------------


def _pod_spec(
    service: Service, revision: Revision, name: str, config: OperatorConfig, avoid: Sequence[str]
) -> Object:
    # First, for it refuses settings that nothing below could read.
    config_map = revision_config_map(service, revision, config)["metadata"]["name"]
    hardware = revision.hardware
    drain = float(revision.engine.worker_settings().get("drain_timeout", DRAIN_TIMEOUT))
    spec: Object = {
        "serviceAccountName": service.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": math.ceil(drain + config.drain_notice) + 30,
        "securityContext": pod_security_context(),
        "containers": [_container(service, revision, name, config)],
        "volumes": [*_scratch_volumes(revision), *_model_volumes(revision)],
    }
    items = [{"key": "worker.yaml", "path": "worker.yaml"}]
    spec["volumes"].append({"name": "config", "configMap": {"name": config_map, "items": items}})
    if revision.chat_template is not None:
        _mount_chat_template(spec, revision.chat_template)
    affinity = _affinity(service, revision, name, avoid)
    if affinity:
        spec["affinity"] = affinity
    if hardware.gpu_type:
        spec["nodeSelector"] = {names.GPU_PRODUCT: hardware.gpu_type}
    if hardware.device is DeviceKind.CUDA and config.pods.runtime_class:
        spec["runtimeClassName"] = config.pods.runtime_class
    if revision.scheduler_name:
        spec["schedulerName"] = revision.scheduler_name
    return with_pod_defaults(spec, config)


def _mount_chat_template(spec: Object, template: ConfigMapFile) -> None:
    items = [{"key": template.key, "path": CHAT_TEMPLATE_FILE}]
    source = {"name": template.config_map, "items": items}
    spec["volumes"].append({"name": CHAT_TEMPLATE_VOLUME, "configMap": source})
    mount = {
        "name": CHAT_TEMPLATE_VOLUME,
        "mountPath": CHAT_TEMPLATE_DIRECTORY,
        "readOnly": True,
    }
    spec["containers"][0]["volumeMounts"].append(mount)


def _container(service: Service, revision: Revision, name: str, config: OperatorConfig) -> Object:
    attempts = math.ceil(revision.startup_seconds / _PROBE_PERIOD)
    rdma = revision.hardware.network in (Network.ROCE, Network.IB)
    return {
        "name": WORKER_CONTAINER,
        "image": revision.worker_image,
        "imagePullPolicy": config.images.pull_policy,
        "args": _ARGUMENTS,
        "env": _environment(service, revision, name, config),
        "ports": [
            {"name": "http", "containerPort": names.API_PORT},
            {"name": "management", "containerPort": names.MANAGEMENT_PORT},
        ],
        "resources": _resources(revision, config),
        # One path and port for every rank: rank 0 says "serving", the others say "joined".
        "startupProbe": http_probe("/readyz", "http", period=_PROBE_PERIOD, failures=attempts),
        "readinessProbe": http_probe("/readyz", "http", period=2, failures=2),
        "livenessProbe": http_probe("/livez", "http", period=10, failures=6),
        "lifecycle": {"preStop": {"sleep": {"seconds": math.ceil(config.drain_notice) or 1}}},
        # Effective for a container that `podOverrides` run as root. To any other user it is only in
        # the bounding set; the runtime's limit of locked memory then decides (docs/kubernetes.md).
        "securityContext": container_security_context(["IPC_LOCK"] if rdma else None),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "config", "mountPath": "/etc/radixgrove", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "run", "mountPath": "/run/radixgrove"},
            {"name": "cache", "mountPath": "/cache"},
            {"name": "tmp", "mountPath": "/tmp"},
            # The claim as a whole: a kubelet makes a missing `subPath`, so that a mistake in the
            # source would leave an empty directory on the user's volume.
            {"name": MODEL_VOLUME, "mountPath": MODEL_DIRECTORY, "readOnly": True},
        ],
    }


def _environment(
    service: Service, revision: Revision, name: str, config: OperatorConfig
) -> list[Object]:
    hardware = revision.hardware
    domain = f"{service.namespace}.svc.{config.cluster_domain}"
    values: dict[str, Any] = {
        "RADIXGROVE_REPLICA_ID": names.replica_id(name),
        "RADIXGROVE_ADVERTISE_URL": f"http://{config.pod_host}:{names.API_PORT}",
        "NNODES": hardware.nodes,
        "NPROC_PER_NODE": hardware.gpus_per_node,
        "WORLD_SIZE": hardware.nodes * hardware.gpus_per_node,
        "MASTER_ADDR": f"{names.replica_id(name)}.{name}.{domain}",
        "MASTER_PORT": names.RENDEZVOUS_PORT,
        "GLOO_SOCKET_IFNAME": hardware.interface,
        "NCCL_SOCKET_IFNAME": hardware.interface,
        # In a directory that outlives a container but not its pod: a rank that finds it was
        # restarted in place, and waits to be replaced with its group.
        "GROUP_MARKER": "/run/radixgrove/joined",
        "HOME": "/cache",
        "XDG_CACHE_HOME": "/cache",
        "XDG_RUNTIME_DIR": "/run/radixgrove",
        "HF_HUB_OFFLINE": 1,
    }
    match hardware.network:
        case Network.TCP:
            values["NCCL_IB_DISABLE"] = 1
        case Network.ROCE:
            values["NCCL_NET"] = "IB"
            values["NCCL_IB_GID_INDEX"] = 3  # RoCE v2 over IPv4 on common NICs
        case Network.IB:
            values["NCCL_NET"] = "IB"
        case Network.AUTO:
            pass
    return [
        field_env("POD_IP", "status.podIP"),
        field_env("POD_NAME", "metadata.name"),
        field_env("NODE_NAME", "spec.nodeName"),
        field_env("NODE_RANK", f"metadata.labels['{names.POD_INDEX}']"),
        *({"name": key, "value": str(value)} for key, value in values.items()),
        *_threads(revision),
        *key_env(config, "internal_key", "cluster_secret", "management_key", "redis_url"),
    ]


def _threads(revision: Revision) -> list[Object]:
    """What a pod requests of the node's cores is what its engine computes with.

    A request is no quota: without this, every worker of a node takes all of its cores.
    """
    hardware = revision.hardware
    chosen = "cpu_threads" in revision.engine.worker_settings()
    if hardware.device is not DeviceKind.CPU or not hardware.cpu or chosen:
        return []
    if hardware.gpus_per_node == 1:
        return [resource_env("RADIXGROVE_CPU_THREADS", "worker", "requests.cpu")]
    each = max(1, int(quantity(hardware.cpu)) // hardware.gpus_per_node)  # ranks
    return [{"name": "RADIXGROVE_CPU_THREADS", "value": str(each)}]


def _resources(revision: Revision, config: OperatorConfig) -> Object:
    hardware = revision.hardware
    requests: Object = {}
    limits: Object = {}
    if hardware.cpu:
        requests["cpu"] = hardware.cpu
    cached = host_cache(revision)
    if hardware.memory:
        # Pages of /dev/shm, and those that CUDA has locked, count against the container's limit.
        total = quantity(hardware.memory) + quantity(shared_memory(hardware)) + cached
        requests["memory"] = limits["memory"] = _mebibytes(total)
    elif cached:
        # The least that the pod will take, at once and for good: the scheduler has to know of it.
        # What else it needs is not known, so there is no limit.
        requests["memory"] = _mebibytes(cached)
    devices: Object = {}
    if hardware.device is DeviceKind.CUDA:
        devices[config.gpu_resource] = str(hardware.gpus_per_node)
    if hardware.network in (Network.ROCE, Network.IB):
        devices[hardware.rdma_resource or config.rdma_resource] = "1"
    resources = {"requests": requests | devices, "limits": limits | devices}
    return {key: value for key, value in resources.items() if value}


def _mebibytes(size: float) -> str:
    return f"{math.ceil(size / 2**20)}Mi"


def _affinity(service: Service, revision: Revision, name: str, avoid: Sequence[str]) -> Object:
    group = {"matchLabels": {names.SERVICE: service.name}}
    index, attempt = name.rsplit("-", 2)[1:]
    own = {
        "matchLabels": {
            names.SERVICE: service.name,
            names.GROUP_INDEX: index,
            names.ATTEMPT: attempt.removeprefix("a"),
        }
    }
    other_host = {"topologyKey": "kubernetes.io/hostname", "labelSelector": group}
    apart: Object = {_PREFERRED: [{"weight": 50, "podAffinityTerm": other_host}]}
    affinity: Object = {"podAntiAffinity": apart}
    if revision.hardware.nodes > 1:
        apart[REQUIRED] = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": own}]
    if avoid:
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in avoid]
        elsewhere = {"weight": 100, "preference": {"matchFields": fields}}
        affinity["nodeAffinity"] = {_PREFERRED: [elsewhere]}
    if revision.topology_key and revision.hardware.nodes > 1:
        together = {"topologyKey": revision.topology_key, "labelSelector": own}
        affinity["podAffinity"] = {REQUIRED: [together]}
    return affinity


def _scratch_volumes(revision: Revision) -> list[Object]:
    return [
        {
            "name": "shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory(revision.hardware)},
        },
        {"name": "run", "emptyDir": {"sizeLimit": "64Mi"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]


def _model_volumes(revision: Revision) -> list[Object]:
    if revision.model.host_path:
        host_path = {"path": revision.model.host_path, "type": "Directory"}
        return [{"name": MODEL_VOLUME, "hostPath": host_path}]
    if revision.model.image:
        return [{"name": MODEL_VOLUME, "image": {"reference": revision.model.image}}]
    claim = {"claimName": revision.model.claim, "readOnly": True}
    return [{"name": MODEL_VOLUME, "persistentVolumeClaim": claim}]

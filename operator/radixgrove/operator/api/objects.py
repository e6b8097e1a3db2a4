"""Shapes of API objects: of those that decisions are taken from, as far as those look at them.

Field names are Kubernetes' own. What is absent from an object is at the API's default.
"""

from __future__ import annotations

from typing import Any, Generic, Required, TypedDict, TypeVar

from radixgrove.operator.api import names

T = TypeVar("T")
Object = dict[str, Any]  # one that is written, or passed on: its fields as they come


class OwnerReference(TypedDict, total=False):
    uid: Required[str]
    controller: bool


class Meta(TypedDict, total=False):
    name: Required[str]
    namespace: str
    uid: str
    labels: dict[str, str]
    annotations: dict[str, str]
    creationTimestamp: str
    deletionTimestamp: str
    generation: int
    resourceVersion: str
    ownerReferences: list[OwnerReference]


class Condition(TypedDict, total=False):
    type: Required[str]
    status: Required[str]  # True, False or Unknown
    reason: str
    message: str
    lastTransitionTime: str


class Waiting(TypedDict, total=False):
    reason: str
    message: str


class Running(TypedDict, total=False):
    startedAt: str


class Terminated(TypedDict, total=False):
    exitCode: int
    reason: str
    message: str
    startedAt: str
    finishedAt: str


class ContainerState(TypedDict, total=False):
    """One of the three."""

    waiting: Waiting
    running: Running
    terminated: Terminated


class ContainerStatus(TypedDict, total=False):
    name: Required[str]
    state: ContainerState
    lastState: ContainerState
    restartCount: int
    started: bool  # its startup probe has passed


class Probe(TypedDict, total=False):
    periodSeconds: int
    failureThreshold: int


class Resources(TypedDict, total=False):
    requests: dict[str, str]
    limits: dict[str, str]


class Container(TypedDict, total=False):
    name: Required[str]
    startupProbe: Probe
    resources: Resources


class Toleration(TypedDict, total=False):
    key: str  # absent: of every taint
    operator: str  # Exists or Equal
    value: str
    effect: str  # absent: of every effect


class Taint(TypedDict, total=False):
    key: Required[str]
    value: str
    effect: Required[str]


class ConfigMapSource(TypedDict):
    name: str


class Volume(TypedDict, total=False):
    name: Required[str]
    configMap: ConfigMapSource


class PodSpec(TypedDict, total=False):
    nodeName: str
    nodeSelector: dict[str, str]
    tolerations: list[Toleration]
    schedulerName: str
    containers: list[Container]
    volumes: list[Volume]


class PodStatus(TypedDict, total=False):
    phase: str
    message: str  # of the kubelet, which ended or refused the pod as a whole
    reason: str
    podIP: str
    conditions: list[Condition]
    containerStatuses: list[ContainerStatus]
    initContainerStatuses: list[ContainerStatus]


class PodObject(TypedDict, total=False):
    metadata: Required[Meta]
    spec: PodSpec
    status: PodStatus


class PodTemplate(TypedDict, total=False):
    spec: PodSpec


class StatefulSetSpec(TypedDict, total=False):
    replicas: int
    template: PodTemplate


class StatefulSetObject(TypedDict, total=False):
    metadata: Required[Meta]
    spec: Required[StatefulSetSpec]


class NodeSpec(TypedDict, total=False):
    taints: list[Taint]


class NodeStatus(TypedDict, total=False):
    conditions: list[Condition]
    allocatable: dict[str, str]


class NodeObject(TypedDict, total=False):
    metadata: Required[Meta]
    spec: NodeSpec
    status: NodeStatus


class JobStatus(TypedDict, total=False):
    conditions: list[Condition]


class JobObject(TypedDict, total=False):
    metadata: Required[Meta]
    status: JobStatus


class ServiceObject(TypedDict, total=False):
    """An InferenceService. Its parts are read by their own models, in `spec` and `status`."""

    metadata: Required[Meta]
    spec: Object
    status: Object


class ChildObject(TypedDict, total=False):
    """Any object that this operator may have made, of which only the metadata counts."""

    metadata: Required[Meta]


class DeploymentSpec(TypedDict, total=False):
    replicas: int


class DeploymentStatus(TypedDict, total=False):
    availableReplicas: int
    conditions: list[Condition]


class DeploymentObject(TypedDict, total=False):
    metadata: Required[Meta]
    spec: DeploymentSpec
    status: DeploymentStatus


class ConfigMapObject(TypedDict, total=False):
    metadata: Required[Meta]
    data: dict[str, str]


class LeaseSpec(TypedDict, total=False):
    """Of any client's Lease: null is as good as absent."""

    holderIdentity: str | None
    renewTime: str | None
    leaseDurationSeconds: int | None
    leaseTransitions: int | None


class LeaseObject(TypedDict, total=False):
    metadata: Required[Meta]
    spec: LeaseSpec | None


class ClaimSpec(TypedDict, total=False):
    accessModes: list[str]
    storageClassName: str


class ClaimStatus(TypedDict, total=False):
    phase: str


class ClaimObject(TypedDict, total=False):
    metadata: Required[Meta]
    spec: Required[ClaimSpec]
    status: ClaimStatus


class ObjectReference(TypedDict, total=False):
    uid: str


class EventObject(TypedDict, total=False):
    involvedObject: ObjectReference
    lastTimestamp: str
    eventTime: str
    reason: str
    message: str


class KindName(str, Generic[T]):
    """A kind as the API names it; its objects are read as `T`."""


SERVICE = KindName[ServiceObject](names.KIND)
STATEFUL_SET = KindName[StatefulSetObject]("StatefulSet")
POD = KindName[PodObject]("Pod")
NODE = KindName[NodeObject]("Node")
JOB = KindName[JobObject]("Job")
DEPLOYMENT = KindName[DeploymentObject]("Deployment")
CONFIG_MAP = KindName[ConfigMapObject]("ConfigMap")
CLAIM = KindName[ClaimObject]("PersistentVolumeClaim")
EVENT = KindName[EventObject]("Event")
SCALER = KindName[ChildObject]("HorizontalPodAutoscaler")
NETWORK_POLICY = KindName[ChildObject]("NetworkPolicy")
NAMESPACE = KindName[Object]("Namespace")
LEASE = KindName[LeaseObject]("Lease")
SECRET = KindName[Object]("Secret")

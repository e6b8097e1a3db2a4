"""The `InferenceService` resource: one definition for its CRD, its checks and its defaults.

Field names in YAML are camelCase. Every string, list and map is bounded, because the API server
prices validation rules by the largest value that a schema admits.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model
from pydantic.alias_generators import to_camel

from radixgrove.operator.api.values import (
    WORDS,
    Duration,
    ModelName,
    ObjectName,
    Quantity,
    Size,
    SizeOrZero,
)
from radixgrove.protocol.settings import RoutingPolicy, WorkerSettings

FETCHED = ("hf://", "s3://", "gs://")  # sources that Jobs fetch into claims
MAX_NAME = 40
MAX_NODES = 64
MAX_GROUPS = 256


class Rule(BaseModel):
    """A CEL rule of the CRD, on the object that it is listed in."""

    rule: str
    message: str
    field_path: str | None = None


class SpecModel(BaseModel):
    """`rules`: CEL rules the API server checks on this object."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True
    )
    rules: ClassVar[list[Rule]] = []


class AccessMode(StrEnum):
    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_WRITE_MANY = "ReadWriteMany"


class CacheSpec(SpecModel):
    """The claim that keeps the downloaded model."""

    size: Size | None = Field(None, description="Size of the claim; the chart's by default.")
    storage_class: ObjectName | None = Field(
        None, description="Storage class of the claim; the chart's by default."
    )
    access_mode: AccessMode | None = Field(
        None,
        description="ReadWriteMany is needed as soon as pods on two nodes read it; the chart's by "
        "default.",
    )
    retain: bool = Field(False, description="Keep the claim when its last user is deleted.")


class ConfigMapFile(SpecModel):
    """A text in a ConfigMap of the service's namespace."""

    config_map: ObjectName = Field(description="Name of the ConfigMap.")
    key: str = Field(
        "chat_template.jinja",
        description="Key under which it has the text.",
        pattern=r"^[-._a-zA-Z0-9]+$",
        max_length=253,
        json_schema_extra={WORDS: "is no key of a ConfigMap: letters, digits, - . _"},
    )


class Model(SpecModel):
    """Which model is served, and under which names."""

    rules = [
        Rule(
            rule="!has(self.revision) || self.source.startsWith('hf://')",
            message="revision is for hf:// sources",
            field_path=".revision",
        ),
        Rule(
            rule="!has(self.tokenSecret) || self.source.startsWith('hf://')",
            message="tokenSecret is for hf:// sources",
            field_path=".tokenSecret",
        ),
        Rule(
            rule="!has(self.credentialsSecret) || self.source.startsWith('s3://')",
            message="credentialsSecret is for s3:// sources",
            field_path=".credentialsSecret",
        ),
        Rule(
            rule="!has(self.path) || self.source.startsWith('oci://')",
            message="path is for oci:// sources",
            field_path=".path",
        ),
    ]
    source: str = Field(
        description="hf://ORG/REPO, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, oci://IMAGE, "
        "pvc://CLAIM/PATH or file:///PATH on the node (the last only where the namespace admits "
        "hostPath volumes).",
        pattern=r"^(hf://[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)?|s3://[a-z0-9.-]+(/[A-Za-z0-9._/=-]+)?"
        r"|gs://[a-z0-9._-]+(/[A-Za-z0-9._/=-]+)?|oci://[a-z0-9][A-Za-z0-9._/:@-]*"
        r"|pvc://[a-z0-9.-]+(/[A-Za-z0-9._/-]+)?|file:///[A-Za-z0-9._/-]+)$",
        max_length=512,
        json_schema_extra={
            WORDS: "is none of hf://ORG/REPO, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, "
            "oci://IMAGE, pvc://CLAIM/PATH, file:///PATH"
        },
    )
    path: str | None = Field(
        None,
        description="Directory of the model in the image of an oci:// source; its root by default.",
        pattern=r"^[A-Za-z0-9._/-]+$",
        max_length=256,
        json_schema_extra={WORDS: "is no path: letters, digits, - . _ /"},
    )
    revision: str | None = Field(
        None,
        description="Branch, tag or commit; what it stands for at creation is kept in status.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        max_length=128,
        json_schema_extra={WORDS: "is no branch, tag or commit: letters, digits, - . _ /"},
    )
    token_secret: ObjectName | None = Field(
        None, description="Secret with the hub's token under the key `token`."
    )
    credentials_secret: ObjectName | None = Field(
        None,
        description="Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, where needed, "
        "AWS_SESSION_TOKEN, AWS_REGION and AWS_ENDPOINT_URL.",
    )
    name: ModelName | None = Field(
        None, description="Name under which clients ask for it; the resource's own by default."
    )
    aliases: list[ModelName] = Field([], description="Further names.", max_length=16)
    cache: CacheSpec = Field(CacheSpec(), description="Where a downloaded model is kept.")
    chat_template: ConfigMapFile | None = Field(
        None,
        description="A chat template in place of the model's own. Groups read it when they start: "
        "for another text name another ConfigMap.",
    )


class DeviceKind(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


class Network(StrEnum):
    AUTO = "auto"
    TCP = "tcp"
    ROCE = "roce"
    IB = "ib"


class Hardware(SpecModel):
    """What one worker group runs on."""

    nodes: int = Field(1, description="Nodes of a group.", ge=1, le=MAX_NODES)
    gpus_per_node: int = Field(1, description="GPUs of a node (ranks, on a CPU).", ge=1, le=16)
    device: DeviceKind = Field(DeviceKind.CUDA, description="cuda or cpu.")
    gpu_type: str | None = Field(
        None,
        description="Value of the node label nvidia.com/gpu.product.",
        pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        max_length=63,
        json_schema_extra={WORDS: "is no value of a label: letters, digits, - . _"},
    )
    network: Network = Field(
        Network.AUTO,
        description="tcp forbids RDMA, roce and ib ask for an RDMA device and IPC_LOCK.",
    )
    rdma_resource: str | None = Field(
        None,
        description="Name of the RDMA device resource; the chart's by default.",
        pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$",
        max_length=128,
        json_schema_extra={WORDS: "is no resource of nodes, such as rdma/ib"},
    )
    interface: str = Field(
        "eth0",
        description="Network interface of NCCL and Gloo.",
        pattern=r"^[A-Za-z0-9_.,=^-]+$",
        max_length=64,
        json_schema_extra={WORDS: "is no network interface, such as eth0"},
    )
    shared_memory: SizeOrZero | None = Field(
        None,
        description="Size of /dev/shm; 2Gi a GPU (1Gi on a CPU) by default, 0: no limit of its "
        "own.",
    )
    cpu: Quantity | None = Field(
        None, description="CPUs requested by each pod; on a CPU also the threads of its engine."
    )
    memory: Size | None = Field(
        None,
        description="Memory requested by each pod and its limit; /dev/shm and the pod's share of "
        "engine.hostCacheGib come on top. Absent: no limit, and the host cache alone is requested.",
    )


class Parallelism(SpecModel):
    """How the model is laid over the group's GPUs."""

    rules = [
        Rule(
            rule="(self.tp * self.dp) % self.ep == 0",
            message="ep must divide tp * dp",
            field_path=".ep",
        ),
    ]
    tp: int = Field(
        description="Tensor-parallel ranks, inside one node; divides gpusPerNode.", ge=1, le=16
    )
    pp: int = Field(1, description="Pipeline stages.", ge=1, le=64)
    dp: int = Field(1, description="Data-parallel replicas inside the group.", ge=1, le=64)
    ep: int = Field(
        1,
        description="Of a model with experts: groups of the tp ranks, each with experts of its "
        "own, whole; divides tp and the number of experts.",
        ge=1,
        le=1024,
    )


# Settings of the worker that are fields of `engine`, and the names of those that differ.
_ENGINE_SETTINGS = (
    "page_size", "max_model_len", "max_running", "dtype", "quantize", "kv_dtype", "kv_tokens",
    "memory_fraction", "schedule_policy", "eviction_policy", "sharing", "host_cache_gib",
    "host_write_policy",
)  # fmt: skip
_RENAMED = {"max_model_len": "context_length", "memory_fraction": "memory_percent"}
ENGINE_FIELDS = {name: f"engine.{to_camel(_RENAMED.get(name, name))}" for name in _ENGINE_SETTINGS}


class EngineBlock(SpecModel):
    """The worker's settings; what is absent is the worker's own default."""

    def worker_settings(self) -> dict[str, Any]:
        """What is set, by the names of the worker's YAML file."""
        given = self.model_dump(exclude_none=True)
        others: dict[str, Any] = given["settings"]
        settings: dict[str, Any] = {}
        for name in _ENGINE_SETTINGS:
            field = _RENAMED.get(name, name)
            if field in given:
                settings[name] = given[field]
        if "memory_fraction" in settings:
            settings["memory_fraction"] /= 100
        return settings | others


def _engine_field(name: str) -> tuple[Any, Any]:
    """Type and field of one setting: the worker's type, bounds and text, but absent by default."""
    setting = WorkerSettings.model_fields[name]
    kind: Any = setting.annotation
    for bound in setting.metadata:
        kind = Annotated[kind, bound]
    text = setting.description or ""
    match name:
        case "memory_fraction":  # whole numbers, because clients round fractions differently
            kind = Annotated[int, Field(ge=1, le=100)]
            text = f"In percent. {text}"
        case "host_cache_gib":
            text = f"{text} Each pod of a group requests an equal share of it."
    return kind | None, Field(None, description=text)


if TYPE_CHECKING:
    Engine = EngineBlock
else:
    Engine = create_model(
        "Engine",
        __base__=EngineBlock,
        __doc__=EngineBlock.__doc__,
        **{_RENAMED.get(name, name): _engine_field(name) for name in _ENGINE_SETTINGS},
        settings=(
            dict[str, Any],
            Field(
                {},
                description="Any other setting of the worker, in the snake_case of its YAML file. "
                "Checked against the worker's own schema; a mistake shows as the reason "
                "InvalidEngine.",
                max_length=64,
            ),
        ),
    )


class Startup(SpecModel):
    """How long a start may take."""

    timeout: Duration | None = Field(
        None,
        description="Load and warm-up, until ready; then the kubelet restarts the container. By "
        "default 30m and the time to read the model at 100 MB/s, where its size is known (hf://, "
        "s3://, gs://).",
    )


class RecoveryPolicy(StrEnum):
    RECREATE_GROUP = "RecreateGroup"
    NONE = "None"


class Recovery(SpecModel):
    """What happens when a group loses a pod."""

    policy: RecoveryPolicy = Field(
        RecoveryPolicy.RECREATE_GROUP, description="None keeps a failed group for diagnosis."
    )
    max_restarts: int = Field(
        10,
        description="Failures in a row of a group's programs that are tolerated; with one more it "
        "is left failed. Machines that are lost and pods that are evicted do not count.",
        ge=0,
        le=1000,
    )
    backoff: Duration = Field(
        "10s",
        description="Wait after the second failure in a row, doubled with each further one, at "
        "most 5 minutes. After the first there is none.",
    )
    stable_after: Duration = Field(
        "10m", description="A group ready this long has its failures forgotten."
    )
    node_grace: Duration = Field(
        "10s",
        description="How long a pod may sit on a node that Kubernetes has declared unreachable, or "
        "past its termination, before its group moves; longer while its worker renews its lease.",
    )


class Rollout(SpecModel):
    """How a new revision replaces the old one, in whole groups."""

    rules = [
        Rule(
            rule="self.maxUnavailable + self.maxSurge > 0",
            message="maxUnavailable and maxSurge cannot both be 0",
        ),
    ]
    max_unavailable: int = Field(
        1, description="Groups that may be missing meanwhile.", ge=0, le=MAX_GROUPS
    )
    max_surge: int = Field(
        0, description="Groups that may exist beyond `replicas`.", ge=0, le=MAX_GROUPS
    )


class RouterAuth(SpecModel):
    """Who may use the service's own router."""

    keys_secret: ObjectName = Field(
        description="Secret with one `principal: key` a line under its key `api-keys`."
    )


class RouterAutoscaling(SpecModel):
    """A HorizontalPodAutoscaler of the service's own router."""

    rules = [
        Rule(rule="self.min <= self.max", message="min must not exceed max", field_path=".min"),
    ]
    min: int = Field(2, description="Fewest pods.", ge=1, le=64)
    max: int = Field(description="Most pods.", ge=1, le=64)
    cpu_percent: int = Field(
        70,
        description="Of the CPU that its pods request, at which another one is wanted.",
        ge=1,
        le=1000,
    )


class Router(SpecModel):
    """The shared router of the installation, or one of the service's own."""

    rules = [
        Rule(
            rule="self.dedicated || !(has(self.auth) || has(self.policy) || has(self.replicas) "
            "|| has(self.autoscaling) || has(self.settings))",
            message="auth, policy, replicas, autoscaling and settings belong to a dedicated router",
        ),
        Rule(
            rule="!(has(self.replicas) && has(self.autoscaling))",
            message="replicas and autoscaling exclude each other: the autoscaler sets the number",
            field_path=".replicas",
        ),
    ]
    dedicated: bool = Field(False, description="Run a router for this service alone.")
    replicas: int | None = Field(None, description="Router pods; 2 by default.", ge=1, le=64)
    autoscaling: RouterAutoscaling | None = Field(
        None, description="Router pods by their CPU, instead of `replicas`."
    )
    policy: RoutingPolicy | None = Field(None, description="Placement policy.")
    auth: RouterAuth | None = Field(None, description="API keys.")
    settings: dict[str, Any] | None = Field(
        None,
        description="Any other setting of the router, in the snake_case of its YAML file. Checked "
        "against the router's own schema; a mistake shows as the reason InvalidRouter.",
        max_length=64,
    )


class Targets(SpecModel):
    """Load per ready group at which another one is wanted."""

    queue: int = Field(8, description="Waiting requests.", ge=1, le=100000)
    kv_percent: int = Field(85, description="Percent of KV pages in use.", ge=1, le=100)


class Autoscaling(SpecModel):
    """The built-in autoscaler. It moves `replicas` through the scale subresource."""

    rules = [
        Rule(rule="self.min <= self.max", message="min must not exceed max", field_path=".min"),
    ]
    min: int = Field(1, description="Fewest groups; 0 lets the service sleep.", ge=0, le=MAX_GROUPS)
    max: int = Field(description="Most groups.", ge=1, le=MAX_GROUPS)
    targets: Targets = Field(Targets(), description="Load per group.")
    cooldown: Duration = Field("5m", description="Calm before a group is given back.")


_Text = Annotated[str, StringConstraints(max_length=4096)]
_Labels = Annotated[dict[str, _Text], Field(max_length=64)]
_Object = Annotated[dict[str, Any], Field(max_length=64)]
_Objects = Annotated[list[_Object], Field(max_length=32)]


class PodFields(SpecModel):
    """What pods of one kind get on top of what the operator decides; as in a pod's spec."""

    node_selector: _Labels = Field({}, description="Labels that their node must have.")
    tolerations: _Objects = Field([], description="Taints that they bear, further ones.")
    affinity: dict[str, Any] = Field(
        {}, description="Terms of affinity, on top of the operator's own.", max_length=3
    )
    topology_spread_constraints: _Objects = Field(
        [],
        description="How they spread; without a labelSelector it is over the pods of their kind.",
    )
    env: _Objects = Field([], description="Environment of their main container.")
    volumes: _Objects = Field([], description="Further volumes.")
    volume_mounts: _Objects = Field([], description="Where the main container mounts them.")
    image_pull_secrets: list[ObjectName] = Field(
        [], description="Names of Secrets, further ones.", max_length=16
    )
    priority_class_name: ObjectName | None = Field(None, description="PriorityClass.")
    service_account_name: ObjectName | None = Field(
        None,
        description="ServiceAccount, which must exist; one without rights by default. For "
        "workload identity.",
    )
    annotations: _Labels = Field({}, description="Annotations of the pods.")
    labels: _Labels = Field({}, description="Labels of the pods; the operator's own stay.")


NO_FIELDS = PodFields()


class Pods(SpecModel):
    """Fields of a service's pods by kind; the chart's are under them."""

    workers: PodFields | None = Field(None, description="Of its groups; a change rolls them.")
    routers: PodFields | None = Field(None, description="Of a router of its own.")
    downloads: PodFields | None = Field(None, description="Of Jobs that fetch its model.")


class InferenceServiceSpec(SpecModel):
    """A served model: worker groups, their router entry, their recovery and rollout."""

    rules = [
        Rule(
            rule="!has(self.parallelism) || self.parallelism.tp * self.parallelism.pp * "
            "self.parallelism.dp == self.hardware.nodes * self.hardware.gpusPerNode",
            message="tp * pp * dp must equal nodes * gpusPerNode",
            field_path=".parallelism",
        ),
        Rule(
            rule="!has(self.parallelism) || self.hardware.gpusPerNode % self.parallelism.tp == 0",
            message="tp must divide gpusPerNode: its ranks stay in one node",
            field_path=".parallelism.tp",
        ),
    ]
    model: Model
    hardware: Hardware = Field(Hardware(), description="What one worker group runs on.")
    parallelism: Parallelism | None = Field(
        None, description="tp = gpusPerNode and pp = nodes when absent."
    )
    replicas: int = Field(
        1, description="Worker groups; its writer is the scale subresource.", ge=0, le=MAX_GROUPS
    )
    autoscaling: Autoscaling | None = Field(None, description="Built-in autoscaler; off if absent.")
    engine: Engine = Field(
        Engine(), description="Settings of the worker; what is absent is the worker's own default."
    )
    startup: Startup = Field(Startup(), description="How long a start may take.")
    recovery: Recovery = Field(Recovery(), description="What a lost pod means.")
    rollout: Rollout = Field(Rollout(), description="How a new revision comes in.")
    router: Router = Field(Router(), description="Shared or dedicated router.")
    pods: Pods = Field(Pods(), description="Fields of its pods, by kind.")
    suspend: bool = Field(False, description="Keep the resource, run no group.")
    image: str | None = Field(
        None,
        description="Worker image; the chart's by default.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:@-]*$",
        max_length=512,
        json_schema_extra={
            WORDS: "is no image, such as registry.example.com/radixgrove/worker:1.0"
        },
    )
    topology_key: str | None = Field(
        None,
        description="Node label within one value of which a group's pods must lie (a rack).",
        pattern=r"^([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        max_length=317,
        json_schema_extra={WORDS: "is no key of a label, such as topology.kubernetes.io/zone"},
    )
    scheduler_name: ObjectName | None = Field(None, description="Scheduler of the worker pods.")
    pod_overrides: dict[str, Any] = Field(
        {},
        description="Pod template merged strategically over the rendered one, for what `pods` does "
        "not have: {metadata: {...}, spec: {...}}. The worker's container is named `worker`.",
        max_length=2,
    )

    @property
    def layout(self) -> Parallelism:
        """The parallelism in force."""
        if self.parallelism is not None:
            return self.parallelism
        return Parallelism(tp=self.hardware.gpus_per_node, pp=self.hardware.nodes)

    def model_names(self, resource_name: str) -> list[str]:
        """The id first, aliases after it, without repeats."""
        return list(dict.fromkeys([self.model.name or resource_name, *self.model.aliases]))

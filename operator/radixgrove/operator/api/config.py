"""Settings of the operator itself: one YAML file, which the chart renders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from radixgrove.operator.api.spec import AccessMode, PodFields


class ConfigModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Images(ConfigModel):
    worker: str
    router: str
    operator: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: list[str] = []


class PodDefaults(ConfigModel):
    """What the chart puts on every pod."""

    tolerations: list[dict[str, Any]] = []
    node_selector: dict[str, str] = {}
    priority_class: str | None = None
    runtime_class: str | None = None  # of pods with GPUs
    env: dict[str, str] = {}  # proxies
    ca_bundle: str | None = None  # ConfigMap with ca.crt, in every served namespace
    workers: PodFields = PodFields()
    routers: PodFields = PodFields()
    downloads: PodFields = PodFields()


class ModelCacheDefaults(ConfigModel):
    size: str = "200Gi"
    storage_class: str | None = None
    access_mode: AccessMode = AccessMode.READ_WRITE_MANY
    hub_endpoint: str = "https://huggingface.co"
    retry_after: float = Field(60.0, gt=0)  # seconds from a download's failure to the next try


class SharedRouter(ConfigModel):
    """The chart's own router; `url` is what clients of the cluster use."""

    url: str
    labels: dict[str, str]


class NetworkPolicies(ConfigModel):
    enabled: bool = True
    scrape_from: list[dict[str, Any]] = []  # NetworkPolicy peers


class RedisSettings(ConfigModel):
    """`{password}` in the URL stands for the installation's own. Empty: the keys' Secret has it."""

    url: str
    prefix: str = Field("radixgrove", pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    users: bool = True  # a user for each namespace; False: all come as the URL says
    own: bool = False  # the chart's, which takes its users from the keys' Secret
    # Of its pods, in the operator's namespace; with them it keeps namespaces without services out.
    labels: dict[str, str] = {}


class Election(ConfigModel):
    lease: str = "radixgrove-operator"
    duration: float = Field(15.0, gt=2)
    renew_every: float = Field(3.0, gt=0)


class OperatorConfig(ConfigModel):
    """The operator's settings."""

    namespace: str
    namespaces: list[str] = []  # empty: the whole cluster
    images: Images
    redis: RedisSettings
    router: SharedRouter
    pods: PodDefaults = PodDefaults()
    model_cache: ModelCacheDefaults = ModelCacheDefaults()
    network_policies: NetworkPolicies = NetworkPolicies()
    election: Election = Election()
    keys_secret: str = "radixgrove-keys"
    names_config_map: str = "radixgrove-names"
    redis_policy: str = "radixgrove-redis-namespaces"  # the NetworkPolicy
    owner_deployment: str | None = None  # owns what goes with an uninstall
    gpu_resource: str = "nvidia.com/gpu"
    rdma_resource: str = "rdma/ib"
    cluster_domain: str = "cluster.local"
    reconcilers: int = Field(4, ge=1, le=64)
    request_timeout: float = Field(10.0, gt=0, le=120)
    resync: float = Field(900.0, gt=0)  # seconds between looks at a service at rest
    autoscale_every: float = Field(5.0, gt=0)
    drain_notice: float = Field(3.0, ge=0)  # routers forget a group before its pods end
    # Seconds that a model name is kept for the namespace that gave it up.
    name_hold: float = Field(86_400.0, ge=0)
    gang_timeout: float = Field(60.0, gt=0)  # seconds that a partly placed group holds up others
    pod_ips: list[str] = []  # of the operator's own pod: the families of the cluster, primary first
    health_port: int = Field(8080, ge=0, le=65535)
    log_json: bool = True

    @property
    def installation(self) -> str:
        """Its name among others of the cluster: where its Lease is."""
        return f"{self.namespace}/{self.election.lease}"

    @property
    def listen_host(self) -> str:
        """Where workers serve: on every address, as far as nodes have IPv6."""
        return "::" if any(":" in address for address in self.pod_ips) else "0.0.0.0"

    @property
    def management_host(self) -> str:
        """Where workers' management ports listen, which are of one family: the operator asks there
        by `status.podIP`."""
        return "::" if self._ipv6_first else "0.0.0.0"

    @property
    def pod_host(self) -> str:
        """A pod's own address in its URL, as the kubelet expands it."""
        return "[$(POD_IP)]" if self._ipv6_first else "$(POD_IP)"

    @property
    def _ipv6_first(self) -> bool:
        return ":" in next(iter(self.pod_ips), "")

    @property
    def key_names(self) -> dict[str, str]:
        """Keys of the secret, by the setting they feed."""
        return {
            "internal_key": "internal-key",
            "cluster_secret": "cluster-secret",
            "management_key": "management-key",
            "redis_url": "redis-url",
        }


def load(path: Path) -> OperatorConfig:
    """Raises ValueError naming the field that is wrong, OSError when the file cannot be read."""
    return OperatorConfig.model_validate(yaml.safe_load(path.read_text()))

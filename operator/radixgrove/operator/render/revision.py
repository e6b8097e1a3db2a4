"""A revision: the part of the spec that a running engine depends on, frozen.

Its hash alone decides whether groups are replaced. Fields at their default do not enter the hash,
so that neither a new field nor a defaulted one in a later operator rolls anything; what the chart
contributes (the default image) is frozen beside the hash, so that upgrading the chart rolls nothing
either.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any, ClassVar

import yaml
from pydantic import ValidationError

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.spec import (
    NO_FIELDS,
    ConfigMapFile,
    DeviceKind,
    Engine,
    Hardware,
    InferenceServiceSpec,
    Parallelism,
    PodFields,
    SpecModel,
    Startup,
)
from radixgrove.operator.api.values import seconds
from radixgrove.protocol.errors import InvalidInput
from radixgrove.protocol.settings import WorkerSettings

MODEL_DIRECTORY = "/model"
CHAT_TEMPLATE_DIRECTORY = "/chat-template"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
DRAIN_TIMEOUT = 120.0
_STARTUP = 1800.0  # seconds for all that does not grow with the model
_SLOW_READ = 100e6  # bytes/s of storage that many nodes read at once


class InvalidSettings(InvalidInput, ValueError):
    """A resource asks for what its parts would refuse; the message names the field."""

    reason: ClassVar[str]  # of conditions


def first_mistake(error: ValidationError, fields: Iterable[str] = ()) -> str:
    """Its field, what is wrong with it, and its value. `fields`: those that there are."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        given = first["input"]
        value = f" (it is {given!r})" if isinstance(given, str | int | float) else ""
        return f"{field}: {first['msg']}{value}"
    near = difflib.get_close_matches(field, fields, n=1)
    return f"{field}: there is no such field" + (f"; is {near[0]} meant?" if near else "")


class InvalidEngine(InvalidSettings):
    """`engine` does not make worker settings."""

    reason = "InvalidEngine"


class InvalidOverrides(InvalidEngine):
    """`podOverrides` cannot be laid over a pod template."""

    reason = "InvalidPodOverrides"


class UnsupportedShape(InvalidEngine):
    """The worker of this version does not run groups of that shape."""

    reason = "UnsupportedShape"


class ModelAt(SpecModel):
    """Where the model's files are, once they are there."""

    source: str
    revision: str = ""
    claim: str = ""
    sub_path: str = ""
    host_path: str = ""
    image: str = ""  # mounted as a volume

    @property
    def directory(self) -> str:
        """Where the worker finds it."""
        return f"{MODEL_DIRECTORY}/{self.sub_path}".rstrip("/")


class Revision(SpecModel):
    """All that a group attempt is rendered from."""

    names: list[str]
    model: ModelAt
    hardware: Hardware = Hardware()
    parallelism: Parallelism
    engine: Engine = Engine()
    startup: Startup = Startup()
    chat_template: ConfigMapFile | None = None
    image: str = ""  # the resource's own
    topology_key: str | None = None
    scheduler_name: str | None = None
    pods: PodFields = NO_FIELDS
    pod_overrides: dict[str, Any] = {}
    restart: str = ""
    keys: str = ""  # hash of what pods read of the installation when they start
    # As it was when the revision was made; not part of the hash.
    frozen_image: str = ""  # the chart's
    frozen_bytes: int = 0  # of the model; 0: unknown

    @property
    def hash(self) -> str:
        frozen = {"frozen_image", "frozen_bytes"}
        content = self.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=frozen)
        return names.digest(content)

    @property
    def startup_seconds(self) -> float:
        """How long a container may take until it is ready."""
        if self.startup.timeout is not None:
            return max(seconds(self.startup.timeout), 1.0)
        return _STARTUP + self.frozen_bytes / _SLOW_READ

    @property
    def worker_image(self) -> str:
        return self.image or self.frozen_image


def revision_of(
    spec: InferenceServiceSpec,
    resource_name: str,
    model: ModelAt,
    restart: str,
    config: OperatorConfig,
    keys: str = "",
    model_bytes: int = 0,
) -> Revision:
    return Revision(
        names=spec.model_names(resource_name),
        model=model,
        hardware=spec.hardware,
        parallelism=spec.layout,
        engine=spec.engine,
        startup=spec.startup,
        chat_template=spec.model.chat_template,
        image=spec.image or "",
        topology_key=spec.topology_key,
        scheduler_name=spec.scheduler_name,
        pods=spec.pods.workers or NO_FIELDS,
        pod_overrides=spec.pod_overrides,
        restart=restart,
        keys=keys,
        frozen_image=config.images.worker,
        frozen_bytes=model_bytes,
    )


_BY_OPERATOR = {
    "host", "port", "management_host", "management_port", "management_key", "internal_key",
    "cluster_secret", "redis_url", "redis_prefix", "model", "served_model_name", "service",
    "replica_id", "advertise_url", "device", "tp", "pp", "dp", "ep", "nodes", "node_rank", "master",
    "weight_version", "api_keys_file",
}  # fmt: skip


def worker_settings(revision: Revision, service: str, config: OperatorConfig) -> dict[str, Any]:
    """The worker's YAML file: engine settings and what the operator decides, without secrets.

    Raises InvalidEngine when the worker's own schema refuses a setting.
    """
    asked = revision.engine.worker_settings()
    for name in asked:
        if name in _BY_OPERATOR:
            raise InvalidEngine(f"engine.settings.{name} is set by the operator")
    settings: dict[str, Any] = {"drain_timeout": DRAIN_TIMEOUT, "log_json": True} | asked
    settings |= {
        "host": config.listen_host,
        "port": names.API_PORT,
        "management_host": config.management_host,
        "management_port": names.MANAGEMENT_PORT,
        "redis_prefix": config.redis.prefix,
        "model": revision.model.directory,
        "served_model_name": revision.names,
        "service": service,
        "device": revision.hardware.device.value,
        "tp": revision.parallelism.tp,
        # Replicas of one version must agree, and a revision may change what they agree on.
        "weight_version": revision.hash,
    }
    if revision.chat_template is not None:
        if "chat_template" in asked:
            raise InvalidEngine(
                "engine.settings.chat_template: model.chatTemplate names another one"
            )
        settings["chat_template"] = f"{CHAT_TEMPLATE_DIRECTORY}/{CHAT_TEMPLATE_FILE}"
    # Said only where it is more than the default: images of the release before do not know them.
    parallelism = revision.parallelism
    layout = {"pp": parallelism.pp, "dp": parallelism.dp, "ep": parallelism.ep}
    settings |= {name: ranks for name, ranks in layout.items() if ranks > 1}
    try:
        checked = WorkerSettings.model_validate(settings)
    except ValidationError as error:
        mistake = first_mistake(error, WorkerSettings.model_fields)
        raise InvalidEngine(f"engine: {mistake}") from error
    return checked.model_dump(mode="json", include=set(settings))


def config_map_data(revision: Revision, service: str, config: OperatorConfig) -> dict[str, str]:
    """What the revision's immutable ConfigMap holds: the worker's file, and the revision itself."""
    frozen = revision.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {
        "worker.yaml": yaml.safe_dump(worker_settings(revision, service, config), sort_keys=True),
        "revision.json": json.dumps(frozen, sort_keys=True),
    }


def thaw(data: dict[str, str]) -> Revision:
    """The revision out of its ConfigMap. Raises ValueError when there is none inside."""
    if "revision.json" not in data:
        raise ValueError("the ConfigMap holds no revision")
    return Revision.model_validate_json(data["revision.json"])


def shared_memory(hardware: Hardware) -> str:
    """Size of /dev/shm: NCCL and the ranks of one node talk through it."""
    if hardware.shared_memory is not None:
        return hardware.shared_memory
    return "1Gi" if hardware.device is DeviceKind.CPU else f"{2 * hardware.gpus_per_node}Gi"


def host_cache(revision: Revision) -> float:
    """Bytes of host memory that each pod's ranks keep for cached pages."""
    size = revision.engine.worker_settings().get("host_cache_gib", 0)
    return float(size) * 2**30 / revision.hardware.nodes

"""Settings of `radixgrove up`, beside those of the parts it starts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

# `up` gives every worker an address of its own on loopback.
WORKER_ADDRESS = frozenset(
    {"host", "management_host", "port", "management_port", "replica_id", "advertise_url"}
)
# Worker and router have both, with different meanings: under `up` only a file's sections set them.
AMBIGUOUS = frozenset({"max_queued", "queue_timeout"})


class UpSettings(BaseModel):
    """The local cluster as a whole."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    replicas: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Workers to start.",
        json_schema_extra={"everyday": True},
    )
    start_timeout: float = Field(
        default=1800.0,
        gt=0,
        le=86400,
        description="Seconds until the first start must be complete, conversion included.",
        json_schema_extra={"everyday": False},
    )

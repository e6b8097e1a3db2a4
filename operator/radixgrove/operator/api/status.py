"""The status of an `InferenceService`: what the operator saw, and what it must not forget.

Attempt numbers also live in the labels of StatefulSets and pods; a status wiped by hand costs the
memory of failures.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from radixgrove.operator.api.spec import MAX_GROUPS, MAX_NODES, Parallelism

MAX_DETAIL = 1024  # characters; the API server refuses a status with a longer detail


class StatusModel(BaseModel):
    # Unknown fields are those of another version of the operator: ignored, not fatal.
    model_config = ConfigDict(
        extra="ignore", frozen=True, alias_generator=to_camel, populate_by_name=True
    )


class GroupPhase(StrEnum):
    WAITING = "Waiting"  # no pods yet: the model, capacity or a back-off
    PENDING = "Pending"  # pods are not all placed
    STARTING = "Starting"  # pods placed, not ready
    READY = "Ready"
    DRAINING = "Draining"
    FAILED = "Failed"  # out of budget, or recovery is off


class PodRecord(StatusModel):
    name: str = Field(description="Name of the pod.", max_length=253)
    uid: str = Field(description="Its UID: another one means another pod.", max_length=64)
    restarts: int = Field(0, description="Restarts of its worker that are accounted for.")


class MemberStatus(StatusModel):
    """One data-parallel member of a group."""

    name: str = Field(description="Its name as a replica of routers.", max_length=253)
    state: str = Field(description="Ready, NotReady or Draining, by its lease.", max_length=16)


class GroupStatus(StatusModel):
    """One worker group; the record survives its attempts."""

    index: int = Field(description="Number of the group.", ge=0, le=2 * MAX_GROUPS)
    attempt: int = Field(0, description="Number of its attempt.", ge=0)
    revision: str = Field("", description="Revision that it runs.", max_length=63)
    phase: GroupPhase = Field(GroupPhase.WAITING, description="How far it is.")
    detail: str = Field(
        "", description="What keeps it, or its last failure.", max_length=MAX_DETAIL
    )
    restarts: int = Field(0, description="Recoveries since the group was made.", ge=0)
    failures: int = Field(0, description="Failures in a row.", ge=0)
    program_failures: int = Field(
        0, description="Those of them in which a program of it ended by itself.", ge=0
    )
    last_failure: str = Field(
        "", description="The last of them: why its attempt ended.", max_length=MAX_DETAIL
    )
    start_failed: bool = Field(
        False, description="A program of it ended before it was ready, and it has not been since."
    )
    yields: int = Field(0, description="Times the group gave up its pods for another.", ge=0)
    retry_at: str | None = Field(None, description="No attempt before then.", max_length=32)
    ready_since: str | None = Field(None, description="Ready since then.", max_length=32)
    partly_since: str | None = Field(
        None, description="Some of its pods, not all, are placed since then.", max_length=32
    )
    hindered_since: str | None = Field(
        None,
        description="The cluster cannot start a pod of it, and tries again, since then.",
        max_length=32,
    )
    all_ran: bool = Field(False, description="Every rank of this attempt has run once.")
    was_ready: bool = Field(False, description="This attempt has been ready once.")
    pods: list[PodRecord] = Field(
        [], description="Its pods, as they were last seen.", max_length=MAX_NODES
    )
    members: list[MemberStatus] = Field(
        [], description="Those of several (dp) that hold leases.", max_length=64
    )
    avoid: list[Annotated[str, StringConstraints(max_length=253)]] = Field(
        [],
        description="Nodes that its last failure speaks against.",
        max_length=MAX_NODES,
    )


class ModelStatus(StatusModel):
    # A scoped name has a namespace and a slash in front.
    name: str = Field("", description="Name that clients ask for.", max_length=192)
    aliases: list[Annotated[str, StringConstraints(max_length=192)]] = Field(
        [], description="Its further names.", max_length=16
    )
    source: str = Field("", description="Where it comes from.", max_length=512)
    requested_revision: str = Field(
        "", description="Revision as the spec names it.", max_length=128
    )
    revision: str = Field("", description="Resolved revision.", max_length=128)
    claim: str = Field("", description="Claim that holds it.", max_length=253)
    failures: int = Field(0, description="Times in a row that fetching it has failed.", ge=0)


class AutoscalingStatus(StatusModel):
    desired: int | None = Field(None, description="Groups that the load asks for.")
    low_since: str | None = Field(
        None, description="Fewer groups would do since then.", max_length=32
    )
    message: str = Field("", description="Why so many.", max_length=1024)


class Condition(StatusModel):
    type: str = Field(
        description="Ready, Progressing, ModelCached, Degraded or Isolated.", max_length=64
    )
    status: str = Field(description="True or False.", max_length=16)
    reason: str = Field(description="Why, in a word for programs.", max_length=128)
    message: str = Field("", description="Why, for people.", max_length=4096)
    last_transition_time: str = Field(description="When the status last changed.", max_length=32)
    observed_generation: int = Field(0, description="Generation of the spec it is about.")


class InferenceServiceStatus(StatusModel):
    """What the operator saw at `observedGeneration`."""

    observed_generation: int = Field(0, description="Generation of the spec it is about.")
    operator: str = Field(
        "", description="Installation that looks after it: namespace/lease.", max_length=320
    )
    url: str = Field("", description="Endpoint for clients in the cluster.", max_length=512)
    summary: str = Field("", description="Ready and desired groups.", max_length=32)
    selector: str = Field("", description="Pods of rank 0.", max_length=512)
    replicas: int = Field(0, description="Groups that exist.")
    desired_replicas: int = Field(0, description="Groups that are wanted.")
    ready_replicas: int = Field(0, description="Groups that are ready, and that routers know.")
    updated_replicas: int = Field(0, description="Ready groups of the present revision.")
    served: bool = Field(False, description="A group has been ready since groups are wanted.")
    revision: str = Field("", description="Revision being rolled out.", max_length=63)
    good_revision: str = Field(
        "", description="Revision of which a group was last ready.", max_length=63
    )
    rolled_back: str = Field(
        "",
        description="Revision that did not start, for which goodRevision has come back.",
        max_length=63,
    )
    rolled_back_because: str = Field("", description="Why it did not start.", max_length=MAX_DETAIL)
    parallelism: Parallelism | None = Field(None, description="The parallelism in force.")
    model: ModelStatus = Field(ModelStatus(), description="The model, as it was resolved.")
    groups: list[GroupStatus] = Field(
        [], description="Worker groups, those on their way out included.", max_length=2 * MAX_GROUPS
    )
    last_attempt: int = Field(
        0, description="Highest attempt of any group; written before the attempt is made.", ge=0
    )
    autoscaling: AutoscalingStatus | None = Field(
        None, description="What the built-in autoscaler last decided."
    )
    conditions: list[Condition] = Field([], description="How it stands, and why.", max_length=16)

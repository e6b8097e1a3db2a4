"""What the operator saw: API objects reduced to what its decisions look at."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from radixgrove.operator.api import names, times
from radixgrove.operator.api.objects import (
    Container,
    ContainerStatus,
    DeploymentObject,
    JobObject,
    Meta,
    NodeObject,
    PodObject,
    Probe,
    StatefulSetObject,
    Terminated,
)
from radixgrove.operator.planning.demand import Node, NodeDemand, demand_of, device_counts


@dataclass(frozen=True)
class Pod:
    name: str
    uid: str
    rank: int
    node: str = ""  # "" while it is not placed
    phase: str = "Pending"
    ready: bool = False
    running: bool = False  # its worker container runs, or has run before
    restarts: int = 0
    deleted_at: float | None = None  # when its grace ends, once it is being deleted
    unschedulable: str = ""  # the scheduler's message
    unplaced_since: float | None = None  # its scheduler finds no node since then
    waiting: tuple[str, str] = ("", "")  # reason and message of a container that does not start
    started_at: float | None = None  # its worker container, as long as its start lasts
    verdict: str = ""  # the kubelet's, of a pod that it evicted or refused as a whole
    exited: str = ""  # message of the container's previous run
    exit_code: int = 0  # of that run
    never_began: bool = False  # the runtime did not start it: it has no program, say
    out_of_memory: bool = False  # it ended with a process killed for want of memory
    cut_off: bool = False  # it ended with its machine: the kubelet found it gone, and no exit code
    not_mounted: str = ""  # why its containers have no volumes yet
    ran: float = 0.0  # seconds that run took
    address: str = ""

    @property
    def creating(self) -> bool:
        """It has a node, and none of its containers has begun."""
        return (
            bool(self.node) and self.phase == "Pending" and not (self.running or any(self.waiting))
        )


@dataclass(frozen=True)
class Group:
    """One attempt of one group: a StatefulSet and its pods."""

    name: str
    uid: str
    index: int
    attempt: int
    revision: str
    nodes: int
    created: float
    draining_since: float | None = None
    draining_because: str = ""
    deleting: bool = False
    refused: str = ""  # why the API server admits none of its pods
    startup: float = 0.0  # seconds a container may take until it is ready
    demand: NodeDemand = field(default_factory=NodeDemand)
    pods: tuple[Pod, ...] = ()

    @property
    def placed(self) -> int:
        return sum(1 for pod in self.pods if pod.node)

    @property
    def all_run(self) -> bool:
        """The container of every rank runs, or has run before."""
        return len(self.pods) == self.nodes and all(pod.running for pod in self.pods)

    @property
    def partly_placed(self) -> bool:
        return 0 < self.placed < self.nodes

    @property
    def ready(self) -> bool:
        """Every rank of it is ready and none is leaving."""
        return len(self.pods) == self.nodes > 0 and all(
            pod.ready and pod.deleted_at is None for pod in self.pods
        )

    @property
    def draining(self) -> bool:
        return self.deleting or self.draining_since is not None


@dataclass(frozen=True)
class JobState:
    name: str
    uid: str
    succeeded: bool = False
    failed: bool = False
    finished_at: float | None = None
    message: str = ""  # termination message of its pod
    intended: str = ""  # hash of what the model it fetches must be fit for
    pod: Pod | None = None  # its newest
    refused: str = ""  # why the API server admits none


@dataclass(frozen=True)
class ObservedState:
    """Everything one reconciliation looks at."""

    groups: tuple[Group, ...] = ()
    nodes: Mapping[str, Node] = field(default_factory=dict)
    highest_attempt: int = 0  # in the labels of anything that exists


def group_of(
    stateful_set: StatefulSetObject, pods: Iterable[PodObject], refused: str = ""
) -> Group | None:
    """None for a StatefulSet without our labels."""
    meta, spec = stateful_set["metadata"], stateful_set["spec"]
    template = spec.get("template", {}).get("spec", {})
    labels = meta.get("labels", {})
    try:
        index, attempt = int(labels[names.GROUP_INDEX]), int(labels[names.ATTEMPT])
    except (KeyError, ValueError):
        return None
    own = [pod_of(pod) for pod in pods if _controller_uid(pod["metadata"]) == meta["uid"]]
    nodes = spec.get("replicas", 1)
    annotations = meta.get("annotations", {})
    return Group(
        name=meta["name"],
        uid=meta["uid"],
        index=index,
        attempt=attempt,
        revision=labels.get(names.REVISION, ""),
        nodes=nodes,
        created=times.from_text(meta.get("creationTimestamp")) or 0.0,
        draining_since=times.from_text(annotations.get(names.DRAINING)),
        draining_because=annotations.get(names.DRAIN_REASON, ""),
        deleting="deletionTimestamp" in meta,
        refused="" if len(own) == nodes else refused,
        startup=_startup(template.get("containers", [])),
        demand=demand_of(template),
        pods=tuple(sorted(own, key=lambda pod: pod.rank)),
    )


def _startup(containers: Iterable[Container]) -> float:
    """As the kubelet counts it."""
    probes = [c.get("startupProbe", Probe()) for c in containers if c["name"] == "worker"]
    probe = next(iter(probes), Probe())
    return float(probe.get("periodSeconds", 0) * probe.get("failureThreshold", 0))


def pod_of(pod: PodObject) -> Pod:
    meta, status = pod["metadata"], pod.get("status", {})
    conditions = {c["type"]: c for c in status.get("conditions", [])}
    containers = status.get("containerStatuses", [])
    worker = next((c for c in containers if c["name"] == "worker"), None)
    worker = worker or next(iter(containers), ContainerStatus(name="worker"))
    state, last = worker.get("state", {}), worker.get("lastState", {})
    scheduled, ready = conditions.get("PodScheduled"), conditions.get("Ready")
    ended = last.get("terminated") or state.get("terminated") or Terminated()
    restarts = worker.get("restartCount", 0)
    never_began = ended.get("reason") in ("StartError", "ContainerCannotRun")
    unplaced = scheduled if scheduled and scheduled["status"] == "False" else None
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        rank=_rank(meta),
        node=pod.get("spec", {}).get("nodeName", ""),
        phase=status.get("phase", "Pending"),
        ready=ready is not None and ready["status"] == "True",
        running="running" in state or (restarts > 0 and not never_began),
        restarts=restarts,
        deleted_at=times.from_text(meta.get("deletionTimestamp")),
        unschedulable=unplaced.get("message", "") if unplaced else "",
        unplaced_since=times.from_text(unplaced.get("lastTransitionTime")) if unplaced else None,
        waiting=_waiting([*status.get("initContainerStatuses", []), *containers]),
        started_at=_start_of(worker),
        verdict=status.get("message", "") or status.get("reason", ""),
        exited=_readable(ended.get("message", "")) or ended.get("reason", ""),
        exit_code=ended.get("exitCode", 0),
        never_began=never_began,
        out_of_memory=ended.get("reason") == "OOMKilled",
        cut_off=ended.get("reason") in ("Unknown", "ContainerStatusUnknown"),
        ran=_length(ended),
        address=status.get("podIP", ""),
    )


def _readable(log: str) -> str:
    """The end of a log; of lines in JSON, as parts write them in a cluster, only what they say, and
    nothing of those behind the last error: how a process ends is not why."""
    lines: list[str] = []
    since_error: list[str] | None = None
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not (isinstance(entry, dict) and "message" in entry):
            lines, since_error = [*lines, *(since_error or []), line], None
            continue
        raised = str(entry.get("exception", "")).strip().rpartition("\n")[2]
        said = ": ".join(part for part in (str(entry["message"]), raised) if part)
        if entry.get("level") in ("error", "critical"):
            lines, since_error = [*lines, *(since_error or []), said], []
        elif since_error is None:
            lines.append(said)
        else:
            since_error.append(said)
    return "\n".join(lines)


def _last_words(run: Terminated) -> str:
    reason = run.get("reason", "")
    return run.get("message", "") or ("" if reason in ("Completed", "Error") else reason)


def _waiting(containers: Iterable[ContainerStatus]) -> tuple[str, str]:
    for container in containers:
        waiting = container.get("state", {}).get("waiting")
        reason = waiting.get("reason") if waiting else None
        if waiting and reason not in ("ContainerCreating", "PodInitializing", None):
            return reason, waiting.get("message", "")
    return "", ""


def _start_of(worker: ContainerStatus) -> float | None:
    """None also once the startup probe has passed."""
    if worker.get("started"):
        return None
    return times.from_text(worker.get("state", {}).get("running", {}).get("startedAt"))


def _length(run: Terminated) -> float:
    begin, end = times.from_text(run.get("startedAt")), times.from_text(run.get("finishedAt"))
    return end - begin if begin is not None and end is not None else 0.0


def _rank(meta: Meta) -> int:
    label = meta.get("labels", {}).get(names.POD_INDEX, "")
    text = label or meta["name"].rpartition("-")[2]
    return int(text) if text.isdigit() else 0


def _controller_uid(meta: Meta) -> str:
    for owner in meta.get("ownerReferences", []):
        if owner.get("controller"):
            return owner["uid"]
    return ""


def node_of(node: NodeObject) -> Node:
    """A node is reachable unless its lifecycle controller says `Unknown`."""
    meta, status = node["metadata"], node.get("status", {})
    ready = next((c for c in status.get("conditions", []) if c["type"] == "Ready"), None)
    return Node(
        name=meta["name"],
        reachable=ready is None or ready["status"] != "Unknown",
        since=times.from_text(ready.get("lastTransitionTime")) or 0.0 if ready else 0.0,
        labels=meta.get("labels", {}),
        taints=node.get("spec", {}).get("taints", []),
        devices=device_counts(status.get("allocatable", {})),
    )


def is_available(deployment: DeploymentObject) -> bool:
    """Whether one pod of it is ready at least."""
    return deployment.get("status", {}).get("availableReplicas", 0) > 0


def job_of(job: JobObject, pods: Iterable[PodObject]) -> JobState:
    meta = job["metadata"]
    conditions = {
        c["type"]: c for c in job.get("status", {}).get("conditions", []) if c["status"] == "True"
    }
    done = conditions.get("Complete") or conditions.get("Failed")
    message = ""
    newest: Pod | None = None
    for pod in sorted(pods, key=lambda p: str(p["metadata"].get("creationTimestamp", ""))):
        if _controller_uid(pod["metadata"]) != meta["uid"]:
            continue
        newest = pod_of(pod)
        for container in pod.get("status", {}).get("containerStatuses", []):
            ended = container.get("state", {}).get("terminated")
            message = _last_words(ended) if ended else message
    return JobState(
        name=meta["name"],
        uid=meta["uid"],
        succeeded="Complete" in conditions,
        failed="Failed" in conditions,
        finished_at=times.from_text(done.get("lastTransitionTime")) if done else None,
        message=message,
        intended=meta.get("annotations", {}).get(names.INTENDED, ""),
        pod=newest,
    )


def highest_attempt(objects: Iterable[StatefulSetObject | PodObject]) -> int:
    """The highest attempt in the labels of sets and pods, leaving ones included."""
    labels = [thing["metadata"].get("labels", {}).get(names.ATTEMPT, "") for thing in objects]
    return max((int(label) for label in labels if label.isdigit()), default=0)

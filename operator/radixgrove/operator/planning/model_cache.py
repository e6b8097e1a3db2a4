"""Where a model's files are: provided by the user, or fetched once into a claim. Pure.

The revision that a source stands for is looked up once, by a Job, and kept in status: groups of one
service stay the same when a branch moves later. What a bucket holds is looked up again if that has
changed before it was fetched. The claim is named by source and revision, so that services share it,
and is filled by one Job, which resumes and checks hashes. What a new shared claim looks like is
decided by its oldest user; an existing one is not changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from radixgrove.operator.api import names, times
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import ClaimObject, Object
from radixgrove.operator.api.spec import (
    FETCHED,
    NO_FIELDS,
    AccessMode,
    InferenceServiceSpec,
    Model,
    PodFields,
)
from radixgrove.operator.api.status import ModelStatus
from radixgrove.operator.fetch.download import SNAPSHOT, UNFIT
from radixgrove.operator.fetch.sources import CHANGED
from radixgrove.operator.planning import remedies
from radixgrove.operator.planning.diagnosis import pod_problem, refusal
from radixgrove.operator.planning.observed import JobState
from radixgrove.operator.render import models
from radixgrove.operator.render.common import Service
from radixgrove.operator.render.revision import InvalidSettings, ModelAt
from radixgrove.protocol.model.fit import Intended

_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_LONGEST_WAIT = 3600.0  # seconds between two downloads that fail
_LOOK_AGAIN = 30.0  # seconds; a change of a user's own claim is not watched
_LOOK_SOON = 3.0  # seconds; a Job has a pod by then, or an Event says why not
# Annotations of a filled claim.
COMPLETE = f"{names.GROUP}/complete"
BYTES = f"{names.GROUP}/bytes"


@dataclass(frozen=True)
class Cache:
    """What the cluster holds of a model: Jobs and claims by name."""

    jobs: Mapping[str, JobState]
    claims: Mapping[str, ClaimObject]
    users: Sequence[models.User]  # services of the namespace, this one included; the oldest first
    intended: Intended | None = None  # what the model must be fit for; None: not known
    fields: PodFields = NO_FIELDS  # of the Jobs' pods

    def users_of(self, claim: str, service: Service) -> list[models.User]:
        """Those that use the claim already, and `service`, which is about to."""
        return [u for u in self.users if u.claim == claim or u.service.uid == service.uid]


@dataclass
class CacheStep:
    """What to do about the model now, and how it stands (`reason`, `message`)."""

    status: ModelStatus
    at: ModelAt | None = None  # set once groups can be made
    ready: bool = False
    present: bool = True  # False: groups may be made, though nothing can be there yet
    reason: str = ""
    message: str = ""
    apply: list[Object] = field(default_factory=list)
    delete_jobs: list[JobState] = field(default_factory=list)
    requeue_at: float | None = None
    size: int = 0  # bytes of a model that was fetched; 0: unknown


def wanted_jobs(service: Service, spec: InferenceServiceSpec, known: ModelStatus) -> list[str]:
    """Names of the Jobs that `decide` looks at."""
    if not spec.model.source.startswith(FETCHED):
        return []
    return [models.resolve_job_name(service, spec.model), *wanted_claims(spec, known)]


def wanted_claims(spec: InferenceServiceSpec, known: ModelStatus) -> list[str]:
    """Names of the claims that `decide` looks at."""
    scheme, _, rest = spec.model.source.partition("://")
    if scheme == "pvc":
        return [rest.partition("/")[0]]
    revision = _resolved(spec.model, known) if spec.model.source.startswith(FETCHED) else ""
    return [names.cache_name(spec.model.source, revision)] if revision else []


def _resolved(model: Model, known: ModelStatus) -> str:
    if model.source.startswith("hf://") and _COMMIT.match(model.revision or ""):
        return model.revision or ""
    return known.revision if _same_model(model, known) else ""


def _same_model(model: Model, known: ModelStatus) -> bool:
    return (known.source, known.requested_revision) == (model.source, model.revision or "")


def decide(
    service: Service,
    spec: InferenceServiceSpec,
    known: ModelStatus,
    cache: Cache,
    config: OperatorConfig,
    now: float,
) -> CacheStep:
    model = spec.model
    model_names = spec.model_names(service.name)
    status = ModelStatus(
        name=model_names[0],
        aliases=model_names[1:],
        source=model.source,
        requested_revision=model.revision or "",
        failures=known.failures if _same_model(model, known) else 0,
    )
    scheme, _, rest = model.source.partition("://")
    if scheme == "file":
        return CacheStep(
            status, ModelAt(source=model.source, host_path=rest), ready=True, reason="NodePath",
            message="read from the node's own disk; needs a namespace that admits hostPath volumes",
        )  # fmt: skip
    if scheme == "oci":
        at = ModelAt(source=model.source, image=rest, sub_path=(model.path or "").strip("/"))
        return CacheStep(
            status, at, ready=True, reason="ImageVolume",
            message="the kubelet pulls it as an image volume, which Kubernetes has from 1.33 on",
        )  # fmt: skip
    if scheme == "pvc":
        return _provided(spec, status, cache, now)
    if _too_narrow(spec, config):
        return CacheStep(
            status, reason="AccessMode",
            message="ReadWriteOnce cannot be read from several nodes: set "
            "model.cache.accessMode to ReadWriteMany, or run one replica on one node",
        )  # fmt: skip
    revision = _resolved(model, known)
    if not revision:
        return _resolve(service, spec, status, cache, config, now)
    return _fetch(service, spec, status, revision, cache, config, now)


def withhold(step: CacheStep, refused: InvalidSettings) -> None:
    """Begin no lookup or download for a service that would be refused afterwards."""
    if all(child["kind"] != "Job" for child in step.apply):
        return
    step.apply = []
    step.reason, step.message = refused.reason, f"the model is not fetched before: {refused}"


def _provided(
    spec: InferenceServiceSpec, status: ModelStatus, cache: Cache, now: float
) -> CacheStep:
    claim, _, path = spec.model.source.removeprefix("pvc://").partition("/")
    live, nodes = cache.claims.get(claim), spec.hardware.nodes
    if live is None:
        return CacheStep(
            status, reason="ClaimNotFound", requeue_at=now + _LOOK_AGAIN,
            message=f"the claim {claim} of model.source is not in the service's namespace: make it "
            "there, or name another one",
        )  # fmt: skip
    if nodes > 1 and not _shareable(live):
        modes = ", ".join(live["spec"].get("accessModes", []))
        return CacheStep(
            status, reason="AccessMode", requeue_at=now + _LOOK_AGAIN,
            message=f"the claim {claim} is {modes}, and {nodes} nodes are to read it: use one that "
            "is ReadOnlyMany or ReadWriteMany",
        )  # fmt: skip
    at = ModelAt(source=spec.model.source, claim=claim, sub_path=path.strip("/"))
    phase = live.get("status", {}).get("phase", "Bound")
    if phase == "Lost":
        return CacheStep(
            status, reason="ClaimLost", requeue_at=now + _LOOK_AGAIN,
            message=f"the claim {claim} has lost its volume: make it anew, or name another one",
        )  # fmt: skip
    if phase == "Pending":
        # Some volumes are bound once a pod wants them, and may be filled before.
        return CacheStep(
            status, at, ready=True, present=False, reason="ClaimPending",
            requeue_at=now + _LOOK_AGAIN,
            message=f"the claim {claim} has no volume yet{_unbound(live)}. Make one for it, or "
            "name a claim that has one",
        )  # fmt: skip
    return CacheStep(
        status, at, ready=True, reason="Provided", message=f"read from the claim {claim}"
    )


def _shareable(claim: ClaimObject) -> bool:
    return bool({"ReadOnlyMany", "ReadWriteMany"} & set(claim["spec"].get("accessModes", [])))


def _too_narrow(spec: InferenceServiceSpec, config: OperatorConfig) -> bool:
    mode = spec.model.cache.access_mode or config.model_cache.access_mode
    groups = spec.autoscaling.max if spec.autoscaling else spec.replicas
    groups += spec.rollout.max_surge
    return mode is AccessMode.READ_WRITE_ONCE and groups * spec.hardware.nodes > 1


def _resolve(
    service: Service,
    spec: InferenceServiceSpec,
    status: ModelStatus,
    cache: Cache,
    config: OperatorConfig,
    now: float,
) -> CacheStep:
    model = spec.model
    job = cache.jobs.get(models.resolve_job_name(service, model))
    if job is None:
        step = CacheStep(status, reason="Resolving", message="looking up the revision")
        step.apply.append(models.resolve_job(service, model, config, cache.fields))
        return step
    if job.failed:
        return _failed(status, job, config, now)
    revision = _result(job).get("revision", "")
    if not (job.succeeded and revision):
        return _under_way(status, job, spec, config, now, "Resolving", "looking up the revision")
    status = status.model_copy(update={"revision": revision})
    step = _fetch(service, spec, status, revision, cache, config, now)
    step.delete_jobs.append(job)
    return step


def _fetch(
    service: Service,
    spec: InferenceServiceSpec,
    status: ModelStatus,
    revision: str,
    cache: Cache,
    config: OperatorConfig,
    now: float,
) -> CacheStep:
    model = spec.model
    name = names.cache_name(model.source, revision)
    status = status.model_copy(update={"revision": revision, "claim": name})
    at = ModelAt(source=model.source, revision=revision, claim=name, sub_path=SNAPSHOT)
    job = cache.jobs.get(name)
    live = cache.claims.get(name)
    claim = models.claim(name, cache.users_of(name, service), model, revision, config, live)
    filled = live is not None and (
        (live["metadata"].get("annotations") or {}).get(COMPLETE) == "true"
        or (job is not None and job.succeeded)
    )
    if filled:
        size = _size(live, job)
        claim["metadata"]["annotations"] |= {COMPLETE: "true"} | (
            {BYTES: str(size)} if size else {}
        )
        message = f"revision {revision} on {name}"
        status = status.model_copy(update={"failures": 0})
        return CacheStep(
            status, at, ready=True, reason="Cached", message=message, apply=[claim], size=size
        )
    progress = f"kubectl logs --namespace {service.namespace} job/{name}"
    fetching = f"revision {revision} into {name}; how far it is: {progress}"
    wanted = models.download_job(
        name, service, model, revision, config, cache.intended, cache.fields
    )
    if job is None:
        step = CacheStep(status, at, reason="Downloading", message=fetching)
        step.apply = [claim, wanted]
        return step
    if _judged_otherwise(job, wanted):
        step = CacheStep(status, at, reason="Downloading", message=fetching)
        step.delete_jobs, step.requeue_at = [job], now + 1.0
        return step
    if job.failed:
        step = _failed(status, job, config, now)
        step.at, step.apply = at, [claim]
        return step
    step = _under_way(status, job, spec, config, now, "Downloading", fetching, live)
    step.at, step.apply = at, [claim]
    return step


def _judged_otherwise(job: JobState, wanted: Object) -> bool:
    """Whether a Job found the model unfit for something else than this service wants it for."""
    intended = wanted["metadata"]["annotations"][names.INTENDED]
    return job.failed and _result(job).get("reason") == UNFIT and job.intended != intended


def _size(claim: ClaimObject | None, job: JobState | None) -> int:
    """Bytes of a filled claim's model; 0 for one that an older version filled."""
    annotations = (claim["metadata"].get("annotations") or {}) if claim is not None else {}
    known = annotations.get(BYTES, "")
    fetched = _result(job).get("bytes", "") if job is not None else ""
    return next((int(text) for text in (known, fetched) if text.isdecimal()), 0)


def _under_way(
    status: ModelStatus,
    job: JobState,
    spec: InferenceServiceSpec,
    config: OperatorConfig,
    now: float,
    reason: str,
    message: str,
    claim: ClaimObject | None = None,
) -> CacheStep:
    """A Job that has not ended, and what keeps its pod from starting, if anything does."""
    trouble = refusal(job.refused) if job.refused else None
    if job.pod is not None:
        trouble = pod_problem(job.pod)
    said = _said(job)
    if trouble is not None:
        mend = remedies.of_pod(trouble, spec, config, "downloads")
        reason, message = trouble.reason, f"{trouble.message} ({mend})" if mend else trouble.message
    elif said:  # by a pod of before: the Job tries it some times
        message = f"{message}; tried again after: {said}"
    if claim is not None and claim.get("status", {}).get("phase") == "Pending":
        message += (
            f" (the claim {claim['metadata']['name']} has no volume yet{_unbound(claim)}. "
            "model.cache.storageClass and model.cache.accessMode, or modelCache.storageClass and "
            "modelCache.accessMode of the chart, ask for another one; delete the claim then)"
        )
    # Only Events say why there is no pod, and they are not watched.
    again = now + (_LOOK_AGAIN if job.refused else _LOOK_SOON) if job.pod is None else None
    return CacheStep(status, reason=reason, message=message, requeue_at=again)


def _unbound(claim: ClaimObject) -> str:
    """What a claim without a volume asks for."""
    given = claim["spec"].get("storageClassName")
    used = f"the storage class {given}" if given else "the cluster's default storage class"
    modes = ", ".join(claim["spec"].get("accessModes", []))
    return f": it asks for {modes} of {used}"


def _failed(status: ModelStatus, job: JobState, config: OperatorConfig, now: float) -> CacheStep:
    """A Job that gave up is deleted after a while, longer each time, and thereby tried again."""
    result = _result(job)
    wait = config.model_cache.retry_after * 2.0 ** min(status.failures, 16)
    retry_at = (job.finished_at or now) + min(wait, _LONGEST_WAIT)
    reason = result.get("reason", "DownloadFailed")
    message = _said(job) or "no message; see the log of its pod"
    if reason == UNFIT:
        fields = remedies.of_settings(message) or "see hardware, parallelism and engine.quantize"
        message = f"{message}; {fields}"
    again = (
        f"tried again at {times.to_seconds_text(retry_at)}, or once the Job {job.name} is deleted"
    )
    step = CacheStep(status, reason=reason, message=f"{message} ({again})")
    if now >= retry_at:
        step.status = status.model_copy(update={"failures": status.failures + 1})
        if reason == CHANGED:  # as when the lookup came in the middle of an upload
            step.status = step.status.model_copy(update={"revision": "", "claim": ""})
        step.delete_jobs.append(job)
        step.requeue_at = now + 1.0
    else:
        step.requeue_at = retry_at
    return step


def _said(job: JobState) -> str:
    return _result(job).get("message") or _log_end(job)


def _log_end(job: JobState) -> str:
    """What a fetcher that was ended from outside has left: the end of its log, or a reason."""
    lines = [line for line in job.message.splitlines() if line.strip()]
    last = lines[-1].strip()[:1000] if lines else ""
    return "" if last[:1] in ("[", "{") else last


def _result(job: JobState) -> dict[str, str]:
    """The fetcher's termination message; empty for anything else."""
    try:
        result = json.loads(job.message)
    except ValueError:
        return {}
    if not isinstance(result, dict):
        return {}
    return {str(key): str(value)[:1024] for key, value in result.items()}

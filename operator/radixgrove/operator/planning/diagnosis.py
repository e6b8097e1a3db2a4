"""Why a group is not ready, as a message that a person can act on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from radixgrove.operator.api.values import duration
from radixgrove.operator.planning.observed import Group, Pod
from radixgrove.protocol.ranks import ARRIVAL_SECONDS_APART
from radixgrove.service import exit_codes

_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
          "RegistryUnavailable", "ImageInspectError"}  # fmt: skip
_TO_END = 300.0  # seconds that a kubelet takes at most, from the last probe to the end of a drain
_CONFIG = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
# Seconds in which a refusal may pass, since Kubernetes tries again by itself: of a volume that
# another pod leaves, by a registry or a webhook that is away, for a Secret new to the node, by a
# runtime whose GPU driver is yet to load.
RETRIED = 120.0


@dataclass(frozen=True)
class Problem:
    """`stuck`: waiting alone does not help, so a rollout must not go on. `passes_within`: seconds
    that it may take and still say nothing against the revision."""

    reason: str
    message: str
    stuck: bool = True
    passes_within: float = 0.0


def problem(group: Group) -> Problem | None:
    """What keeps a group from being ready; None when it is ready or merely starting."""
    if group.ready:
        return None
    if group.refused:
        return refusal(group.refused)
    for pod in group.pods:
        if not group.all_run and waited_in_vain(pod, group):
            continue  # what keeps the others is the problem
        found = pod_problem(pod, group.startup)
        if found is not None:
            return found
    return None


def waited_in_vain(pod: Pod, group: Group) -> bool:
    """Whether its last run lasted as long as a rank waits for those of other machines, or as its
    start may take: that is what it then ended for, unless all had come."""
    patience = min(ARRIVAL_SECONDS_APART, group.startup or ARRIVAL_SECONDS_APART)
    return group.nodes > 1 and pod.ran >= patience and not pod.out_of_memory


def refusal(said: str) -> Problem:
    """Pods that the API server does not admit, in its words."""
    quota = "exceeded quota" in said
    reason = "QuotaBlocked" if quota else "PodRefused"
    return Problem(reason, said, stuck=not quota, passes_within=RETRIED)


def pod_problem(pod: Pod, startup: float = 0.0) -> Problem | None:
    """What keeps one pod from running. `startup`: seconds it may take until it is ready."""
    reason, message = pod.waiting
    if reason in _IMAGE:
        return _retried("ImagePull", f"{pod.name}: {message or reason}")
    if reason in _CONFIG:
        return _retried("ContainerConfig", f"{pod.name}: {message or reason}")
    if pod.never_began and pod.started_at is not None:
        return None  # it has begun since
    restarted = pod.restarts and not (pod.ready or pod.cut_off)
    if reason == "CrashLoopBackOff" or restarted:
        last = _last_line(pod.exited or message or "its container ended without a message")
        if startup and startup <= pod.ran <= startup + _TO_END:
            allowed = duration(startup)
            return Problem(
                "StartupTimeout",
                f"{pod.name} ended {duration(pod.ran)} after its start: if it was still loading, "
                f"raise startup.timeout ({allowed}); its last message: {last}",
            )
        if pod.never_began:
            return _retried("ContainerConfig", f"{pod.name}: {last}")
        if pod.out_of_memory:
            return Problem("OutOfMemory", f"{pod.name}: {last}")
        reason = "ModelUnusable" if pod.exit_code == exit_codes.MODEL else "EngineFailed"
        return Problem(reason, f"{pod.name}: {last}")
    if pod.not_mounted:
        return _retried("VolumeNotMounted", f"{pod.name}: {pod.not_mounted}")
    if pod.unschedulable:
        missing = re.search(r"Insufficient ([a-z0-9.-]+/)?gpus?\b", pod.unschedulable)
        kind = "InsufficientGPUs" if missing else "Unschedulable"
        return Problem(kind, f"{pod.name}: {pod.unschedulable}", stuck=False)
    return None


def _retried(reason: str, message: str) -> Problem:
    return Problem(reason, message, passes_within=RETRIED)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:1000] if lines else ""

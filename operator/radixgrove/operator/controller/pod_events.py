"""What only Events say of pods: why one is not admitted, or has no volumes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from radixgrove.operator.api.objects import EVENT, EventObject
from radixgrove.operator.kube.client import Kube
from radixgrove.operator.planning.observed import Pod

_NOT_MOUNTED = ("FailedMount", "FailedAttachVolume")
_MOUNTED = ("SuccessfulAttachVolume", "Pulling", "Pulled", "Created", "Started")
_COMBINED = "(combined from similar events): "
_LONGEST = 1024  # characters of a message


def not_admitted(kube: Kube, namespace: str, name: str, uid: str) -> str:
    """Why the API server refuses the pods of a StatefulSet or a Job; empty where it does not.

    Raises KubeError.
    """
    events = _events(kube, namespace, name, uid)
    return _last_refusal(events, ("FailedCreate",), ("SuccessfulCreate",))


def with_mounts(kube: Kube, namespace: str, pod: Pod) -> Pod:
    """With why it has no volumes yet, where it has a node and that is said. Raises KubeError."""
    if not pod.creating:
        return pod
    events = _events(kube, namespace, pod.name, pod.uid)
    return replace(pod, not_mounted=_last_refusal(events, _NOT_MOUNTED, _MOUNTED))


def _events(kube: Kube, namespace: str, name: str, uid: str) -> list[EventObject]:
    fields = f"involvedObject.name={name},involvedObject.uid={uid}"
    found = kube.list(EVENT, namespace, fields=fields)
    return [event for event in found if event.get("involvedObject", {}).get("uid") == uid]


def _last_refusal(
    events: list[EventObject], refusals: Collection[str], successes: Collection[str]
) -> str:
    """What the last refusal says; empty once a success came after it, though its Event stays."""
    told = [event for event in events if event.get("reason") in (*refusals, *successes)]
    if not told:
        return ""
    last = max(told, key=lambda event: (_when(event), event.get("reason") in successes))
    if last.get("reason") in successes:
        return ""
    return str(last.get("message", "")).removeprefix(_COMBINED)[:_LONGEST]


def _when(event: EventObject) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime"))

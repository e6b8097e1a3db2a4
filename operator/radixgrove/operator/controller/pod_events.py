"""What only Events say of pods: why one is not admitted, or has no volumes."""

from __future__ import annotations

from dataclasses import replace

from radixgrove.operator.api.objects import EVENT, EventObject
from radixgrove.operator.kube.client import Kube
from radixgrove.operator.planning.observed import Pod

_NOT_MOUNTED = ("FailedMount", "FailedAttachVolume")
_COMBINED = "(combined from similar events): "
_LONGEST = 1024  # characters of a message


def not_admitted(kube: Kube, namespace: str, name: str, uid: str) -> str:
    """Why the API server refuses the pods of a StatefulSet or a Job; empty where it does not.

    Raises KubeError.
    """
    fields = f"involvedObject.name={name},reason=FailedCreate"
    events = kube.list(EVENT, namespace, fields=fields)
    return _last([e for e in events if e.get("involvedObject", {}).get("uid") == uid])


def with_mounts(kube: Kube, namespace: str, pod: Pod) -> Pod:
    """With why it has no volumes yet, where it has a node and that is said. Raises KubeError."""
    if not pod.creating:
        return pod
    fields = f"involvedObject.name={pod.name},involvedObject.uid={pod.uid}"
    events = kube.list(EVENT, namespace, fields=fields)
    said = _last([e for e in events if e.get("reason") in _NOT_MOUNTED])
    return replace(pod, not_mounted=said)


def _last(events: list[EventObject]) -> str:
    said = str(max(events, key=_when).get("message", "")) if events else ""
    return said.removeprefix(_COMBINED)[:_LONGEST]


def _when(event: EventObject) -> str:
    return str(event.get("lastTimestamp") or event.get("eventTime"))

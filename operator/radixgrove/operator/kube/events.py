"""Events about a resource, as the API server keeps them. Pure."""

from __future__ import annotations

from radixgrove.operator.api import names, times
from radixgrove.operator.api.objects import Object, ServiceObject


def event(resource: ServiceObject, kind: str, reason: str, message: str, now: float) -> Object:
    """`kind`: Normal or Warning. The same event twice within a second is one object."""
    meta = resource["metadata"]
    stamp = times.to_seconds_text(now)
    digest = names.digest([meta["uid"], reason, message, stamp])
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{meta['name']}.{digest}", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "reason": reason,
        "message": message,
        "type": kind,
        "source": {"component": names.FIELD_MANAGER},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }

"""What chart and service say of pods of one kind, laid over what the operator renders."""

from __future__ import annotations

from typing import Any

from radixgrove.operator.api.objects import Object
from radixgrove.operator.api.spec import NO_FIELDS, PodFields
from radixgrove.operator.render.merge import strategic_merge


def with_fields(
    template: Object, container: str, labels: dict[str, str], *layers: PodFields
) -> Object:
    """A pod template with the fields of each layer over it; the last one wins where one must.

    Tolerations, spread constraints and terms of affinity come on top of those before. `labels`:
    of the pods that a spread constraint without a selector counts.
    """
    for fields in layers:
        if fields != NO_FIELDS:
            template = strategic_merge(template, _patch(template, container, labels, fields))
    return template


def _patch(template: Object, container: str, labels: dict[str, str], fields: PodFields) -> Object:
    spec = template["spec"]
    plain: dict[str, Any] = {
        "nodeSelector": fields.node_selector,
        "tolerations": [*spec.get("tolerations", []), *fields.tolerations],
        "affinity": _joined(spec.get("affinity", {}), fields.affinity),
        "topologySpreadConstraints": [
            {"labelSelector": {"matchLabels": labels}} | constraint
            for constraint in fields.topology_spread_constraints
        ],
        "imagePullSecrets": [{"name": name} for name in fields.image_pull_secrets],
        "priorityClassName": fields.priority_class_name,
        "serviceAccountName": fields.service_account_name,
        "volumes": fields.volumes,
        "containers": [
            {"name": container, "env": fields.env, "volumeMounts": fields.volume_mounts}
        ],
    }
    own = template["metadata"].get("labels", {})
    metadata = {
        "annotations": fields.annotations,
        "labels": {key: value for key, value in fields.labels.items() if key not in own},
    }
    return {
        "metadata": {key: value for key, value in metadata.items() if value},
        "spec": {key: value for key, value in plain.items() if value},
    }


def _joined(base: Object, more: Object) -> Object:
    """Objects with the terms of both."""
    joined = dict(base)
    for key, value in more.items():
        old = joined.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            joined[key] = _joined(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            joined[key] = [*old, *value]
        else:
            joined[key] = value
    return joined

"""Strategic merge of pod templates, as `kubectl patch` does it: named lists are merged by name.

Source: "Use a Strategic Merge Patch to Update a Deployment", Kubernetes documentation, and the
`patchMergeKey` tags of the pod API.
"""

from __future__ import annotations

from typing import Any

# Merge keys by the name of the list; every other list is replaced whole.
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
    "resourceClaims": "name",
}


def strategic_merge(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """`base` with `patch` over it; neither is changed. A null removes its key."""
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(base.get(key), dict):
            merged[key] = strategic_merge(base[key], value)
        elif isinstance(value, list) and key in _MERGE_KEYS and isinstance(base.get(key), list):
            merged[key] = _merge_list(base[key], value, _MERGE_KEYS[key])
        else:
            merged[key] = value
    return merged


def _merge_list(base: list[Any], patch: list[Any], merge_key: str) -> list[Any]:
    if {"$patch": "replace"} in patch:
        return [item for item in patch if item != {"$patch": "replace"}]
    merged = list(base)
    for item in patch:
        place = next(
            (i for i, old in enumerate(merged) if old.get(merge_key) == item.get(merge_key)), None
        )
        if item.get("$patch") == "delete":
            merged = [old for i, old in enumerate(merged) if i != place]
        elif place is None:
            merged.append(item)
        else:
            merged[place] = strategic_merge(merged[place], item)
    return merged

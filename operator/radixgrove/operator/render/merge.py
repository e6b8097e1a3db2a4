"""Strategic merge of pod templates, as `kubectl patch` does it: named lists are merged by name.

Source: "Use a Strategic Merge Patch to Update a Deployment", Kubernetes documentation, and the
`patchMergeKey` tags of the pod API.
"""

from __future__ import annotations

from typing import Any

from radixgrove.protocol.errors import InvalidInput

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
_FORMS = {dict: "an object", list: "a list"}


class CannotMerge(InvalidInput, ValueError):
    """A patch has another form than what it is laid over; the message says where."""


def strategic_merge(base: dict[str, Any], patch: dict[str, Any], path: str = "") -> dict[str, Any]:
    """`base` with `patch` over it; neither is changed. A null removes its key.

    `path` leads to both. Raises CannotMerge.
    """
    if patch.get("$patch") == "replace":
        return {key: value for key, value in patch.items() if key != "$patch"}
    merged = dict(base)
    for key, value in patch.items():
        here, old = f"{path}.{key}", base.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(old, dict | list) and not isinstance(value, type(old)):
            raise CannotMerge(f"{here} must be {_FORMS[type(old)]}")
        elif isinstance(value, dict) and isinstance(old, dict):
            merged[key] = strategic_merge(old, value, here)
        elif isinstance(value, list) and key in _MERGE_KEYS:
            merged[key] = _merge_list(old or [], value, _MERGE_KEYS[key], here)
        else:
            merged[key] = value
    return merged


def _merge_list(base: list[Any], patch: list[Any], merge_key: str, path: str) -> list[Any]:
    for index, item in enumerate(patch):
        if not isinstance(item, dict):
            raise CannotMerge(f"{path}[{index}] must be {_FORMS[dict]}")
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
            merged[place] = strategic_merge(merged[place], item, f"{path}[{place}]")
    return merged

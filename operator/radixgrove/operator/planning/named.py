"""Which fields of a service, or values of the chart, name the object that is missing. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.spec import FETCHED, InferenceServiceSpec

PodKind = Literal["workers", "routers", "downloads"]

# Fields that hold names of other objects, or keys in them.
_NAMES = {
    "caBundle", "claimName", "configMap", "credentialsSecret", "key", "keysSecret", "name",
    "priorityClassName", "runtimeClassName", "secretName", "serviceAccountName", "tokenSecret",
}  # fmt: skip
_OWN_NAMES = re.compile(r"(env|volumes|[mM]ounts|[cC]ontainers)\[\d+\]\.name$|^model\.name$")


def naming(message: str, spec: InferenceServiceSpec, config: OperatorConfig, kind: PodKind) -> str:
    """The fields that name what a message is about; where the service has none, the chart's
    values. "": neither does."""
    words = set(re.findall(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?", message))
    of_service = _fields(_of_service(spec), kind)
    of_chart = ((f"{path} of the chart", value) for path, value in _fields(_of_chart(config), kind))
    for fields in (of_service, of_chart):
        if found := [path for path, value in fields if value in words]:
            return ", ".join(found)
    return ""


def claims(spec: InferenceServiceSpec, config: OperatorConfig) -> str:
    """The fields that name the claims of a worker's pod, or say how the model's is made."""
    source = spec.model.source
    found = [f"model.source: {source}"] if source.startswith("pvc://") else []
    found += ["model.cache"] if source.startswith(FETCHED) else []
    of_service = _fields(_of_service(spec), "workers")
    found += [path for path, _ in of_service if path.endswith(".claimName")]
    of_chart = _fields(_of_chart(config), "workers")
    found += [f"{path} of the chart" for path, _ in of_chart if path.endswith(".claimName")]
    return ", ".join(found)


def _of_service(spec: InferenceServiceSpec) -> Any:
    return spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def _of_chart(config: OperatorConfig) -> Any:
    """As the chart's values have it."""
    pods = config.pods
    kinds = {"workers": pods.workers, "routers": pods.routers, "downloads": pods.downloads}
    plain = {
        "caBundle": pods.ca_bundle,
        "priorityClassName": pods.priority_class,
        "runtimeClassName": pods.runtime_class,
    }
    dumped = {
        kind: fields.model_dump(mode="json", by_alias=True, exclude_none=True)
        for kind, fields in kinds.items()
    }
    return {"pods": dumped | plain}


def _fields(given: Any, kind: PodKind) -> Iterator[tuple[str, str]]:
    """Names in it that matter to a pod of that kind, by where they are."""
    for path, value in _leaves(given):
        of_others = re.match(r"pods\.(workers|routers|downloads)\b", path)
        if of_others is not None and of_others[1] != kind:
            continue
        if path.startswith("podOverrides.") and kind != "workers":
            continue
        if path.rpartition(".")[2] in _NAMES and not _OWN_NAMES.search(path):
            yield path, value


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Texts by where they are: `pods.workers.env[0].valueFrom.secretKeyRef.name`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    elif isinstance(value, str):
        yield path, value

"""What a CRD of another version drops of a service's status, in silence.

A condition names it, and it is not written again for as long as that CRD is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixgrove.operator.api import names
from radixgrove.operator.api.objects import Object
from radixgrove.operator.controller.store import Key
from radixgrove.operator.kube.client import Kube, covers

_REMEDY = (
    f"upgrade the Helm release that owns {names.PLURAL}.{names.GROUP} (its annotations name it), "
    "or apply this chart's files/inferenceservice-crd.yaml with kubectl apply --server-side "
    "--force-conflicts"
)


@dataclass(frozen=True)
class _Loss:
    """By field: what was written, and what was kept of it. `schema`: of the CRD that did so."""

    written: Object
    kept: Object
    schema: str


class CrdSkew:
    """Thread-safe for different services."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._losses: dict[Key, _Loss] = {}

    def forget(self, key: Key) -> None:
        self._losses.pop(key, None)

    def message(self, key: Key) -> str:
        """What is dropped and what to do about it; "" when nothing that matters is."""
        loss = self._losses.get(key)
        if loss is None:
            return ""
        missed = [f"status.{f}" for f, v in loss.written.items() if not covers(loss.kept.get(f), v)]
        if not missed:
            return ""
        return (
            f"the installed CRD is of another version and drops {', '.join(sorted(missed))}: "
            f"{_REMEDY}"
        )

    def lasting(self, key: Key, live: Object, body: Object) -> Object:
        """`body`, a change of the status `live`, without what would only be dropped again."""
        loss = self._losses.get(key)
        if loss is None:
            return body
        again = {
            field
            for field, value in body.items()
            if field in loss.written
            and (loss.written[field], loss.kept[field]) == (value, live.get(field))
        }
        # Where the API server does not say which CRD it serves, writing again is the only test.
        if not (again and loss.schema and loss.schema == self._kube.schema_hash()):
            return body
        return {field: value for field, value in body.items() if field not in again}

    def learn(self, key: Key, written: Object, kept: Object) -> None:
        """After a write: the status as the API server kept it."""
        loss = self._losses.get(key) or _Loss({}, {}, "")
        lost = {f: v for f, v in loss.written.items() if f not in written}
        lost |= {f: v for f, v in written.items() if kept.get(f) != _without_nulls(v)}
        if lost:
            kept = {field: kept.get(field) for field in lost}
            self._losses[key] = _Loss(lost, kept, self._kube.schema_hash())
        else:
            self.forget(key)


def _without_nulls(value: Any) -> Any:
    """What a merge patch leaves of a value."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None}

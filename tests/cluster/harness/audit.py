"""The API server's audit log, read as a list of requests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


def policy(silent_users: Iterable[str]) -> Mapping[str, Any]:
    """Logs who asked for what, without bodies and without the noise of Kubernetes' own parts."""
    return {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
            {"level": "None", "users": ["system:apiserver", *silent_users]},
            {"level": "None", "nonResourceURLs": ["*"]},
            {"level": "Metadata"},
        ],
    }


@dataclass(frozen=True)
class Request:
    """One answered request for a resource."""

    user: str
    verb: str
    resource: str  # "pods", "apps/statefulsets/scale": [group/]resource[/subresource]
    namespace: str
    name: str
    code: int

    @property
    def writes(self) -> bool:
        return self.verb in WRITES


class AuditLog:
    """Reads on from where it last stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def read(self, user: str | None = None) -> list[Request]:
        """Requests answered since the previous call, of one user or of all that are logged."""
        with self.path.open("rb") as log:
            log.seek(self._offset)
            text = log.read()
        complete = text.rfind(b"\n") + 1
        self._offset += complete
        found = _parse(text[:complete].splitlines())
        return [request for request in found if user is None or request.user == user]


def _parse(lines: Iterable[bytes]) -> Iterator[Request]:
    for line in lines:
        event = json.loads(line)
        target = event.get("objectRef", {})
        parts = (target.get("apiGroup"), target.get("resource"), target.get("subresource"))
        yield Request(
            user=event["user"]["username"],
            verb=event["verb"],
            resource="/".join(part for part in parts if part),
            namespace=target.get("namespace", ""),
            name=target.get("name", ""),
            code=event.get("responseStatus", {}).get("code", 0),
        )

"""Just enough of an API server in memory to see what one look reads and writes, in milliseconds.

No proof of anything that Kubernetes itself does: that is what the cluster tests are for.
"""

from __future__ import annotations

import copy
from typing import Any

from radixgrove.operator.api import names
from radixgrove.operator.kube.client import Kube, KubeError, Object
from radixgrove.operator.render.merge import strategic_merge

STARTED = "2026-01-01T00:00:00Z"


class MemoryKube(Kube):
    """Objects by kind, namespace and name. `dropped`: fields of a status that the CRD lacks, or
    `LIST.FIELD` of a list's items."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.written: list[str] = []
        self.dropped: set[str] = set()
        self.refused: set[str] = set()  # `VERB KIND`, for want of a right
        self._count = 0
        self._applied: dict[tuple[str, str, str], Object] = {}
        super().__init__(None, lambda seconds: True, 1.0)

    def add(self, thing: Object) -> Object:
        """As somebody else made it."""
        self._count += 1
        meta = thing["metadata"]
        meta.setdefault("uid", f"uid-{self._count}")
        meta.setdefault("creationTimestamp", STARTED)
        meta["resourceVersion"] = str(self._count)
        self.objects[thing["kind"], meta.get("namespace", ""), meta["name"]] = thing
        return thing

    def of(self, kind: str) -> list[Object]:
        return [thing for (found, _, _), thing in sorted(self.objects.items()) if found == kind]

    def the(self, kind: str, name: str) -> Object:
        return next(thing for thing in self.of(kind) if thing["metadata"]["name"] == name)

    def schema_hash(self) -> str:
        return str(sorted(self.dropped))

    def _request(
        self,
        method: str,
        verb: str,
        kind: str,
        namespace: str | None,
        name: str | None,
        *,
        sub: str | None = None,
        body: Object | None = None,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        if f"{verb} {kind}" in self.refused:
            raise KubeError(verb, kind, 403, f"cannot {verb} {kind}")
        if method == "GET" and name is None:
            return {"items": self._listed(kind, namespace, query or {})}
        if method == "POST":
            assert body is not None
            self._note(verb, kind, body["metadata"]["name"])
            return copy.deepcopy(self.add(copy.deepcopy(body)))
        assert name is not None
        key = (kind, namespace or "", name)
        live = self.objects.get(key)
        if method == "GET":
            if live is None:
                raise KubeError(verb, name, 404, "not found")
            return copy.deepcopy(live)
        self._note(verb, kind, name)
        if method == "DELETE":
            assert body is not None
            if live is not None and live["metadata"]["uid"] == body["preconditions"]["uid"]:
                del self.objects[key]
            return {}
        assert body is not None
        if content_type == "application/apply-patch+yaml":
            before = self._applied.get(key, {})
            self._applied[key] = copy.deepcopy(body)
            if live is None:
                return copy.deepcopy(self.add(copy.deepcopy(body)))
            _remove(live, before, body)
        assert live is not None
        version = body.get("metadata", {}).get("resourceVersion")
        if version not in (None, live["metadata"]["resourceVersion"]):
            raise KubeError(verb, name, 409, "the object has been modified")
        change = {"status": body["status"]} if sub == "status" else body
        merged = strategic_merge(live, copy.deepcopy(change))
        for dropped in self.dropped:
            where, _, field = dropped.rpartition(".")
            status = merged.get("status", {})
            for item in status.get(where, []) if where else [status]:
                item.pop(field, None)
        return copy.deepcopy(self.add(merged))

    def _note(self, verb: str, kind: str, name: str) -> None:
        self.written.append(f"{verb} {kind}/{name}")

    def _listed(self, kind: str, namespace: str | None, query: dict[str, str]) -> list[Object]:
        labels = query.get("labelSelector", "")
        wanted = dict(part.split("=") for part in labels.split(",") if part)
        return [
            copy.deepcopy(thing)
            for thing in self.of(kind)
            if namespace in (None, thing["metadata"].get("namespace"))
            and wanted.items() <= thing["metadata"].get("labels", {}).items()
        ]

    # ---- what controllers and kubelets do --------------------------------------------------------

    def run_pods(self, *nodes: str, of: str = "") -> None:
        """Missing pods of every StatefulSet, or of one: ready, rank by rank on these nodes."""
        for stateful_set in self.of("StatefulSet"):
            meta, spec = stateful_set["metadata"], stateful_set["spec"]
            if of not in ("", meta["name"]):
                continue
            for rank in range(spec["replicas"]):
                name = f"{meta['name']}-{rank}"
                if ("Pod", meta["namespace"], name) not in self.objects:
                    self.add(_ready_pod(stateful_set, name, rank, nodes[rank % len(nodes)]))


def _remove(live: Object, before: Object, now: Object) -> None:
    """Fields that an earlier apply had, and this one has not."""
    for field, value in before.items():
        if field not in now:
            live.pop(field, None)
        elif isinstance(value, dict) and isinstance(now[field], dict):
            _remove(live.get(field) or {}, value, now[field])


def _ready_pod(stateful_set: Object, name: str, rank: int, node: str) -> Object:
    meta = stateful_set["metadata"]
    labels = stateful_set["spec"]["template"]["metadata"]["labels"]
    running: dict[str, Any] = {"name": "worker", "restartCount": 0, "state": {"running": {}}}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": labels | {names.POD_INDEX: str(rank)},
            "ownerReferences": [{"uid": meta["uid"], "controller": True}],
        },
        "spec": {"nodeName": node},
        "status": {
            "phase": "Running",
            "podIP": f"10.0.0.{rank}",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [running],
        },
    }


def claim(namespace: str) -> Object:
    """The claim `models` of a namespace, which users have made."""
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models", "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteMany"]},
    }


def node(
    name: str, *, ready: str = "True", since: str = STARTED, labels: dict[str, str] | None = None
) -> Object:
    """One of eight GPUs."""
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": since}
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": labels or {}},
        "status": {"conditions": [condition], "allocatable": {"nvidia.com/gpu": "8"}},
    }

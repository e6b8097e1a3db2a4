"""The API server, as plain JSON through the official client. Synchronous: for threads only.

Every request has a timeout; every write first asks whether this process still leads. Objects are
written by server-side apply, and only when they differ from what is there.
"""

from __future__ import annotations

import json
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import urllib3.exceptions
from kubernetes import client, config

from radixgrove.operator.api import metrics, names
from radixgrove.operator.api.objects import KindName, Object
from radixgrove.operator.api.values import quantity
from radixgrove.protocol.errors import Interrupted, PeerError

T = TypeVar("T", bound=Mapping[str, Any])


@dataclass(frozen=True)
class Kind:
    """Where a kind lives in the API."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None, name: str | None = None, sub: str | None = None) -> str:
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, sub) if part]
        return "/" + "/".join(urllib.parse.quote(part, safe="") for part in parts)


KINDS = {
    names.KIND: Kind(names.GROUP, names.VERSION, names.PLURAL),
    "StatefulSet": Kind("apps", "v1", "statefulsets"),
    "Deployment": Kind("apps", "v1", "deployments"),
    "Pod": Kind("", "v1", "pods"),
    "Service": Kind("", "v1", "services"),
    "ConfigMap": Kind("", "v1", "configmaps"),
    "Secret": Kind("", "v1", "secrets"),
    "ServiceAccount": Kind("", "v1", "serviceaccounts"),
    "PersistentVolumeClaim": Kind("", "v1", "persistentvolumeclaims"),
    "Event": Kind("", "v1", "events"),
    "Namespace": Kind("", "v1", "namespaces", namespaced=False),
    "Node": Kind("", "v1", "nodes", namespaced=False),
    "HorizontalPodAutoscaler": Kind("autoscaling", "v2", "horizontalpodautoscalers"),
    "Job": Kind("batch", "v1", "jobs"),
    "PodDisruptionBudget": Kind("policy", "v1", "poddisruptionbudgets"),
    "NetworkPolicy": Kind("networking.k8s.io", "v1", "networkpolicies"),
    "Lease": Kind("coordination.k8s.io", "v1", "leases"),
}


# What is a 500 before anything is stored: an apply that names a field which the server does not
# know, an admission webhook that does not answer, one that refuses with such a status.
_NOTHING_STORED = (
    "failed to create typed patch object",
    "failed calling webhook",
    "denied the request",
)


class KubeError(PeerError):
    """A request was refused or not answered. `status` is 0 without an answer."""

    def __init__(self, verb: str, what: str, status: int, message: str) -> None:
        super().__init__(f"{verb} {what}: {message}")
        self.verb = verb
        self.what = what
        self.status = status
        self.message = message

    @property
    def refused(self) -> bool:
        """The request had no effect. Without an answer, or after an error inside the server, it may
        have had one; after a conflict the object is there."""
        if self.status == 500 and any(text in self.message for text in _NOTHING_STORED):
            return True
        return 400 <= self.status < 500 and self.status not in (408, 409)


class NotLeading(Interrupted):
    """This process may write nothing: its lease is over, or nearly so and not yet renewed."""


def api_client() -> client.ApiClient:
    """The cluster this runs in, or the one of the kubeconfig."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException:
        config.load_kube_config(  # type: ignore[no-untyped-call]
            client_configuration=configuration
        )
    configuration.retries = False
    return client.ApiClient(configuration)


class Kube:
    """Safe for several threads."""

    def __init__(
        self, api: client.ApiClient, may_write: Callable[[float], bool], timeout: float
    ) -> None:
        """`may_write(seconds)`: whether a write that takes that long is still ours to make."""
        self._api = api
        self._may_write = may_write
        self._timeout = timeout
        self._seen: dict[tuple[str, str, str], tuple[str, str]] = {}
        # Hash of what was applied, and the version that came of it, of what admission rewrote.
        self._rewritten: dict[tuple[str, str, str], tuple[str, str]] = {}
        # Versions that the watch reports of objects while they are being applied.
        self._reported: list[tuple[tuple[str, str, str], set[str]]] = []
        self._lock = threading.Lock()

    # ---- reading ---------------------------------------------------------------------------------

    def get(self, kind: KindName[T], namespace: str | None, name: str) -> T | None:
        try:
            return cast(T, self._request("GET", "get", kind, namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def list(
        self, kind: KindName[T], namespace: str | None, labels: dict[str, str] | None = None,
        fields: str | None = None,
    ) -> list[T]:  # fmt: skip
        query = {}
        if labels:
            query["labelSelector"] = names.selector(labels)
        if fields:
            query["fieldSelector"] = fields
        answer = self._request("GET", "list", kind, namespace, None, query=query)
        return list(answer.get("items") or [])

    def schema_hash(self) -> str:
        """Changes when the CRD is renewed; "" when the API server does not say."""
        try:
            found = self._send("GET", "get", "openapi", "openapi", "/openapi/v3")
        except KubeError:
            return ""
        served = found.get("paths", {}).get(f"apis/{names.GROUP}/{names.VERSION}", {})
        return str(served.get("serverRelativeURL", ""))  # which holds the hash

    # ---- writing ---------------------------------------------------------------------------------

    def apply(self, desired: Object) -> Object:
        """Server-side apply, unless the object already is as desired; the object as it is then.

        What an earlier rendering had beyond this one goes: each has its hash on it. What admission
        makes of it stays, or both would write for ever. An object of another owner, or under
        another controller (of a deleted namesake), is left alone: KubeError with status 409.
        """
        desired = _stamped(desired)
        key = _key(desired)
        live = self.get(KindName[Object](key[0]), *key[1:])
        if live is not None:
            _refuse_foreign(desired, live)
            with self._lock:
                rewritten = self._rewritten.get(key) == _mark(desired, live)
            if rewritten or covers(live, desired):
                return live
        made = self._request(
            "PATCH", "patch", desired["kind"], key[1], key[2], body=desired,
            # Strict: a field that the server does not know is an error, and never just dropped.
            query={
                "fieldManager": names.FIELD_MANAGER, "force": "true", "fieldValidation": "Strict",
            },
            content_type="application/apply-patch+yaml",
        )  # fmt: skip
        with self._lock:
            if covers(made, desired):
                self._rewritten.pop(key, None)
            else:
                self._rewritten[key] = _mark(desired, made)
        return made

    def apply_cached(self, desired: Object) -> None:
        """As `apply`, without even a read while the watch reports no change since the last one."""
        key = _key(desired)
        digest = names.digest(desired, 32)
        reported: set[str] = set()
        with self._lock:
            known = self._seen.get(key)
            if known is not None and known[0] == digest:
                return
            self._reported.append((key, reported))
        try:
            version = self.apply(desired)["metadata"].get("resourceVersion", "")
        finally:
            with self._lock:
                self._reported = [entry for entry in self._reported if entry[1] is not reported]
        with self._lock:
            # Any other version may be a later one: the next look reads the object again.
            if reported <= {version}:
                self._seen[key] = (digest, version)

    def changed(self, kind: str, namespace: str, name: str, version: str | None) -> None:
        """The watch saw an object at `version`; None: it is gone."""
        key = (kind, namespace, name)
        with self._lock:
            known = self._seen.get(key)
            if known is not None and known[1] != version:
                del self._seen[key]
            if version is None:
                self._rewritten.pop(key, None)
            for applied, reported in self._reported:
                if applied == key:
                    reported.add(version or "")

    def create(self, desired: Object) -> Object:
        kind, namespace, _ = _key(desired)
        return self._request("POST", "create", kind, namespace, None, body=desired)

    def replace(self, desired: Object) -> Object:
        """Fails with status 409 when the object changed since it was read."""
        kind, namespace, name = _key(desired)
        return self._request("PUT", "update", kind, namespace, name, body=desired)

    def patch(
        self, kind: str, namespace: str, name: str, body: Object, sub: str | None = None
    ) -> Object:
        return self._request(
            "PATCH", "patch", kind, namespace, name, sub=sub, body=body,
            content_type="application/merge-patch+json",
        )  # fmt: skip

    def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Deletes that very object; one of the same name but another UID stays."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            self._request("DELETE", "delete", kind, namespace, name, body=body)
        except KubeError as error:
            if error.status not in (404, 409):
                raise

    # ---- the wire --------------------------------------------------------------------------------

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
        where = KINDS[kind]
        what = "/".join(part for part in (where.plural, namespace, name, sub) if part)
        if method != "GET" and not self._may_write(self._timeout):
            raise NotLeading(f"{verb} {what}: not the leader any more")
        path = where.path(namespace, name, sub)
        return self._send(method, verb, what, where.plural, path, body, query, content_type)

    def _send(
        self,
        method: str,
        verb: str,
        what: str,
        resource: str,
        path: str,
        body: Object | None = None,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        url = self._api.configuration.host + path
        if query:
            url += "?" + urllib.parse.urlencode(query)
        headers = {"Accept": "application/json", "User-Agent": names.FIELD_MANAGER}
        if body is not None:
            headers["Content-Type"] = content_type
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        try:
            response = self._api.rest_client.pool_manager.request(
                method, url, headers=headers, body=json.dumps(body) if body is not None else None,
                timeout=self._timeout, retries=False,
            )  # fmt: skip
        except urllib3.exceptions.HTTPError as error:
            metrics.API_REQUESTS.labels(verb, resource, "none").inc()
            raise KubeError(verb, what, 0, f"no answer ({type(error).__name__})") from error
        metrics.API_REQUESTS.labels(verb, resource, str(response.status)).inc()
        if response.status >= 300:
            raise KubeError(verb, what, response.status, _message(response.data))
        answer: Object = json.loads(response.data)
        return answer


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode(errors="replace")


def _key(thing: Object) -> tuple[str, str, str]:
    meta = thing["metadata"]
    return thing["kind"], meta.get("namespace", ""), meta["name"]


def _stamped(desired: Object) -> Object:
    meta = desired["metadata"]
    annotations = {**meta.get("annotations", {}), names.RENDERED: _hash(desired)}
    return {**desired, "metadata": {**meta, "annotations": annotations}}


def _mark(desired: Object, live: Object) -> tuple[str, str]:
    """What was asked for, and the version that it became."""
    return _hash(desired), live["metadata"].get("resourceVersion", "")


def is_rendering(live: Mapping[str, Any], desired: Object) -> bool:
    """Whether an object was last applied as `desired`, whatever others made of it since."""
    annotations = live["metadata"].get("annotations") or {}
    return bool(annotations.get(names.RENDERED) == _hash(desired))


def _hash(desired: Object) -> str:
    return names.digest(desired, 16)


def _refuse_foreign(desired: Object, live: Object) -> None:
    """Raises KubeError for an object that is not ours to write: nothing is ever adopted."""
    meta = live["metadata"]
    wanted, has = _owners(desired), _owners(live)
    controllers = _owners(desired, controller=True)
    if "deletionTimestamp" in meta:
        why = "it is being deleted, and is made again when it is gone"
    elif controllers and _owners(live, controller=True) - controllers:
        why = "it belongs to another owner, and is made again when that one is gone"
    elif not wanted & has and (meta.get("labels") or {}).get(names.MANAGED_BY) != names.MANAGER:
        why = "it was there before and is not the operator's: rename it, or the service"
    else:
        return
    kind, namespace, name = _key(desired)
    raise KubeError("patch", f"{KINDS[kind].plural}/{namespace}/{name}", 409, why)


def _owners(thing: Object, *, controller: bool = False) -> set[str]:
    """UIDs of an object's owners, or of the one that controls it."""
    references = thing["metadata"].get("ownerReferences") or []
    return {owner["uid"] for owner in references if owner.get("controller") or not controller}


def covers(live: Any, desired: Any) -> bool:
    """Whether an object has everything that is desired; the server's defaults may come on top."""
    if isinstance(desired, dict):
        return isinstance(live, dict) and all(
            covers(live.get(key), value) for key, value in desired.items()
        )
    if isinstance(desired, list):
        if not isinstance(live, list):
            return not desired and live is None
        if desired and all(isinstance(item, dict) and "uid" in item for item in desired):
            by_uid = {item.get("uid"): item for item in live}  # owner references of others stay
            return all(covers(by_uid.get(item["uid"]), item) for item in desired)
        # An empty item means everything (a rule of a NetworkPolicy): one that says more is another.
        return len(live) == len(desired) and all(
            covers(have, want) and (want != {} or have == {})
            for have, want in zip(live, desired, strict=True)
        )
    if live is None:
        return desired in ("", {}, [], False, 0)  # zero values are left out by the server
    return bool(live == desired) or _same_quantity(live, desired)


def _same_quantity(live: Any, desired: Any) -> bool:
    try:
        return quantity(str(live)) == quantity(str(desired))
    except ValueError:
        return False


def controllers(things: Iterable[T], uid: str) -> list[T]:
    """Those of `things` that the object with this UID controls."""
    return [
        thing
        for thing in things
        if any(
            owner.get("controller") and owner["uid"] == uid
            for owner in thing["metadata"].get("ownerReferences", [])
        )
    ]

"""The installation's keys: made once, kept in one Secret, copied to where workers run.

The Secret in the operator's namespace is never overwritten: what exists stays, what is missing is
added. It belongs to the operator's Deployment and goes with it. Copies belong to the namespace's
services and go with the last of them.
"""

from __future__ import annotations

import base64
import secrets
import threading

from radixgrove.operator import names
from radixgrove.operator.config import OperatorConfig
from radixgrove.operator.kube import Kube, KubeError
from radixgrove.operator.render.common import Object, Service

REDIS_PASSWORD = "redis-password"
REDIS_URL = "redis-url"
_GENERATED = ("internal-key", "cluster-secret", "management-key", REDIS_PASSWORD)


class Keys:
    """`ensure` once this process leads; `copy` for each served namespace."""

    def __init__(self, kube: Kube, config: OperatorConfig) -> None:
        self._kube = kube
        self._config = config
        self._lock = threading.Lock()
        self._values: dict[str, str] = {}

    def ensure(self) -> dict[str, str]:
        """The keys by their names in the Secret. Raises KubeError."""
        with self._lock:
            if not self._values:
                self._values = self._read_or_make()
            return dict(self._values)

    def _read_or_make(self) -> dict[str, str]:
        config = self._config
        found = self._kube.get("Secret", config.namespace, config.keys_secret)
        values = {
            key: base64.b64decode(value).decode()
            for key, value in ((found or {}).get("data") or {}).items()
        }
        made = {key: secrets.token_urlsafe(32) for key in _GENERATED if not values.get(key)}
        if REDIS_URL not in values:
            password = values.get(REDIS_PASSWORD) or made[REDIS_PASSWORD]
            values[REDIS_URL] = config.redis.url.replace("{password}", password)
        if found is None:
            self._kube.create(self._secret(made))
        elif made:
            body = {"data": {key: _encode(value) for key, value in made.items()}}
            self._kube.patch("Secret", config.namespace, config.keys_secret, body)
        return values | made

    def _secret(self, values: dict[str, str]) -> Object:
        config = self._config
        meta: Object = {
            "name": config.keys_secret,
            "namespace": config.namespace,
            "labels": {names.MANAGED_BY: names.MANAGER, names.COMPONENT: "keys"},
        }
        if config.owner_deployment:
            owner = self._kube.get("Deployment", config.namespace, config.owner_deployment)
            if owner is None:
                raise KubeError(
                    "get", f"deployments/{config.namespace}/{config.owner_deployment}", 404,
                    "the operator's own Deployment is not there",
                )  # fmt: skip
            meta["ownerReferences"] = [
                {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "name": config.owner_deployment,
                    "uid": owner["metadata"]["uid"],
                }
            ]
        data = {key: _encode(value) for key, value in values.items()}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data}

    def copy(self, namespace: str, users: list[Service]) -> Object:
        """What workers of a namespace read. In the operator's own that is the original, which gains
        the `redis-url` that it lacks as long as the password is ours.
        """
        values = self.ensure()
        wanted = {key: values[key] for key in self._config.key_names.values()}
        data = {key: _encode(value) for key, value in wanted.items()}
        meta: Object = {"name": self._config.keys_secret, "namespace": namespace}
        if namespace == self._config.namespace:
            data = {REDIS_URL: data[REDIS_URL]}
        else:
            meta["labels"] = {names.MANAGED_BY: names.MANAGER, names.COMPONENT: "keys"}
            meta["ownerReferences"] = [user.shared_owner for user in users]
        return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data}


def _encode(value: str) -> str:
    return base64.b64encode(value.encode()).decode()

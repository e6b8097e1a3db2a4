"""The installation's keys: made once, kept in one Secret, copied to where workers run.

The Secret in the operator's namespace is never overwritten: what exists stays, what is missing is
added, and what disappears while a leader knows it comes back as it was. It belongs to the
operator's Deployment and goes with it. Copies belong to the namespace's services and go with the
last of them.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig, RedisSettings
from radixgrove.operator.api.objects import SECRET, Object
from radixgrove.operator.kube.client import Kube, KubeError
from radixgrove.operator.kube.installation import owners
from radixgrove.operator.render.common import Service

logger = logging.getLogger(__name__)

REDIS_PASSWORD = "redis-password"
REDIS_URL = "redis-url"
_GENERATED = ("internal-key", "cluster-secret", "management-key", REDIS_PASSWORD)
_DEFAULT_PREFIX = RedisSettings.model_fields["prefix"].default


class Keys:
    """`ensure` once this process leads, `keep` now and then; `copy` for each served namespace."""

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

    def digest(self) -> str:
        """Changes with all that pods read of the installation only when they start.

        The prefix of keys in Redis is such a thing; its default does not count, so that operators
        which left it out say the same.
        """
        values = self.ensure()
        read = [values[key] for key in self._config.key_names.values()]
        prefix = self._config.redis.prefix
        return names.digest(read if prefix == _DEFAULT_PREFIX else [*read, prefix])

    def keep(self) -> None:
        """Puts back keys that were removed: pods run with them. Raises KubeError.

        What the Secret says otherwise stays, and counts when the operator starts again.
        """
        config, values = self._config, self.ensure()
        found = self._kube.get(SECRET, config.namespace, config.keys_secret)
        there = (found or {}).get("data") or {}
        missing = {key: value for key, value in values.items() if not there.get(key)}
        self._add(found, missing)
        if missing:
            what = ", ".join(sorted(missing))
            logger.warning("the Secret %s had lost %s: put back", config.keys_secret, what)

    def _read_or_make(self) -> dict[str, str]:
        config = self._config
        found = self._kube.get(SECRET, config.namespace, config.keys_secret)
        values = {
            key: base64.b64decode(value).decode()
            for key, value in ((found or {}).get("data") or {}).items()
            if key in (*_GENERATED, REDIS_URL)
        }
        made = {key: secrets.token_urlsafe(32) for key in _GENERATED if not values.get(key)}
        if config.redis.url:
            password = values.get(REDIS_PASSWORD) or made[REDIS_PASSWORD]
            url = config.redis.url.replace("{password}", password)
            if values.get(REDIS_URL) != url:
                made[REDIS_URL] = url
        elif not values.get(REDIS_URL):
            raise KubeError(
                "get", f"secrets/{config.namespace}/{config.keys_secret}", 404,
                f"without a configured Redis it must hold {REDIS_URL}",
            )  # fmt: skip
        self._add(found, made)
        return values | made

    def _add(self, found: Object | None, values: dict[str, str]) -> None:
        config = self._config
        if found is None:
            self._kube.create(self._secret(values))
        elif values:
            body = {"data": {key: _encode(value) for key, value in values.items()}}
            self._kube.patch("Secret", config.namespace, config.keys_secret, body)

    def _secret(self, values: dict[str, str]) -> Object:
        config = self._config
        meta: Object = {
            "name": config.keys_secret,
            "namespace": config.namespace,
            "labels": {names.MANAGED_BY: names.MANAGER, names.COMPONENT: "keys"},
        }
        if references := owners(self._kube, config):
            meta["ownerReferences"] = references
        data = {key: _encode(value) for key, value in values.items()}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data}

    def copy(self, namespace: str, users: list[Service]) -> Object:
        """What workers read, in a namespace other than the operator's own."""
        values = self.ensure()
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": self._config.keys_secret,
                "namespace": namespace,
                "labels": {names.MANAGED_BY: names.MANAGER, names.COMPONENT: "keys"},
                "ownerReferences": [user.shared_owner for user in users],
            },
            "data": {key: _encode(values[key]) for key in self._config.key_names.values()},
        }


def _encode(value: str) -> str:
    return base64.b64encode(value.encode()).decode()

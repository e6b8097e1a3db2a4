"""The installation's keys: made once, kept in one Secret, and those of namespaces, derived from it.

The Secret in the operator's namespace is never overwritten: what exists stays, what is missing is
added, and what disappears while a leader knows it comes back as it was. It belongs to the
operator's Deployment and goes with it. Every served namespace has a Secret of the same name with
its own keys, which belongs to the namespace's services and goes with the last of them.

An installation of before there were keys by namespace gave the same ones to all; those are accepted
until every namespace has been changed over.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
from collections.abc import Mapping
from enum import Enum
from urllib.parse import quote, urlsplit, urlunsplit

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig, RedisSettings
from radixgrove.operator.api.objects import SECRET, Object
from radixgrove.operator.kube.client import Kube, KubeError
from radixgrove.operator.kube.installation import metadata
from radixgrove.operator.render.common import Service
from radixgrove.protocol.tenancy import OPERATOR, ROUTER, NamespaceKeys, derive, user_name

logger = logging.getLogger(__name__)

ROOT_KEY = "root-key"
INTERNAL_KEY = "internal-key"
CLUSTER_SECRET = "cluster-secret"
MANAGEMENT_KEY = "management-key"
REDIS_PASSWORD = "redis-password"
REDIS_URL = "redis-url"  # of workers in the operator's own namespace
ROUTER_REDIS_URL = "router-redis-url"
REDIS_USERS = "users.acl"
CHANGED_OVER = "changed-over"  # there, once no namespace has the common keys any more
PREVIOUS_INTERNAL_KEY = "previous-internal-key"
PREVIOUS_CLUSTER_SECRET = "previous-cluster-secret"

METRICS_KEY = "metrics-key"  # of all routers: Prometheus reads one Secret for all namespaces

_GENERATED = (
    ROOT_KEY, INTERNAL_KEY, CLUSTER_SECRET, MANAGEMENT_KEY, METRICS_KEY, REDIS_PASSWORD,
)  # fmt: skip
_KNOWN = (*_GENERATED, REDIS_URL, ROUTER_REDIS_URL, REDIS_USERS, CHANGED_OVER)
_DEFAULT_PREFIX = RedisSettings.model_fields["prefix"].default


class Phase(Enum):
    """Which keys a namespace has."""

    COMMON = "common"  # those of all, as before there were any of its own
    CHANGING = "changing"  # its own; its routers accept the common ones, too
    OWN = "own"


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

    # ---- of namespaces ---------------------------------------------------------------------------

    def of(self, namespace: str, phase: Phase) -> dict[str, str]:
        """What the pods of a namespace read, by the name in its Secret."""
        values = self.ensure()
        if namespace == self._config.namespace:
            return {key: values[key] for key in self._config.key_names.values()}
        if phase is Phase.COMMON:
            common = {key: values[key] for key in (INTERNAL_KEY, CLUSTER_SECRET, MANAGEMENT_KEY)}
            return common | {REDIS_URL: self._base_url(values)}
        own = NamespaceKeys.of(values[ROOT_KEY], namespace)
        return {
            INTERNAL_KEY: own.internal_key,
            CLUSTER_SECRET: own.cluster_secret,
            MANAGEMENT_KEY: own.management_key,
            REDIS_URL: self._url_of(namespace, values),
        }

    def digest(self, namespace: str, phase: Phase) -> str:
        """Changes with all that a namespace's pods read of the installation only when they start.

        The prefix of keys in Redis is such a thing; its default does not count, so that operators
        which left it out say the same.
        """
        found = self.of(namespace, phase)
        read = [found[key] for key in self._config.key_names.values()]
        prefix = self._config.redis.prefix
        return names.digest(read if prefix == _DEFAULT_PREFIX else [*read, prefix])

    def management_keys(self, namespace: str, phase: Phase) -> list[str]:
        """Those that its workers may have, the likeliest first.

        The common one goes to none of a namespace that has keys of its own: it is not theirs.
        """
        keys = [self.of(namespace, phase)[MANAGEMENT_KEY]]
        if phase is Phase.CHANGING:
            keys.append(self.ensure()[MANAGEMENT_KEY])
        return list(dict.fromkeys(keys))

    def copy(self, namespace: str, users: list[Service], phase: Phase) -> Object:
        """The Secret of a namespace other than the operator's own."""
        values, data = self.ensure(), self.of(namespace, phase)
        data[METRICS_KEY] = values[METRICS_KEY]
        if phase is Phase.CHANGING:
            data[PREVIOUS_INTERNAL_KEY] = values[INTERNAL_KEY]
            data[PREVIOUS_CLUSTER_SECRET] = values[CLUSTER_SECRET]
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": self._config.keys_secret,
                "namespace": namespace,
                "labels": {names.MANAGED_BY: names.MANAGER, names.COMPONENT: "keys"},
                "ownerReferences": [user.shared_owner for user in users],
            },
            "data": {key: _encode(value) for key, value in data.items()},
        }

    def phase_of(self, namespace: str) -> Phase:
        """How far a former leader came with a namespace. Raises KubeError."""
        if namespace == self._config.namespace:
            return Phase.CHANGING
        found = self._kube.get(SECRET, namespace, self._config.keys_secret)
        if found is None:
            return Phase.OWN
        data = found.get("data") or {}
        if data.get(INTERNAL_KEY) == _encode(self.ensure()[INTERNAL_KEY]):
            return Phase.COMMON
        return Phase.CHANGING if PREVIOUS_INTERNAL_KEY in data else Phase.OWN

    # ---- of the installation ---------------------------------------------------------------------

    @property
    def changed_over(self) -> bool:
        return CHANGED_OVER in self.ensure()

    def finish(self) -> None:
        """No namespace has the common keys any more. Raises KubeError."""
        self._put(CHANGED_OVER, "true")

    def put_redis_users(self, acl: str) -> None:
        """What the chart's Redis reads when it starts. Raises KubeError."""
        self._put(REDIS_USERS, acl)

    def operator_url(self) -> str:
        """With which the operator reaches Redis."""
        config, values = self._config, self.ensure()
        if config.redis.own and config.redis.users:
            return self._url_of(OPERATOR, values)
        return self._base_url(values)

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

    def _put(self, key: str, value: str) -> None:
        if self.ensure().get(key) == value:
            return
        config = self._config
        self._add(self._kube.get(SECRET, config.namespace, config.keys_secret), {key: value})
        with self._lock:
            self._values[key] = value

    def _read_or_make(self) -> dict[str, str]:
        config = self._config
        found = self._kube.get(SECRET, config.namespace, config.keys_secret)
        values = {
            key: base64.b64decode(value).decode()
            for key, value in ((found or {}).get("data") or {}).items()
            if key in _KNOWN
        }
        made = {key: secrets.token_urlsafe(32) for key in _GENERATED if not values.get(key)}
        if INTERNAL_KEY in made:  # no namespace can have it
            made[CHANGED_OVER] = "true"
        if not config.redis.url and not values.get(REDIS_URL):
            raise KubeError(
                "get", f"secrets/{config.namespace}/{config.keys_secret}", 404,
                f"without a configured Redis it must hold {REDIS_URL}",
            )  # fmt: skip
        complete = values | made
        urls = {ROUTER_REDIS_URL: self._url_of(ROUTER, complete)}
        if config.redis.url:
            urls[REDIS_URL] = self._url_of(config.namespace, complete)
        made |= {key: url for key, url in urls.items() if values.get(key) != url}
        self._add(found, made)
        return values | made

    def _base_url(self, values: Mapping[str, str]) -> str:
        """As it was configured."""
        url = self._config.redis.url
        return url.replace("{password}", values[REDIS_PASSWORD]) if url else values[REDIS_URL]

    def _url_of(self, who: str, values: Mapping[str, str]) -> str:
        config = self._config
        if not config.redis.users:
            return self._base_url(values)
        password = derive(values[ROOT_KEY], "redis", who)
        return with_user(self._base_url(values), user_name(config.redis.prefix, who), password)

    def _add(self, found: Object | None, values: dict[str, str]) -> None:
        config = self._config
        if found is None:
            self._kube.create(self._secret(values))
        elif values:
            body = {"data": {key: _encode(value) for key, value in values.items()}}
            self._kube.patch("Secret", config.namespace, config.keys_secret, body)

    def _secret(self, values: dict[str, str]) -> Object:
        meta = metadata(self._kube, self._config, self._config.keys_secret, "keys")
        data = {key: _encode(value) for key, value in values.items()}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data}


def with_user(url: str, name: str, password: str) -> str:
    """A URL of Redis that comes as another user."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    user = f"{quote(name, safe='')}:{quote(password, safe='')}"
    return urlunsplit(parts._replace(netloc=f"{user}@{host}"))


def _encode(value: str) -> str:
    return base64.b64encode(value.encode()).decode()

"""What a namespace's pods hold: keys of their own, and a user of Redis.

Installations of before there were keys by namespace are changed over one namespace at a time: its
groups are replaced, and meanwhile its routers accept replicas of both kinds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from radixgrove.operator.api import names
from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.cluster.redis_users import RedisUsers
from radixgrove.operator.controller.store import Key, Store
from radixgrove.operator.kube.client import Kube
from radixgrove.operator.kube.installation import owners
from radixgrove.operator.kube.keys import Keys, Phase
from radixgrove.operator.render.common import Service
from radixgrove.operator.render.policies import redis_network_policy

logger = logging.getLogger(__name__)

_PATIENCE = 1800.0  # seconds after which a namespace that does not come to rest holds up no other


class Access:
    """Thread-safe. `start` before anything else; `enqueue`: a service is to be looked at."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        keys: Keys,
        users: RedisUsers,
        config: OperatorConfig,
        enqueue: Callable[[Key], None],
    ) -> None:
        self._kube = kube
        self._store = store
        self._keys = keys
        self._users = users
        self._config = config
        self._enqueue = enqueue
        self._lock = threading.Lock()
        self._phases: dict[str, Phase] = {}  # of namespaces that are not changed over
        self._began: dict[str, float] = {}  # monotonic, of those that are being changed
        self._settled: set[Key] = set()
        self._admitted: frozenset[str] = frozenset()  # namespaces that the policy lets in

    def start(self) -> bool:
        """Finds out how far a former leader came. Raises KubeError."""
        if self._keys.changed_over:
            return True
        namespaces = {namespace for namespace, _ in self._store.known()}
        phases = {namespace: self._keys.phase_of(namespace) for namespace in namespaces}
        with self._lock:
            self._phases = {n: phase for n, phase in phases.items() if phase is not Phase.OWN}
            for namespace, phase in self._phases.items():
                if phase is Phase.CHANGING:
                    self._began[namespace] = time.monotonic()
        self._finish()
        return True

    # ---- a look at one service -------------------------------------------------------------------

    def give(self, service: Service, others: Collection[Service]) -> str:
        """Gives a namespace its keys; their hash. Raises KubeError.

        `others`: the further services of the namespace. Read at every look: Secrets are not
        watched, and pods without their keys do not start.
        """
        namespace, phase = service.namespace, self._phase(service.namespace)
        if namespace != self._config.namespace:
            users = sorted([*others, service], key=lambda user: user.uid)
            copy = self._keys.copy(namespace, users, phase)
            self._kube.apply(copy)
        return self._keys.digest(namespace, phase)

    def admit(self, service: Service) -> None:
        """Lets a namespace's pods into Redis. Raises RedisUnavailable, KubeError."""
        services = self._services(service)
        self._users.ensure(services)
        if service.namespace not in self._admitted:  # `keep` looks after it from then on
            self._keep_policy(services)

    def management_keys(self, namespace: str) -> list[str]:
        with self._lock:
            phase = self._phases.get(namespace, Phase.OWN)
        return self._keys.management_keys(namespace, phase)

    def report(self, key: Key, keys: str, *, settled: bool) -> None:
        """After a look. `keys`: the hash that its groups were to have; `settled`: they all do."""
        namespace = key[0]
        with self._lock:
            if self._phases.get(namespace) is not Phase.CHANGING:
                return
            if not settled or keys != self._keys.digest(namespace, Phase.CHANGING):
                self._settled.discard(key)
                return
            self._settled.add(key)
            missing = {k for k in self._store.known() if k[0] == namespace} - self._settled
            if missing:
                return
            del self._phases[namespace]
        logger.info("namespace %s has keys of its own", namespace)
        self._finish()
        for other in self._store.known():
            if other[0] == namespace or other[0] in self._phases:
                self._enqueue(other)

    def keep(self) -> None:
        """Raises RedisUnavailable, KubeError."""
        self._finish()
        services = self._services()
        self._keep_policy(services)
        self._users.keep(services)

    # ---- changing over ---------------------------------------------------------------------------

    def _phase(self, namespace: str) -> Phase:
        """Its turn comes when no other namespace is being changed."""
        with self._lock:
            phase = self._phases.get(namespace, Phase.OWN)
            if phase is not Phase.COMMON:
                return phase
            now = time.monotonic()
            if any(
                found is Phase.CHANGING and now - self._began[other] < _PATIENCE
                for other, found in self._phases.items()
            ):
                return phase
            self._phases[namespace], self._began[namespace] = Phase.CHANGING, now
        logger.info("namespace %s gets keys of its own: its groups are replaced", namespace)
        return Phase.CHANGING

    def _finish(self) -> None:
        """The password that all had is none any more."""
        with self._lock:
            served = {namespace for namespace, _ in self._store.known()}
            self._phases = {n: phase for n, phase in self._phases.items() if n in served}
            over = not self._phases
        if over and not self._keys.changed_over:
            self._keys.finish()

    def _keep_policy(self, namespaces: Collection[str]) -> None:
        if not self._config.redis.labels:
            return
        policy = redis_network_policy(namespaces, self._config)
        if references := owners(self._kube, self._config):
            policy["metadata"]["ownerReferences"] = references
        self._kube.apply(policy)  # not from the cache: its namespace may not be watched
        self._admitted = frozenset(namespaces)

    def _services(self, *more: Service) -> dict[str, set[str]]:
        """Names in Redis, by namespace."""
        found: dict[str, set[str]] = {}
        for namespace, name in {*self._store.known(), *((s.namespace, s.name) for s in more)}:
            found.setdefault(namespace, set()).add(names.service_key(namespace, name))
        return found

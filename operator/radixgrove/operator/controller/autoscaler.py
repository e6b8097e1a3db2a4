"""The loop that reads the load and moves `replicas`. It asks Redis, never the API server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from radixgrove.operator.api import names
from radixgrove.operator.api.status import AutoscalingStatus
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.controller.store import Key, OtherService, Store
from radixgrove.operator.kube.client import Kube, KubeError, NotLeading
from radixgrove.operator.planning.autoscale import Load, decide
from radixgrove.service.redis_rules import RedisUnavailable

logger = logging.getLogger(__name__)

_ASLEEP_EVERY = 1.0  # seconds, for services at zero: a request waits for them


class Autoscaler:
    """`run` in a thread of its own; `last` from reconcilers."""

    def __init__(
        self,
        kube: Kube,
        store: Store,
        redis_side: RedisStore,
        serving: Callable[[Key], Sequence[str]],
        installation: str,
        every: float,
    ) -> None:
        self._kube = kube
        self._store = store
        self._redis = redis_side
        self._serving = serving
        self._installation = installation
        self._every = every
        self._last: dict[Key, AutoscalingStatus] = {}

    def last(self, key: Key) -> AutoscalingStatus | None:
        return self._last.get(key)

    def run(self, stopping: threading.Event) -> None:
        next_round = time.monotonic() + self._every
        while not stopping.wait(min(self._every, _ASLEEP_EVERY)):
            services = [
                n
                for n in self._store.services()
                if n.spec.autoscaling is not None and n.is_of(self._installation)
            ]
            for gone in self._last.keys() - {other_service.key for other_service in services}:
                del self._last[gone]
            due = time.monotonic() >= next_round
            if due:
                next_round = time.monotonic() + self._every
            for other_service in services:
                if not due and other_service.spec.replicas > 0:
                    continue
                try:
                    self._look_at(other_service)
                except (KubeError, NotLeading) as error:
                    logger.warning("cannot scale: %s", error)

    def _look_at(self, other_service: OtherService) -> None:
        scaling = other_service.spec.autoscaling
        if scaling is None or other_service.spec.suspend:
            return
        current = other_service.spec.replicas
        before = self._last.get(other_service.key, AutoscalingStatus())
        after = decide(scaling, current, self._load(other_service), before, time.time())
        desired = current if after.desired is None else after.desired
        if desired >= current:
            self._last[other_service.key] = after
        if desired != current:
            self._scale(other_service, desired, after.message)
        # Not before: a step down that was refused need not wait for another calm.
        self._last[other_service.key] = after

    def _scale(self, other_service: OtherService, desired: int, because: str) -> None:
        """Raises KubeError, NotLeading."""
        namespace, name = other_service.key
        current = other_service.spec.replicas
        logger.info("scaling %s/%s from %d to %d: %s", namespace, name, current, desired, because)
        body = {"spec": {"replicas": desired}}
        self._kube.patch(names.KIND, namespace, name, body, sub="scale")

    def _load(self, other_service: OtherService) -> Load | None:
        try:
            load = self._redis.load(other_service.service.key, self._serving(other_service.key))
        except RedisUnavailable as error:
            logger.warning("no load of %s: %s", other_service.service.key, error)
            return None
        if other_service.spec.replicas > 0 and load.replicas == 0:
            return None  # groups are starting, or have lost Redis: that is not idleness
        return load

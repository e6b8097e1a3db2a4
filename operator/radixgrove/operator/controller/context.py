"""What one look at one service gathers, decides, and was refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from radixgrove.operator.api.spec import InferenceServiceSpec
from radixgrove.operator.api.status import InferenceServiceStatus
from radixgrove.operator.cluster.redis_store import RedisAway
from radixgrove.operator.controller.store import Key
from radixgrove.operator.kube.client import KubeError
from radixgrove.operator.planning import model_cache
from radixgrove.operator.planning.diagnosis import Problem
from radixgrove.operator.planning.observed import ObservedState
from radixgrove.operator.render.common import Service
from radixgrove.operator.render.revision import InvalidEngine, InvalidSettings, Revision

logger = logging.getLogger(__name__)

Object = dict[str, Any]


@dataclass
class ReconcileContext:
    """What one reconciliation gathers and decides."""

    body: Object
    spec: InferenceServiceSpec
    service: Service
    created: float
    before: InferenceServiceStatus
    now: float
    failures: list[str] = field(default_factory=list)
    sets: list[Object] = field(default_factory=list)
    config_maps: list[Object] = field(default_factory=list)
    observed: ObservedState = field(default_factory=ObservedState)
    revisions: dict[str, Revision] = field(default_factory=dict)
    model: model_cache.CacheStep | None = None
    target: Revision | None = None
    invalid: InvalidSettings | None = None
    name_taken: str = ""
    keys: str = ""  # hash of those that the namespace's pods read; "": they could not be given
    router: Problem | None = None  # why the service's own router does not answer
    untold: bool = False  # routers know an older state than this look's

    @property
    def key(self) -> Key:
        return (self.service.namespace, self.service.name)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """A refused request is noted, and does not stop the rest."""
        try:
            yield
        except KubeError as error:
            self._failed(f"{error} ({error.status})"[:500])
        except RedisAway as error:
            logger.warning("%s/%s: Redis does not answer: %s", *self.key, error)
            self._failed("Redis does not answer; routers keep what they know")
        except InvalidEngine as error:  # of a revision that an older operator has accepted
            self._failed(f"a revision of an older operator: {error}")

    def _failed(self, words: str) -> None:
        if words not in self.failures:
            self.failures.append(words)

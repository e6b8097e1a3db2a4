"""What one reconciliation of one service gathers, decides, and was refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from radixgrove.operator.api.objects import ConfigMapObject, ServiceObject, StatefulSetObject
from radixgrove.operator.cluster.redis_users import UsersRefused
from radixgrove.operator.controller.store import Key
from radixgrove.operator.kube.client import KubeError
from radixgrove.operator.planning.service_view import ServiceView
from radixgrove.operator.render.revision import InvalidEngine
from radixgrove.protocol.registry import LeaseState
from radixgrove.service.redis_rules import RedisUnavailable

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ReconcileContext(ServiceView):
    """The service's view, and the API objects behind it."""

    body: ServiceObject  # the resource
    sets: list[StatefulSetObject] = field(default_factory=list)  # StatefulSets of its groups
    config_maps: list[ConfigMapObject] = field(
        default_factory=list
    )  # of its revisions, oldest first
    keys: str = ""  # hash of those that the namespace's pods read; "": they could not be given
    leases: Mapping[str, Mapping[str, LeaseState]] | None = None  # of members by group, once read
    redis_away: bool = False  # it has not answered in this look

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
        except UsersRefused as error:
            self._failed(str(error)[:500])
        except RedisUnavailable as error:
            logger.warning("%s/%s: Redis does not answer: %s", *self.key, error)
            self.redis_away = True
            self._failed("Redis does not answer; routers keep what they know")
        except InvalidEngine as error:  # of a revision that an older operator has accepted
            self._failed(f"a revision of an older operator: {error}")

    def _failed(self, message: str) -> None:
        if message not in self.failures:
            self.failures.append(message)

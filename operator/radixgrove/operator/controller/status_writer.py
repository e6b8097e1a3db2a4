"""Writes a service's status and Events, as far as the installed CRD keeps what is written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from radixgrove.operator.api import names
from radixgrove.operator.api.objects import Object, ServiceObject
from radixgrove.operator.api.status import GroupStatus, InferenceServiceStatus
from radixgrove.operator.controller.crd_skew import CrdSkew
from radixgrove.operator.controller.store import Key
from radixgrove.operator.kube.client import Kube, KubeError
from radixgrove.operator.kube.events import event

logger = logging.getLogger(__name__)


class StatusWriter:
    """Thread-safe for different services."""

    def __init__(self, kube: Kube, enqueue: Callable[[Key], None]) -> None:
        self._kube = kube
        self._enqueue = enqueue
        self._skew = CrdSkew(kube)

    def forget(self, key: Key) -> None:
        self._skew.forget(key)

    def outdated(self, key: Key) -> str:
        """What an older CRD drops of the service's status, and what to do about it."""
        return self._skew.message(key)

    def lasting(self, key: Key, live: Object, body: Object) -> Object:
        """`body`, a change of the status `live`, without what the CRD would drop again."""
        return self._skew.lasting(key, live, body)

    def write(self, key: Key, body: Object) -> None:
        """A merge patch of the status. Raises KubeError.

        A CRD that is older than this operator drops what it does not know, which the next
        reconciliation then says in a condition.
        """
        before = self._skew.message(key)
        answer = self._kube.patch(names.KIND, *key, {"status": body}, sub="status")
        self._skew.learn(key, body, answer.get("status") or {})
        message = self._skew.message(key)
        if message != before:
            logger.warning("%s/%s: %s", *key, message or "the CRD has been renewed")
            self._enqueue(key)

    def event(self, resource: ServiceObject, kind: str, reason: str, message: str) -> None:
        """Raises KubeError."""
        try:
            self._kube.create(event(resource, kind, reason, message, time.time()))
        except KubeError as error:
            if error.status != 409:  # the same event within the same second
                raise


def as_json(model: InferenceServiceStatus | GroupStatus) -> Object:
    """As the API server keeps it."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)

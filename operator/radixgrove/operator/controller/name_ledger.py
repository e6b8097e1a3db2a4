"""Who has which model name, kept in one ConfigMap: a restart must not move a name.

The ConfigMap is written before any router learns of a change.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import threading
import time
from collections.abc import Callable, Collection

from radixgrove.operator.api.config import OperatorConfig
from radixgrove.operator.api.objects import CONFIG_MAP, NAMESPACE, Object
from radixgrove.operator.controller.store import Key, OtherService, Store
from radixgrove.operator.kube.client import Kube, KubeError
from radixgrove.operator.kube.installation import metadata
from radixgrove.operator.planning import model_names
from radixgrove.operator.planning.model_names import Claim, Decision, Grant, Holding

logger = logging.getLogger(__name__)

_DATA = "names.json"
_LOOK_AGAIN = 60.0  # seconds between looks at what no watch reports: time, and namespaces
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class NameLedger:
    """Thread-safe. `enqueue`: a service's names have changed, and it is to be looked at."""

    def __init__(
        self, kube: Kube, store: Store, config: OperatorConfig, enqueue: Callable[[Key], None]
    ) -> None:
        self._kube = kube
        self._store = store
        self._config = config
        self._enqueue = enqueue
        self._lock = threading.Lock()
        self._ledger: dict[str, Holding] | None = None  # as the ConfigMap has it
        self._asked: tuple[frozenset[Claim], set[Key]] = (frozenset(), set())
        self._decided: Decision | None = None  # for what was asked
        self._running: dict[Key, tuple[str, ...]] = {}  # of services that were rolled back
        self._due = 0.0  # when it is to be made anew, whatever is asked
        self._namespaces: dict[str, tuple[bool, float]] = {}  # whether it exists, looked at when

    def grant(self, own: OtherService, now: float, running: tuple[str, ...] = ()) -> Grant:
        """The names that a service answers to. Raises KubeError: they could not be kept.

        `running`: those of the revision that runs, where it is not the one asked for.
        """
        with self._lock:
            if running:
                self._running[own.key] = running
            else:
                self._running.pop(own.key, None)
            if own.spec.router.dedicated:
                return model_names.all_names(self._claim(own))
            return self._decide(own, now).grants[own.key]

    def _claim(self, service: OtherService) -> Claim:
        wanted = self._running.get(service.key, service.claims.wanted)
        return dataclasses.replace(service.claims, wanted=wanted)

    def _decide(self, own: OtherService, now: float) -> Decision:
        seen = self._store.services()
        services = [own, *(other for other in seen if other.key != own.key)]
        unreadable = self._store.known() - {service.key for service in services}
        claims = frozenset(
            self._claim(service)
            for service in services
            if service is own or service.is_of(self._config.installation)
            if not service.spec.router.dedicated
        )
        known = self._decided
        if known and (claims, unreadable) == self._asked and now < self._due:
            return known
        ledger = self._load(claims)
        existing = self._existing(claims, ledger)
        hold = self._config.name_hold
        decision = model_names.decide(claims, ledger, existing, unreadable, hold, now)
        after = dict(decision.ledger)
        if after != self._ledger:
            self._kube.apply(self._config_map(after))
            self._ledger = after
        before = known.grants if known else {}
        self._asked, self._decided = (claims, unreadable), decision
        ends = [grant.retry_at for grant in decision.grants.values() if grant.retry_at is not None]
        self._due = min([*ends, now + _LOOK_AGAIN])
        for key, grant in decision.grants.items():
            if key != own.key and before.get(key, grant) != grant:
                self._enqueue(key)
        return decision

    def keep(self) -> None:
        """Puts the ConfigMap back, should it have been removed. Raises KubeError."""
        with self._lock:
            if self._ledger is not None:
                self._kube.apply(self._config_map(self._ledger))

    def _load(self, claims: Collection[Claim]) -> dict[str, Holding]:
        if self._ledger is not None:
            return self._ledger
        config = self._config
        found = self._kube.get(CONFIG_MAP, config.namespace, config.names_config_map)
        try:
            if found is not None:
                self._ledger = model_names.decode((found.get("data") or {}).get(_DATA, ""))
                return self._ledger
        except ValueError:
            logger.warning("the ConfigMap %s is malformed: made anew", config.names_config_map)
        return model_names.first_ledger(claims)

    def _existing(self, claims: Collection[Claim], ledger: dict[str, Holding]) -> set[str]:
        """Namespaces with which names begin, or that have services."""
        existing = {claim.namespace for claim in claims}
        for claim in claims:
            for name in claim.wanted:
                head, slash, _ = name.partition("/")
                if not slash or head in existing or not _NAMESPACE.fullmatch(head):
                    continue
                holding = ledger.get(name)
                # While it is not known: a new name waits, one in use stays.
                unknown = holding is None or holding.key != claim.key
                if self._exists(head, unknown):
                    existing.add(head)
        return existing

    def _exists(self, namespace: str, unknown: bool) -> bool:
        found, looked = self._namespaces.get(namespace, (unknown, 0.0))
        if looked and time.monotonic() - looked < _LOOK_AGAIN:
            return found
        try:
            found = self._kube.get(NAMESPACE, None, namespace) is not None
        except KubeError as error:
            logger.warning("cannot see whether a model name begins with a namespace: %s", error)
            return found
        self._namespaces[namespace] = (found, time.monotonic())
        return found

    def _config_map(self, ledger: dict[str, Holding]) -> Object:
        meta = metadata(self._kube, self._config, self._config.names_config_map, "names")
        data = {_DATA: model_names.encode(ledger)}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}

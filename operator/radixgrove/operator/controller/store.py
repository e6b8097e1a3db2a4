"""What the watches saw, for questions across services: names, claims and half-placed groups.

A service's own children are always read from the API server; this only says which services to look
at, and what the others do.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import ValidationError

from radixgrove.operator.api import names, times
from radixgrove.operator.api.objects import ChildObject, NodeObject, ServiceObject
from radixgrove.operator.api.spec import InferenceServiceSpec
from radixgrove.operator.planning import gang
from radixgrove.operator.planning.demand import Node
from radixgrove.operator.planning.model_names import Claim
from radixgrove.operator.planning.observed import node_of
from radixgrove.operator.render.common import Service

Key = tuple[str, str]  # namespace, name


@dataclass(frozen=True)
class OtherService:
    """A service as others see it."""

    service: Service
    created: float
    spec: InferenceServiceSpec
    claim: str = ""  # of its cached model
    operator: str = ""  # the installation that looks after it

    @cached_property
    def claims(self) -> Claim:
        """The model names that it wants."""
        return Claim(
            self.service.namespace,
            self.service.name,
            self.created,
            tuple(self.spec.model_names(self.service.name)),
            active=not self.spec.suspend,
        )

    @property
    def key(self) -> Key:
        return (self.service.namespace, self.service.name)

    def is_of(self, installation: str) -> bool:
        """Whether this installation looks after it, or none does yet."""
        return self.operator in ("", installation)

    def shares_with(self, other: OtherService) -> bool:
        """Whether both want one model name, or use one volume claim."""
        same_claim = bool(self.claim) and (self.service.namespace, self.claim) == (
            other.service.namespace,
            other.claim,
        )
        shared = same_claim or not set(self.claims.wanted).isdisjoint(other.claims.wanted)
        return shared or self.collides_with(other)

    def collides_with(self, other: OtherService) -> bool:
        """Whether objects of both would have the same name."""
        one, two = self.service, other.service
        return one.namespace == two.namespace and names.collide(one.name, two.name)

    @property
    def age(self) -> tuple[float, str, str]:
        """Older ones sort first; no two are equal."""
        return (self.created, self.service.namespace, self.service.name)


@dataclass
class Store:
    """Thread-safe."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _services: dict[Key, OtherService] = field(default_factory=dict)
    # Of every service, those with an unreadable spec included: resourceVersion, and what its users
    # ask for.
    _versions: dict[Key, str] = field(default_factory=dict)
    _asked: dict[Key, tuple[object, ...]] = field(default_factory=dict)
    _nodes: dict[str, Node] = field(default_factory=dict)
    _placements: dict[Key, list[gang.GangPlacement]] = field(default_factory=dict)
    _waiting: set[Key] = field(default_factory=set)  # for a partly placed group

    def service_seen(self, body: ServiceObject) -> bool:
        """Whether more than its status may have changed: its spec, the restart annotation, or the
        resource itself."""
        key, other_service = _key(body), other_service_of(body)
        asked = _asked_of(body)
        with self._lock:
            before = self._asked.get(key)
            self._asked[key] = asked
            self._versions[key] = body["metadata"].get("resourceVersion", "")
            if other_service is None:
                self._services.pop(key, None)
            else:
                self._services[key] = other_service
        return asked != before

    def service_gone(self, key: Key) -> list[Key]:
        """The services to look at: those that it kept from a name, a claim's care, or GPUs.

        Not all of them: when hundreds are deleted, each would cost hundreds of looks.
        """
        with self._lock:
            self._versions.pop(key, None)
            self._asked.pop(key, None)
            gone = self._services.pop(key, None)
            self._placements.pop(key, None)
            self._waiting.discard(key)
            if gone is None:
                return []
            return [
                other.key
                for other in self._services.values()
                if other.key in self._waiting or other.shares_with(gone)
            ]

    def version(self, key: Key) -> str:
        """resourceVersion of the service as last seen; "" for one that was not."""
        with self._lock:
            return self._versions.get(key, "")

    def known(self) -> set[Key]:
        """Of every service, readable or not."""
        with self._lock:
            return set(self._versions)

    def services(self) -> list[OtherService]:
        """Those that this version can read, oldest first."""
        with self._lock:
            return sorted(self._services.values(), key=lambda other_service: other_service.age)

    def node_seen(self, body: NodeObject) -> bool:
        """Whether its reachability changed."""
        node = node_of(body)
        with self._lock:
            before = self._nodes.get(node.name)
            self._nodes[node.name] = node
        return before is None or before.reachable != node.reachable

    def node_gone(self, name: str) -> None:
        with self._lock:
            self._nodes.pop(name, None)

    def nodes(self) -> dict[str, Node]:
        with self._lock:
            return dict(self._nodes)

    def placed(self, key: Key, placements: list[gang.GangPlacement], waits: bool) -> list[Key]:
        """A service's groups as just read; `waits`: for the sake of a partly placed group.

        Returns the services to look at because none of its groups is partly placed any more.
        """
        with self._lock:
            was_partly = any(p.partly for p in self._placements.get(key, []))
            self._placements[key] = placements
            if waits:
                self._waiting.add(key)
            else:
                self._waiting.discard(key)
            if was_partly and not any(p.partly for p in placements):
                return [other for other in self._waiting if other != key]
            return []

    def placements(self, besides: Key) -> list[gang.GangPlacement]:
        """Groups that are not placed whole, of all services but one."""
        with self._lock:
            others = [found for key, found in self._placements.items() if key != besides]
        return [p for found in others for p in found if p.placed < p.nodes]


def other_service_of(body: ServiceObject) -> OtherService | None:
    """None for a resource with a spec that this version cannot read."""
    meta = body["metadata"]
    try:
        spec = InferenceServiceSpec.model_validate(body.get("spec", {}))
    except ValidationError:
        return None
    status = body.get("status") or {}
    model = status.get("model", {})
    return OtherService(
        service=Service(meta["namespace"], meta["name"], meta["uid"]),
        created=times.from_text(meta.get("creationTimestamp")) or 0.0,
        spec=spec,
        claim=str(model.get("claim", "")) if isinstance(model, dict) else "",
        operator=str(status.get("operator") or ""),
    )


def _asked_of(body: ServiceObject) -> tuple[object, ...]:
    """What differs when a user asks for something else; the generation counts changes of the spec
    and not those of the status."""
    meta = body["metadata"]
    restart = (meta.get("annotations") or {}).get(names.RESTART)
    return (meta["uid"], meta.get("generation"), restart, meta.get("deletionTimestamp"))


def _key(body: ServiceObject) -> Key:
    return body["metadata"]["namespace"], body["metadata"]["name"]


def owner_key(body: ChildObject) -> Key | None:
    """The service that an object of ours belongs to."""
    meta = body.get("metadata", {})
    name = meta.get("labels", {}).get(names.SERVICE)
    return (meta["namespace"], name) if name else None


def collision(own: OtherService, other_services: list[OtherService]) -> str:
    """Which older service has objects of the names that this one's would have; "" if none."""
    for other in other_services:
        if other.age < own.age and own.collides_with(other):
            return (
                f"objects of the older service {other.service.name} have the names that this one's "
                "would have (its own name, and that with -router or -GROUP-aATTEMPT behind it): "
                "give it another name"
            )
    return ""

"""Which service answers to which model name behind the shared router. Pure.

Every service answers to scoped names, `NAMESPACE/NAME`, for its resource's name and for each name
that it wants; no other namespace can have those. Of bare names:

- a name in use stays with the service that has it, though others come to want it;
- a name that is given up, since its service is gone, suspended or named otherwise, goes to another
  service of the same namespace at once, and to another namespace only after `hold` seconds;
- a name that is free goes to the oldest service that wants it.

A suspended service answers to its names until another service takes them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from radixgrove.operator.api import times

Key = tuple[str, str]  # namespace, service

MAX_KEPT = 256  # freed names that one namespace can keep from the others


@dataclass(frozen=True)
class Claim:
    """The names that a service wants, the model's id first."""

    namespace: str
    service: str
    created: float
    wanted: tuple[str, ...]
    active: bool = True  # not suspended

    @property
    def key(self) -> Key:
        return (self.namespace, self.service)

    @property
    def age(self) -> tuple[float, str, str]:
        """Older ones sort first; no two are equal."""
        return (self.created, self.namespace, self.service)


@dataclass(frozen=True)
class Holding:
    """Who has a bare name, or had it last."""

    namespace: str
    service: str
    freed_at: float | None = None  # seconds since the epoch; None: in use

    @property
    def key(self) -> Key:
        return (self.namespace, self.service)


@dataclass(frozen=True)
class Grant:
    """The names that a service answers to, and why it does not answer to others."""

    bare: tuple[str, ...]
    scoped: tuple[str, ...]  # never empty
    problems: tuple[str, ...] = ()
    retry_at: float | None = None  # a name that it wants may be free then

    @property
    def listed(self) -> list[str]:
        """As clients see them, the id first."""
        return list(self.bare or self.scoped[:1])

    @property
    def unlisted(self) -> list[str]:
        return [name for name in self.scoped if name not in self.listed]


@dataclass(frozen=True)
class Decision:
    grants: Mapping[Key, Grant]
    ledger: Mapping[str, Holding]  # by bare name


def all_names(claim: Claim) -> Grant:
    """What a service with a router of its own answers to."""
    return Grant(claim.wanted, tuple(_scoped(claim, ())))


def first_ledger(claims: Iterable[Claim]) -> dict[str, Holding]:
    """For services that are older than the ledger: each name is the oldest one's."""
    ledger: dict[str, Holding] = {}
    for claim in sorted(claims, key=lambda claim: claim.age):
        for name in claim.wanted:
            ledger.setdefault(name, Holding(*claim.key))
    return ledger


def decide(
    claims: Iterable[Claim],
    ledger: Mapping[str, Holding],
    namespaces: Collection[str],
    unreadable: Collection[Key],
    hold: float,
    now: float,
) -> Decision:
    """The names of all services, and the ledger for the next decision.

    `namespaces`: a name that begins with one of them belongs to its services. `unreadable`: those
    that exist, and of which it is not known what they want: they keep what they have.
    """
    by_age = sorted(claims, key=lambda claim: claim.age)
    seekers: dict[str, list[Claim]] = {}
    for claim in by_age:
        for name in _bare(claim, namespaces):
            seekers.setdefault(name, []).append(claim)
    after: dict[str, Holding] = {}
    owners: dict[str, Key] = {}
    for name in dict.fromkeys([*seekers, *ledger]):
        wanting, holding = seekers.get(name, []), ledger.get(name)
        if _head(name) in namespaces:
            continue  # it has become a scoped name
        if holding is not None and holding.key in unreadable:
            after[name] = holding
            continue
        if holding is not None and _over(holding, hold, now):
            idle = any(claim.key == holding.key for claim in wanting)
            holding = holding if idle else None
        winner = _winner(wanting, holding, hold, now)
        if winner is not None:
            after[name] = Holding(*winner.key)
            owners[name] = winner.key
        elif holding is not None:
            freed_at = now if holding.freed_at is None else holding.freed_at
            after[name] = Holding(*holding.key, freed_at)
            if any(claim.key == holding.key for claim in wanting):
                owners[name] = holding.key
        elif wanting:
            owners[name] = wanting[0].key
    after = _bounded(after)
    scoped = _scoped_owners(by_age, namespaces, owners)
    return Decision(
        {claim.key: _grant(claim, namespaces, owners, scoped, after, hold) for claim in by_age},
        after,
    )


def _over(holding: Holding, hold: float, now: float) -> bool:
    return holding.freed_at is not None and now >= holding.freed_at + hold


def _winner(
    wanting: Sequence[Claim], holding: Holding | None, hold: float, now: float
) -> Claim | None:
    """The claim that gets a name: among active ones the present holder, else the oldest."""
    active = [claim for claim in wanting if claim.active]
    if holding is not None:
        same = next((claim for claim in active if claim.key == holding.key), None)
        if same is not None:
            return same
        if not _over(holding, hold, now):
            active = [claim for claim in active if claim.namespace == holding.namespace]
    return next(iter(active), None)


def _bounded(ledger: dict[str, Holding]) -> dict[str, Holding]:
    """Without the names that a namespace freed longest ago, when they are many."""
    freed: dict[str, list[tuple[float, str]]] = {}
    for name, holding in ledger.items():
        if holding.freed_at is not None:
            freed.setdefault(holding.namespace, []).append((holding.freed_at, name))
    dropped = {
        name for found in freed.values() for _, name in sorted(found, reverse=True)[MAX_KEPT:]
    }
    return {name: holding for name, holding in ledger.items() if name not in dropped}


def _head(name: str) -> str:
    """What may be a namespace in front of a name."""
    head, slash, _ = name.partition("/")
    return head if slash else ""


def _foreign(claim: Claim, name: str, namespaces: Collection[str]) -> bool:
    return _head(name) in namespaces and _head(name) != claim.namespace


def _bare(claim: Claim, namespaces: Collection[str]) -> list[str]:
    return [
        name
        for name in claim.wanted
        if _head(name) != claim.namespace and not _foreign(claim, name, namespaces)
    ]


def _scoped(claim: Claim, namespaces: Collection[str]) -> list[str]:
    """The scoped names that it wants, the model's id first."""
    own = f"{claim.namespace}/"
    wanted = [name for name in claim.wanted if not _foreign(claim, name, namespaces)]
    names = [name if name.startswith(own) else own + name for name in wanted]
    return list(dict.fromkeys([*names, own + claim.service]))


def _scoped_owners(
    by_age: Sequence[Claim], namespaces: Collection[str], owners: Mapping[str, Key]
) -> dict[str, Key]:
    """A resource's own name is its own; others go with the bare name, or to the oldest."""
    found = {f"{claim.namespace}/{claim.service}": claim.key for claim in by_age}
    for name, (namespace, service) in owners.items():
        found.setdefault(f"{namespace}/{name}", (namespace, service))
    for claim in sorted(by_age, key=lambda claim: not claim.active):
        for name in _scoped(claim, namespaces):
            found.setdefault(name, claim.key)
    return found


def _grant(
    claim: Claim,
    namespaces: Collection[str],
    owners: Mapping[str, Key],
    scoped: Mapping[str, Key],
    ledger: Mapping[str, Holding],
    hold: float,
) -> Grant:
    bare = _bare(claim, namespaces)
    problems = [
        f"the model name {name} begins with the name of another namespace"
        for name in claim.wanted
        if _foreign(claim, name, namespaces)
    ]
    ends = []
    for name in bare:
        holding = ledger.get(name)
        if owners.get(name) == claim.key or holding is None or not claim.active:
            continue
        if holding.namespace == claim.namespace:
            problems.append(f"the model name {name} belongs to {holding.service}")
        elif holding.freed_at is None:
            problems.append(f"the model name {name} is in use in another namespace")
        else:
            ends.append(holding.freed_at + hold)
            until = times.to_seconds_text(ends[-1])
            problems.append(f"the model name {name} is kept for another namespace until {until}")
    return Grant(
        bare=tuple(name for name in bare if owners.get(name) == claim.key),
        scoped=tuple(n for n in _scoped(claim, namespaces) if scoped[n] == claim.key),
        problems=tuple(problems),
        retry_at=min(ends, default=None),
    )


# ---- as it is kept -------------------------------------------------------------------------------


def encode(ledger: Mapping[str, Holding]) -> str:
    """As JSON, in an order that does not depend on how it came about."""
    return json.dumps(
        {name: [h.namespace, h.service, h.freed_at] for name, h in sorted(ledger.items())},
        separators=(",", ":"),
    )


def decode(text: str) -> dict[str, Holding]:
    """Raises ValueError when it is malformed."""
    try:
        return {
            str(name): Holding(
                str(namespace), str(service), None if freed_at is None else float(freed_at)
            )
            for name, (namespace, service, freed_at) in json.loads(text).items()
        }
    except (AttributeError, TypeError) as error:
        raise ValueError("a malformed ledger of model names") from error

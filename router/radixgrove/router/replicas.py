"""Replicas and services as the router sees them."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from radixgrove.protocol.openai.requests import ModelLimits
from radixgrove.protocol.placing import DEFAULT_TOKENS_PER_SECOND
from radixgrove.protocol.registry import (
    Lease,
    LeaseState,
    Measured,
    Registration,
    is_http_url,
)
from radixgrove.router.approximate_index import SentIndex
from radixgrove.router.trust import ReplicaKeys
from radixgrove.service.liveness import Clock

# A breaker stays open for at least so long, however soon a probe is answered.
MIN_OPEN_SECONDS = 1.0
# A replica that answers no probe for so long is lost, where its lease does not tell.
SILENT_SECONDS = 10.0


def static_address(text: str) -> tuple[str, str]:
    """Model, empty where it names none, and URL of a static replica: `URL` or `model=URL`.

    A URL may end in `/v1`, as clients of OpenAI's API are given it.

    Raises:
        ValueError: it has no HTTP address.
    """
    model, separator, url = text.partition("=")
    if not separator or "://" in model:
        model, url = "", text
    url = url.rstrip("/").removesuffix("/v1")
    if not is_http_url(url):
        raise ValueError(f"{text!r} is no HTTP address, alone or as `model=URL`")
    return model, url


class Waiting(Protocol):
    """A request that waits at a replica for its answer's first byte."""

    def give_up(self) -> None: ...


@dataclass(slots=True)
class Breaker:
    """Opens after failures in a row, lets one request try after a while, closes on an answer.

    Only a whole answer is a success: one that has begun closes the breaker, but the next failure
    opens it again. So does a probe that is answered, where the replica could not be reached.
    """

    failures_to_open: int
    open_seconds: float
    clock: Clock = time.monotonic
    failures: int = 0
    open_until: float = 0.0
    _trial_until: float = 0.0
    _unreachable: bool = False  # that is all that was wrong
    _answered: bool = False  # so is this: it said itself that it failed

    @property
    def open(self) -> bool:
        return self.failures >= self.failures_to_open

    def allows(self) -> bool:
        """Whether a request may go there now; does not take the trial."""
        now = self.clock()
        return not self.open or (now >= self.open_until and now >= self._trial_until)

    def take(self) -> None:
        """A request goes there: while half open it is the only one, for a bounded time."""
        if self.open:
            self._trial_until = self.clock() + self.open_seconds

    def answering(self) -> None:
        """An answer has begun."""
        if self.open:
            self.failures = self.failures_to_open - 1
            self._trial_until = 0.0

    def succeeded(self) -> None:
        self.failures = 0

    def failed(self, *, unreachable: bool, answered: bool = False) -> None:
        self._unreachable = unreachable and (self._unreachable or not self.failures)
        self._answered = answered and (self._answered or not self.failures)
        self.failures += 1
        if self.open:
            self.open_until = self.clock() + self.open_seconds

    @property
    def dispensable(self) -> bool:
        """Whether only errors that the replica answered opened it: one client's requests may."""
        return self.open and self._answered

    @property
    def probable(self) -> bool:
        """Whether a probe may close it."""
        return self.open and self._unreachable

    def reached(self) -> None:
        """A probe that was sent after the last failure has been answered."""
        opened = self.open_until - self.open_seconds
        if self.probable and self.clock() >= opened + MIN_OPEN_SECONDS:
            self.answering()


@dataclass(slots=True, eq=False)
class Replica:
    """One replica: registered in Redis, or static (`registration` is None)."""

    id: str
    url: str
    breaker: Breaker
    registration: Registration | None = None
    lease: Lease | None = None
    keys: ReplicaKeys = field(default_factory=ReplicaKeys)
    measured: Measured | None = None  # as it runs
    models: list[str] = field(default_factory=list)
    ready: bool = False  # by its lease, or its last probe where no lease speaks for it
    leased: bool = False  # its lease was running when Redis was last read
    drained: bool = False  # by hand, through the management port
    seen: float = 0.0  # monotonic time at which Redis or a probe last spoke for it
    # Monotonic times: when a request last failed there, when it was last probed, when the probe was
    # sent that it last answered with 200, and since when it has answered none at all.
    doubted: float = -math.inf
    probed: float = -math.inf
    proven: float = -math.inf
    silent_since: float = math.inf
    waiting: set[Waiting] = field(default_factory=set)
    # This process's own view, all that counts without Redis:
    in_flight: int = 0
    busy_until: float = 0.0  # monotonic time by which prefills sent there should be done
    open_ms: float = 0.0  # of prefill that requests in flight there were estimated to need
    sent: SentIndex = field(default_factory=SentIndex)

    @property
    def group(self) -> str:
        """Replicas of one group live and die together, and are drained together."""
        return self.registration.group if self.registration is not None else self.id

    @property
    def generation(self) -> str:
        return self.registration.generation if self.registration is not None else ""

    @property
    def token_ms(self) -> float:
        """Estimated milliseconds to prefill a token."""
        measured = self.measured.prefill_tokens_per_second if self.measured else 0.0
        rate = self.registration.engine.prefill_tokens_per_second if self.registration else 0.0
        return 1000.0 / (measured or rate or DEFAULT_TOKENS_PER_SECOND)

    @property
    def host_token_ms(self) -> float:
        """Estimated milliseconds to load a token back from host memory; 0 without a host tier."""
        rate = self.registration.engine.host_tokens_per_second if self.registration else 0.0
        return 1000.0 / rate if rate else 0.0

    @property
    def max_running(self) -> int:
        return self.registration.engine.max_running if self.registration is not None else 0

    @property
    def state(self) -> str:
        """For people: one of `metrics.STATES`."""
        lease_state = self.lease.state if self.lease is not None else None
        if self.drained or lease_state is LeaseState.DRAINING:
            return "draining"
        if not self.breaker.allows():
            return "broken"
        return "ready" if self.ready else "not-ready"

    @property
    def in_doubt(self) -> bool:
        """Whether requests failed there since it last said that it serves."""
        return self.doubted > self.proven

    @property
    def doubtful(self) -> bool:
        """Whether a probe may say something new of it."""
        return self.in_doubt or self.breaker.probable

    def give_up_waiting(self) -> None:
        """Requests without a byte yet go elsewhere."""
        for waiting in list(self.waiting):
            waiting.give_up()

    def available(self, *, at_need: bool = False) -> bool:
        """Whether requests may go there. `at_need`: no other replica is available."""
        allowed = self.breaker.allows() or (at_need and self.breaker.dispensable)
        return self.ready and not self.drained and allowed


@dataclass(slots=True, eq=False)
class Service:
    """Replicas that serve one model under the same names."""

    name: str
    models: list[str]
    scoped: list[str] = field(default_factory=list)  # names that it answers to, and does not list
    replicas: dict[str, Replica] = field(default_factory=dict)
    created: int = 0  # Unix seconds, for /v1/models
    held: int = 0  # requests waiting for a replica
    last_held: float = -math.inf  # monotonic time at which one began, or wanted, to wait
    turn: int = 0  # of the round-robin policy
    served: float = 0.0  # monotonic time at which it last had a replica
    off: bool = False  # no replicas are wanted, and no request wakes any

    registration: Registration | None = None  # the one that stands for the registered replicas
    limits: ModelLimits | None = None  # None: no registered replica, nothing is known

    @property
    def model(self) -> str:
        return self.models[0]

    def answers_to(self, model: str) -> bool:
        return model in self.models or model in self.scoped

    def others_of_group(self, replica: Replica) -> list[Replica]:
        """The other members of a replica's group."""
        group = [other for other in self.replicas.values() if other.group == replica.group]
        return [other for other in group if other is not replica]

    def set_replicas(self, replicas: dict[str, Replica]) -> None:
        """Replaces the replicas and what follows from them.

        Weights may differ during a rollout: prompts are hashed in the namespace of the most
        replicas, the others are placed on by load alone. Limits are the most generous ones; a
        prompt too long for a replica is not placed there.
        """
        self.replicas = replicas
        known = [r.registration for r in replicas.values() if r.registration is not None]
        self.registration = self.limits = None
        if known:
            namespaces = Counter(registration.namespace for registration in known)
            namespace = namespaces.most_common(1)[0][0]
            self.registration = next(r for r in known if r.namespace == namespace)
            self.limits = ModelLimits(
                max_model_len=max(r.engine.max_model_len for r in known),
                vocab_size=max(r.engine.vocab_size for r in known) or 1 << 31,
            )

"""What a request does when its replica failed before the client had a byte of the answer.

It is held and placed again. A replica that may have begun with it costs one of `retries`, for it
may have died of the request; one that never got it costs nothing, and only the request's own
deadline ends that. A replica that failed it is passed by while there is another one, and until it
has said itself, to a probe sent after the failure, that it serves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from radixgrove.protocol.errors import PeerError
from radixgrove.protocol.openai.errors import ApiError
from radixgrove.router.replicas import Replica


@dataclass(slots=True)
class ReplicaAnswer:
    """A replica's answer: whole, or the first bytes of a stream."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """What kind of failure it was, and what follows from that."""

    reason: str  # a label of metrics
    delivered: bool = True  # the replica may have begun with the request
    blame: bool = True  # the replica is at fault, and its breaker counts it
    retry: bool = True  # another replica may do better
    hold: bool = True  # it is worth waiting for one
    unreachable: bool = False  # a probe that the replica answers disproves it
    answered: bool = False  # with an error of its own: it may be the request's fault


CONNECT = Failure("connect", delivered=False, unreachable=True)
NO_RESOURCES = Failure("no_resources", delivered=False, blame=False)  # of this router's own
DIED = Failure("died", unreachable=True)  # before the first byte
LOST = Failure("lost", unreachable=True)  # it answers no probe either
NO_ANSWER = Failure("no_answer")  # what it sent, and ended, is none
LATE = Failure("first_byte_timeout", retry=False)  # sent again, the same job takes as long again
TOO_LARGE = Failure("answer_too_large", blame=False, retry=False)
UNAVAILABLE = Failure("status_503", blame=False)  # loading, draining, gone
STREAM_BROKE = Failure("stream_broke", retry=False)  # the client has its beginning


def refusal(status: int) -> Failure | None:
    """What an answer's status says of its replica; None: it is for the client."""
    match status:
        case 429:  # full, and no less so in a moment
            return Failure("status_429", blame=False, hold=False)
        case 503:
            return UNAVAILABLE
        case 502 | 504:
            return Failure(f"status_{status}")
        case 500:
            return Failure("status_500", retry=False, answered=True)
    return None


class AttemptFailed(PeerError):
    """Nothing has reached the client yet; `answer` is what it gets if no replica does better."""

    def __init__(self, failure: Failure, answer: ApiError | ReplicaAnswer) -> None:
        super().__init__(failure.reason)
        self.failure = failure
        self.answer = answer


@dataclass(slots=True)
class Course:
    """One request's way from replica to replica. Times are of one monotonic clock."""

    retries: int  # how often it may still be delivered anew
    hold_until: float  # being without a replica; time at one that had it does not count
    answer_by: float  # the first byte, wherever it comes from
    failure: Failure | None = None  # the latest
    answer: ApiError | ReplicaAnswer | None = None  # with it
    _failed: dict[Replica, float] = field(default_factory=dict)  # and until when: see `proven`

    @property
    def deadline(self) -> float:
        """How long it may wait for a replica."""
        return min(self.hold_until, self.answer_by)

    @property
    def starved(self) -> bool:
        """Whether the latest failure was none of a replica's."""
        return self.failure is NO_RESOURCES

    @property
    def may_wait(self) -> bool:
        return self.failure is None or self.failure.hold

    def failed(
        self,
        replica: Replica,
        error: AttemptFailed,
        began: float,
        now: float,
        others: Iterable[Replica] = (),
    ) -> bool:
        """Notes an attempt that `began` at `replica`; returns whether the request goes on.

        `others` of its group live and die with it, though one may have room when it has none.
        """
        failure = self.failure = error.failure
        self.answer = error.answer
        if failure.delivered:
            self.retries -= 1
            self.hold_until += now - began
        if not self.starved:
            # That it serves is no news of a full one: this request does not ask it again.
            self._failed[replica] = now if failure.hold else math.inf
        if not self.starved and failure.hold:
            self._failed |= dict.fromkeys(others, now)
        return failure.retry and self.retries >= 0 and now < self.answer_by

    def passed_by(self) -> Iterator[list[Replica]]:
        """Replicas not to be placed on: all that failed it; if that leaves none, fewer."""
        yield list(self._failed)
        unproven = [replica for replica, at in self._failed.items() if replica.proven <= at]
        if len(unproven) < len(self._failed):
            yield unproven

"""For debugging: whether the ranks of a member run the same plans, and draw the same tokens."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec

from radixgrove.worker.engine.orders import Compared
from radixgrove.worker.plan import StepPlan

_MOST_STEPS = 1024  # that wait for a rank's digest; one that is so far behind is found otherwise


def plan_digest(plan: StepPlan) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(plan), digest_size=16).digest()


def samples_digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(list(tokens)), digest_size=16).digest()


@dataclass(slots=True)
class _Step:
    """What the leader ran, once it is known, and what others did."""

    own: Compared | None = None
    said: dict[int, Compared] = field(default_factory=dict)


class Agreement:
    """The leader's view. Its main thread says what was right, readers what other ranks say."""

    def __init__(
        self, ranks: Collection[int], sampling: Collection[int], name: Callable[[int], str]
    ) -> None:
        """
        Args:
            ranks: the others.
            sampling: those of the stage that samples.
        """
        self._ranks = ranks
        self._sampling = sampling
        self._name = name
        self._steps: dict[int, _Step] = {}
        self._lock = threading.Lock()
        self.difference: str | None = None  # the first one, in words

    def expect(self, step: Compared) -> None:
        """What the leader ran, and what the member has drawn."""
        with self._lock:
            self._steps.setdefault(step.step_id, _Step()).own = step
            self._compare(step.step_id)
            if len(self._steps) > _MOST_STEPS:
                del self._steps[next(iter(self._steps))]

    def hear(self, rank: int, step: Compared) -> None:
        with self._lock:
            self._steps.setdefault(step.step_id, _Step()).said[rank] = step
            self._compare(step.step_id)

    def _compare(self, step_id: int) -> None:
        step = self._steps[step_id]
        if step.own is None:
            return
        for rank, said in step.said.items():
            what = []
            if said.plan != step.own.plan:
                what.append("ran another plan")
            if rank in self._sampling and said.samples != step.own.samples:
                what.append("drew other tokens")
            if what and self.difference is None:
                self.difference = f"in step {step_id} {self._name(rank)} {' and '.join(what)}"
        if len(step.said) == len(self._ranks):
            del self._steps[step_id]

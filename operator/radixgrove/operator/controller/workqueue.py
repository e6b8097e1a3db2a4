"""One keyed queue between watches and reconcilers: a key is queued once and worked on once.

A key added while it is being worked on comes again afterwards. Work that fails is repeated after a
back-off, which `add` cuts short and `hint` does not. Keys that are due are handed out in turns over
their namespaces, so that many keys of one namespace do not hold up those of another. Bounded by the
number of keys: superseded entries are swept before they outnumber the others.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from radixgrove.operator.api import metrics

K = TypeVar("K", bound=Hashable)

_SPARE = 64  # superseded entries that are not worth a sweep


@dataclass
class _State:
    due: float | None = None  # when it is to be worked on, monotonic
    ready: bool = False  # it was due and waits for its turn
    busy: bool = False
    hinted: bool = False  # while it was busy
    failures: int = 0  # in a row
    version: int = 0  # of the heap entry that counts


class WorkQueue(Generic[K]):
    """Thread-safe. Adding never blocks."""

    def __init__(
        self,
        namespace: Callable[[K], Hashable],
        base_delay: float = 0.5,
        max_delay: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespace(key)`: what keys are handed out in turns over. Delays are in seconds."""
        self._namespace = namespace
        self._base, self._max = base_delay, max_delay
        self._clock = clock
        self._states: dict[K, _State] = {}
        self._heap: list[tuple[float, int, K]] = []  # due, version, key
        self._turns: OrderedDict[Hashable, deque[K]] = OrderedDict()  # ready keys by namespace
        self._sequence = 0
        self._changed = threading.Condition()
        self._closed = False

    def add(self, key: K, delay: float = 0.0) -> None:
        """Work on `key` in `delay` seconds, or sooner when it is already due sooner."""
        with self._changed:
            if self._closed:
                return
            state = self._states.setdefault(key, _State())
            due = self._clock() + max(delay, 0.0)
            if state.ready or (state.due is not None and state.due <= due):
                return
            state.due = due
            if not state.busy:
                self._push(key, state)

    def hint(self, key: K) -> None:
        """Work on `key` now, or at the end of its back-off when its last work has failed."""
        with self._changed:
            state = self._states.get(key)
            if state is not None and state.busy:
                state.hinted = True
            elif state is None or not state.failures:
                self.add(key)

    def get(self, timeout: float) -> K | None:
        """The next due key, or None after `timeout` seconds or once the queue is closed."""
        end = self._clock() + timeout
        with self._changed:
            while not self._closed:
                now = self._clock()
                self._collect(now)
                if self._turns:
                    return self._take()
                if now >= end:
                    return None
                following = self._heap[0][0] if self._heap else end
                self._changed.wait(min(following, end) - now)
            return None

    def done(self, key: K, *, failed: bool = False) -> float:
        """The work on `key` has ended; failures come again, later each time. Returns the delay."""
        with self._changed:
            state = self._states[key]
            state.busy = False
            hinted, state.hinted = state.hinted, False
            state.failures = state.failures + 1 if failed else 0
            delay = 0.0
            if failed:
                delay = min(self._base * 2.0 ** min(state.failures - 1, 16), self._max)
            if failed or hinted:
                again = self._clock() + delay
                state.due = again if state.due is None else min(state.due, again)
            if state.due is not None:
                self._push(key, state)
            else:
                del self._states[key]
            self._measure()
            return delay

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        with self._changed:
            return len(self._states)

    def _push(self, key: K, state: _State) -> None:
        self._sequence += 1
        state.version = self._sequence
        assert state.due is not None
        heapq.heappush(self._heap, (state.due, state.version, key))
        if len(self._heap) > 2 * len(self._states) + _SPARE:
            self._heap = [entry for entry in self._heap if self._counts(entry)]
            heapq.heapify(self._heap)
        self._measure()
        self._changed.notify()

    def _collect(self, now: float) -> None:
        """Moves keys that are due to their namespace's line, the first due first."""
        while self._heap:
            entry = due, _, key = self._heap[0]
            counts = self._counts(entry)
            if counts and due > now:
                return
            heapq.heappop(self._heap)
            if counts:
                state = self._states[key]
                state.ready, state.due = True, None
                self._turns.setdefault(self._namespace(key), deque()).append(key)

    def _take(self) -> K:
        """The first key of the namespace that has waited longest for its turn."""
        namespace, line = self._turns.popitem(last=False)
        key = line.popleft()
        if line:
            self._turns[namespace] = line  # behind the others
        state = self._states[key]
        state.ready, state.busy = False, True
        self._measure()
        return key

    def _counts(self, entry: tuple[float, int, K]) -> bool:
        """Whether no later entry superseded this one."""
        _, version, key = entry
        state = self._states.get(key)
        return (
            state is not None
            and not (state.busy or state.ready)
            and state.due is not None
            and state.version == version
        )

    def _measure(self) -> None:
        now = self._clock()
        waiting = sum(
            1 for s in self._states.values() if s.ready or (s.due is not None and s.due <= now)
        )
        metrics.QUEUE_DEPTH.set(waiting)

"""One keyed queue between watches and reconcilers: a key is queued once and worked on once.

A key added while it is being worked on comes again afterwards. Bounded by the number of keys:
superseded wishes are swept before they outnumber the others.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from radixgrove.operator.api import metrics

K = TypeVar("K", bound=Hashable)

_SPARE = 64  # superseded entries that are not worth a sweep


@dataclass
class _State:
    due: float | None = None  # when it wants to be worked on, monotonic
    busy: bool = False
    failures: int = 0
    version: int = field(default=0)  # of the heap entry that counts


class WorkQueue(Generic[K]):
    """Thread-safe. Adding never blocks."""

    def __init__(self, base_delay: float = 0.5, max_delay: float = 60.0) -> None:
        self._base, self._max = base_delay, max_delay
        self._states: dict[K, _State] = {}
        self._heap: list[tuple[float, int, K]] = []  # due, version, key
        self._sequence = 0
        self._ready = threading.Condition()
        self._closed = False

    def add(self, key: K, delay: float = 0.0) -> None:
        """Work on `key` in `delay` seconds, or sooner when it is already due sooner."""
        with self._ready:
            if self._closed:
                return
            state = self._states.setdefault(key, _State())
            due = time.monotonic() + max(delay, 0.0)
            if state.due is not None and state.due <= due:
                return
            state.due = due
            if not state.busy:
                self._push(key, state)

    def get(self, timeout: float) -> K | None:
        """The next due key, or None after `timeout` seconds or once the queue is closed."""
        end = time.monotonic() + timeout
        with self._ready:
            while not self._closed:
                now = time.monotonic()
                key, wait = self._next(now)
                if key is not None:
                    return key
                if now >= end:
                    return None
                self._ready.wait(min(wait, end - now))
            return None

    def done(self, key: K, *, failed: bool = False) -> float:
        """The work on `key` has ended; failures come again, later each time. Returns the delay."""
        with self._ready:
            state = self._states[key]
            state.busy = False
            state.failures = state.failures + 1 if failed else 0
            delay = 0.0
            if failed:
                delay = min(self._base * 2.0 ** min(state.failures - 1, 16), self._max)
                again = time.monotonic() + delay
                state.due = again if state.due is None else min(state.due, again)
            if state.due is not None:
                self._push(key, state)
            elif not failed:
                del self._states[key]
            self._measure()
            return delay

    def close(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def __len__(self) -> int:
        with self._ready:
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
        self._ready.notify()

    def _next(self, now: float) -> tuple[K | None, float]:
        while self._heap:
            entry = due, _, key = self._heap[0]
            if not self._counts(entry):
                heapq.heappop(self._heap)
                continue
            if due > now:
                return None, due - now
            heapq.heappop(self._heap)
            state = self._states[key]
            state.busy, state.due = True, None
            self._measure()
            return key, 0.0
        return None, 3600.0

    def _counts(self, entry: tuple[float, int, K]) -> bool:
        """Whether no later entry superseded this one."""
        _, version, key = entry
        state = self._states.get(key)
        return state is not None and not state.busy and state.version == version

    def _measure(self) -> None:
        now = time.monotonic()
        waiting = sum(1 for s in self._states.values() if s.due is not None and s.due <= now)
        metrics.QUEUE_DEPTH.set(waiting)

"""Comparing desired and live objects, and the keyed queue."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from radixgrove.operator.kube import covers
from radixgrove.operator.workqueue import WorkQueue


@pytest.mark.parametrize(
    ("live", "desired", "same"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": {"x": 1, "default": True}}, {"a": {"x": 1}}, True),
        ({"a": [{"name": "x", "protocol": "TCP"}]}, {"a": [{"name": "x"}]}, True),
        ({"a": [1, 2]}, {"a": [1]}, False),
        ({}, {"a": []}, True),
        ({}, {"a": False}, True),
        ({}, {"a": "x"}, False),
        ({"memory": "1Gi"}, {"memory": "1024Mi"}, True),
        ({"memory": "1Gi"}, {"memory": "1025Mi"}, False),
        ({"cpu": "500m"}, {"cpu": "0.5"}, True),
        ({"o": [{"uid": "x"}, {"uid": "y"}]}, {"o": [{"uid": "y"}]}, True),
        ({"o": [{"uid": "x"}]}, {"o": [{"uid": "y"}]}, False),
    ],
)
def test_a_live_object_may_have_more_than_is_desired(live: Any, desired: Any, same: bool) -> None:
    assert covers(live, desired) is same


def test_a_key_is_worked_on_once_however_often_it_is_added() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(100):
        queue.add("a")
    assert queue.get(1) == "a"
    assert queue.get(0.01) is None


def test_a_key_added_while_it_is_worked_on_comes_again_afterwards() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    assert queue.get(1) == "a"
    queue.add("a")
    assert queue.get(0.01) is None, "never twice at the same time"
    queue.done("a")
    assert queue.get(1) == "a"
    queue.done("a")
    assert len(queue) == 0


def test_the_earlier_of_two_wishes_counts() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a", delay=60)
    queue.add("a", delay=0)
    assert queue.get(1) == "a"
    queue.add("b", delay=0)
    queue.add("b", delay=60)
    assert queue.get(1) == "b"


def test_failures_come_again_later_each_time() -> None:
    queue: WorkQueue[str] = WorkQueue(base_delay=0.001, max_delay=0.004)
    queue.add("a")
    delays = []
    for _ in range(5):
        assert queue.get(1) == "a"
        delays.append(queue.done("a", failed=True))
    assert delays == [0.001, 0.002, 0.004, 0.004, 0.004]
    assert queue.get(1) == "a"
    queue.done("a")
    assert len(queue) == 0


def test_closing_wakes_whoever_waits() -> None:
    queue: WorkQueue[str] = WorkQueue()
    found: list[str | None] = []
    waiter = threading.Thread(target=lambda: found.append(queue.get(60)))
    waiter.start()
    queue.close()
    waiter.join(5)
    assert found == [None]


def test_many_threads_never_share_a_key() -> None:
    queue: WorkQueue[int] = WorkQueue()
    busy: set[int] = set()
    clashes: list[int] = []
    done: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while (key := queue.get(0.2)) is not None:
            with lock:
                if key in busy:
                    clashes.append(key)
                busy.add(key)
            with lock:
                busy.discard(key)
                done.append(key)
            queue.done(key)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        for key in range(20):
            queue.add(key)
    for thread in threads:
        thread.join(10)
    assert clashes == []
    assert set(done) == set(range(20))

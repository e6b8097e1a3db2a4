"""The keyed queue: one look at a key at a time, back-off, and turns over namespaces."""

from __future__ import annotations

import threading
import time

from radixgrove.operator.controller.workqueue import WorkQueue
from tests.conftest import wait_until

Key = tuple[str, str]
A, B = ("ns", "a"), ("ns", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def queue_at(clock: Clock, base_delay: float = 1.0, max_delay: float = 60.0) -> WorkQueue[Key]:
    return WorkQueue(lambda key: key[0], base_delay, max_delay, clock)


def fail(queue: WorkQueue[Key], key: Key, clock: Clock) -> float:
    """The key is worked on when it is due, and fails. Returns the back-off, which lies ahead."""
    while queue.get(0) != key:
        clock.now += 0.25
    return queue.done(key, failed=True)


def test_a_key_is_worked_on_once_however_often_it_is_added() -> None:
    queue = queue_at(Clock())
    for _ in range(100):
        queue.add(A)
        queue.hint(A)
    assert queue.get(0) == A
    assert queue.get(0) is None
    queue.done(A)
    assert len(queue) == 0


def test_a_key_added_while_it_is_worked_on_comes_again_afterwards() -> None:
    queue = queue_at(Clock())
    for want in (queue.add, queue.hint):
        queue.add(A)
        assert queue.get(0) == A
        want(A)
        assert queue.get(0) is None, "never twice at the same time"
        queue.done(A)
        assert queue.get(0) == A
        queue.done(A)
        assert len(queue) == 0


def test_the_earlier_of_two_wishes_counts() -> None:
    clock = Clock()
    queue = queue_at(clock)
    queue.add(A, delay=60)
    queue.add(A, delay=10)
    queue.add(A, delay=30)
    clock.now += 9.9
    assert queue.get(0) is None
    clock.now += 0.2
    assert queue.get(0) == A


def test_failures_come_again_later_each_time_up_to_a_bound() -> None:
    clock = Clock()
    queue = queue_at(clock, base_delay=1.0, max_delay=4.0)
    queue.add(A)
    assert [fail(queue, A, clock) for _ in range(5)] == [1.0, 2.0, 4.0, 4.0, 4.0]
    clock.now += 4.0
    assert queue.get(0) == A
    queue.done(A)
    assert len(queue) == 0
    queue.add(A)
    assert fail(queue, A, clock) == 1.0, "a success has reset it"


def test_a_hint_never_shortens_a_back_off_and_an_addition_does() -> None:
    clock = Clock()
    queue = queue_at(clock, base_delay=8.0)
    queue.add(A)
    assert queue.get(0) == A
    queue.hint(A)  # the event of a write of this very look
    queue.done(A, failed=True)
    queue.hint(A)  # one that arrives later
    clock.now += 7.9
    assert queue.get(0) is None
    queue.add(A)
    assert queue.get(0) == A
    queue.add(A)  # what a user asks for meanwhile
    queue.done(A, failed=True)
    assert queue.get(0) == A


def test_a_hint_is_worked_on_at_once_where_nothing_has_failed() -> None:
    queue = queue_at(Clock())
    queue.add(A, delay=900)  # the next look at rest
    queue.hint(A)
    assert queue.get(0) == A


def test_keys_of_one_namespace_do_not_hold_up_those_of_another() -> None:
    queue = queue_at(Clock())
    many = [("many", str(number)) for number in range(100)]
    for key in many:
        queue.add(key)
    queue.add(("few", "0"))
    queue.add(("few", "1"))
    order = [queue.get(0) for _ in range(102)]
    assert [order.index(("few", name)) for name in ("0", "1")] == [1, 3]
    assert [key for key in order if key in many] == many, "each namespace in order"


def test_superseded_wishes_do_not_pile_up() -> None:
    queue = queue_at(Clock())
    for _ in range(1000):
        queue.add(A, delay=900)
        queue.add(A)
        assert queue.get(0) == A
        queue.done(A)
    assert len(queue._heap) < 100
    queue.add(A, delay=900)
    queue.add(B)
    assert queue.get(0) == B


def test_closing_wakes_a_waiting_thread() -> None:
    queue: WorkQueue[Key] = WorkQueue(lambda key: key[0])
    found: list[Key | None] = []
    waiter = threading.Thread(target=lambda: found.append(queue.get(60)))
    waiter.start()
    queue.close()
    waiter.join(30)
    assert found == [None]


def test_many_threads_never_share_a_key() -> None:
    queue: WorkQueue[int] = WorkQueue(lambda key: key % 3)
    busy: set[int] = set()
    clashes: list[int] = []
    done: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while (key := queue.get(60)) is not None:
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
    wait_until(lambda: set(done) == set(range(20)), what="every key's turn")
    queue.close()
    for thread in threads:
        thread.join(30)
    assert clashes == []

"""A watcher's clock counts only the time in which the watcher looked."""

from __future__ import annotations

from radixgrove.service.liveness import WatchClock


class Seconds:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_time_passes_while_the_watcher_looks() -> None:
    seconds = Seconds()
    watch = WatchClock(seconds)
    began = watch.now()
    for _ in range(20):
        seconds.now += 1.0
        watch.now()
    assert watch.now() - began == 20.0


def test_of_time_in_which_the_watcher_did_not_run_a_second_counts() -> None:
    seconds = Seconds()
    watch = WatchClock(seconds)
    began = watch.now()
    seconds.now += 1.0
    watch.now()
    seconds.now += 8 * 3600.0
    assert watch.now() - began == 2.0
    seconds.now += 2.0
    assert watch.now() - began == 4.0


def test_a_watcher_that_is_always_late_still_judges() -> None:
    seconds = Seconds()
    watch = WatchClock(seconds)
    began = watch.now()
    for _ in range(10):
        seconds.now += 3.0
        watch.now()
    assert watch.now() - began == 10.0

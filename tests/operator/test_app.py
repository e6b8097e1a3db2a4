"""What the operator's threads do while its lease is in doubt: a late renewal costs no work."""

from __future__ import annotations

import threading
from typing import Any

from operator_builders import CONFIG

from radixgrove.operator.app import App
from radixgrove.operator.kube import Kube, NotLeading

KEY = ("team-a", "llama")


class OneDoubt:
    """Stands for the reconciler: its first look finds the lease in doubt."""

    def __init__(self) -> None:
        self.looks = 0
        self.looked_twice = threading.Event()

    def reconcile(self, key: tuple[str, str]) -> None:
        assert key == KEY
        self.looks += 1
        if self.looks == 1:
            raise NotLeading("the renewal is late")
        self.looked_twice.set()


class Doubts(Kube):
    """An API server to which nothing may be written, now or later."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def get(self, *_: Any) -> None:
        self.asked.set()
        raise NotLeading("the renewal is late")


def test_a_look_that_finds_the_lease_in_doubt_is_repeated() -> None:
    stopping, reconciler = threading.Event(), OneDoubt()
    app = App(Doubts(), CONFIG, stopping)
    app.queue.add(KEY)
    worker = threading.Thread(target=app._work, args=("reconciler-0", reconciler))
    worker.start()
    try:
        assert reconciler.looked_twice.wait(10)
    finally:
        stopping.set()
        app.stop()
        worker.join(10)
    assert not worker.is_alive()


def test_a_start_in_doubt_goes_on_until_the_process_stops() -> None:
    stopping, kube = threading.Event(), Doubts()
    app = App(kube, CONFIG, stopping)
    starting = threading.Thread(target=app.start)
    starting.start()
    assert kube.asked.wait(10)
    kube.asked.clear()
    assert kube.asked.wait(10)  # again
    stopping.set()
    starting.join(10)
    assert not starting.is_alive()

"""The operator's threads: a lease in doubt, a silent watch, and what probes hear of it."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any, cast

import pytest

from radixgrove.operator.api import metrics, names
from radixgrove.operator.cluster.redis_store import RedisStore
from radixgrove.operator.controller import app as module
from radixgrove.operator.controller.access import Access
from radixgrove.operator.controller.app import App
from radixgrove.operator.controller.health import HealthServer
from radixgrove.operator.kube.client import Kube, KubeError, NotLeading
from radixgrove.operator.kube.keys import Keys
from tests.operator.memory_kube import MemoryKube
from tests.operator.operator_builders import CONFIG

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
        assert reconciler.looked_twice.wait(30)
    finally:
        stopping.set()
        app.stop()
        worker.join(30)
    assert not worker.is_alive()


def test_a_start_in_doubt_goes_on_until_the_process_stops() -> None:
    stopping, kube = threading.Event(), Doubts()
    app = App(kube, CONFIG, stopping)
    starting = threading.Thread(target=app.start)
    starting.start()
    assert kube.asked.wait(30)
    kube.asked.clear()
    assert kube.asked.wait(30)  # again
    stopping.set()
    starting.join(30)
    assert not starting.is_alive()


def test_a_start_that_waits_for_the_api_server_is_alive() -> None:
    stopping, kube = Turns(nothing, nothing), Doubts()
    app = App(kube, CONFIG, stopping)
    app._heartbeat -= 3600
    app.start()
    assert app.trouble() == ""


def test_a_thread_that_dies_is_told_to_the_liveness_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    stopping = threading.Event()
    app = App(MemoryKube(), CONFIG, stopping)

    def dies() -> None:
        raise ZeroDivisionError

    app._thread("autoscaler", dies)
    (thread,) = app._threads
    thread.join(30)
    assert app.trouble() == "the thread autoscaler has ended"
    stopping.set()
    assert app.trouble() == "", "all of them end when the app does"


def test_the_keys_are_looked_at_as_long_as_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    kube = MemoryKube()
    keys = Keys(kube, CONFIG)
    before = keys.ensure()
    stands = lambda: ("Secret", CONFIG.namespace, CONFIG.keys_secret) in kube.objects  # noqa: E731

    def removed() -> None:
        assert stands()
        del kube.objects["Secret", CONFIG.namespace, CONFIG.keys_secret]

    def refused(*_: Any) -> None:
        raise KubeError("get", "secrets", 403, "forbidden")

    class Moody(Keys):
        moods = iter([refused, Keys.keep, Keys.keep])

        def keep(self) -> None:
            next(self.moods)(self)

    keys.__class__ = Moody
    App(kube, CONFIG, Turns(nothing, removed, removed))._keep(keys)
    assert "cannot look after keys and names: get secrets: forbidden" in caplog.text
    assert stands()
    assert keys.ensure() == Keys(kube, CONFIG).ensure() == before


# ---- liveness ------------------------------------------------------------------------------------


def resource(version: str) -> dict[str, Any]:
    return {
        "kind": names.KIND,
        "metadata": {
            "namespace": KEY[0], "name": KEY[1], "uid": "u", "resourceVersion": version,
        },
        "spec": {"model": {"source": "pvc://models/llama"}},
    }  # fmt: skip


class Turns(threading.Event):
    """Instead of the wait between two comparisons: something happens, until nothing is left."""

    def __init__(self, *happens: Callable[[], object]) -> None:
        super().__init__()
        self._happens = iter(happens)

    def wait(self, timeout: float | None = None) -> bool:
        following = next(self._happens, None)
        if following is None:
            self.set()
            return True
        following()
        return False


def nothing() -> None:
    pass


def test_a_watch_that_fell_silent_is_healed_and_told_to_the_liveness_probe() -> None:
    kube, said = MemoryKube(), list[str]()
    listen = lambda: said.append(app.trouble())  # noqa: E731
    app = App(kube, CONFIG, Turns(nothing, listen, listen, listen, listen))
    kube.add(resource("1"))  # of which no event comes
    app._guard()
    # Lagging once is no silence; at the very same version twice it is.
    assert said == ["", "the watch is silent", "", ""]
    assert app.queue.get(5) == KEY
    assert [found.key for found in app.store.services()] == [KEY]


def test_a_watch_that_is_merely_late_is_not_silent() -> None:
    kube, said = MemoryKube(), list[str]()

    def newer() -> None:
        """The event of the version before arrives, and the next version is there already."""
        if kube.of(names.KIND):
            app.service_event(None, kube.of(names.KIND)[0])
        kube.add(resource("1"))
        said.append(app.trouble())

    app = App(kube, CONFIG, Turns(*[newer] * 5))
    app._guard()
    assert said == [""] * 5
    assert app.trouble() == ""


def unreadable(version: str) -> dict[str, Any]:
    """Of a newer version of the operator."""
    return resource(version) | {"spec": {"ofTheFuture": True}}


def test_a_spec_that_cannot_be_read_is_no_silent_watch() -> None:
    kube = MemoryKube()
    app = App(kube, CONFIG, Turns(nothing, nothing, nothing))
    app.service_event(None, kube.add(unreadable("1")))
    assert app.queue.get(5) == KEY
    app._guard()
    assert app.trouble() == ""


def test_routers_keep_the_groups_of_a_service_whose_spec_cannot_be_read() -> None:
    kept: list[Collection[str]] = []
    table = SimpleNamespace(keep_only=kept.append, rewrite=nothing)
    app = App(MemoryKube(), CONFIG, Turns())
    app.service_event(None, unreadable("1"))
    app._rewrite(cast(RedisStore, table), cast(Access, SimpleNamespace(keep=lambda: None)))
    assert kept == [{"team-a.llama"}]


@pytest.mark.parametrize("body", [resource("1"), unreadable("1")], ids=["readable", "unreadable"])
def test_a_service_whose_deletion_was_not_heard_is_looked_at(body: dict[str, Any]) -> None:
    app = App(MemoryKube(), CONFIG, Turns(nothing))
    app.store.service_seen(body)
    app._guard()
    assert app.queue.get(5) == KEY


def test_a_loop_or_a_look_that_hangs_is_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App(MemoryKube(), CONFIG, threading.Event())
    clock = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    app.beat()
    app._busy_since["reconciler-0"] = clock[0]
    clock[0] += 59
    assert app.trouble() == ""
    clock[0] += 2
    assert app.trouble() == "the event loop is stuck"
    clock[0] += 600
    app.beat()
    assert app.trouble() == "a reconciliation is stuck"


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_probes_are_answered_on_addresses_of_both_families(address: str) -> None:
    if address == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    with (
        HealthServer(0, lambda: "") as server,
        urllib.request.urlopen(f"http://{address}:{server.port}/livez", timeout=5) as said,
    ):
        assert said.status == 200


def test_probes_and_metrics_are_answered_whether_it_leads_or_not() -> None:
    trouble = [""]

    def ask(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5) as said:
                return said.status, said.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    metrics.LEADER.set(0)  # a standby
    with HealthServer(0, lambda: trouble[0]) as server:
        assert ask("/readyz")[0] == ask("/livez")[0] == 200
        status, text = ask("/metrics")
        assert status == 200
        for name in ("queue_depth", "reconcile_seconds_count", "leader"):
            assert f"\nradixgrove_operator_{name} " in text
        assert "# TYPE radixgrove_operator_reconcile_errors_total counter" in text
        trouble[0] = "the watch is silent"
        status, text = ask("/livez")
        assert (status, json.loads(text)) == (503, {"status": "the watch is silent"})
        assert ask("/")[0] == 404

"""What the operator asks of pods: real sockets on addresses of the loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from radixgrove.operator.api import names
from radixgrove.operator.cluster import worker_probe
from radixgrove.operator.cluster.worker_probe import WorkerProbe
from radixgrove.operator.planning.observed import Group, Pod
from radixgrove.worker.messages import EngineState, PhaseReport
from tests.conftest import STOP_SECONDS, find_free_port

KEY = "management-key"
LOADING = PhaseReport(EngineState.LOADING, "weights: 3 of 7 files", 0.4)


class Handler(BaseHTTPRequestHandler):
    """As a worker answers on its management port, and to `/livez`."""

    def do_GET(self) -> None:
        if self.path == "/status" and self.headers["Authorization"] != f"Bearer {KEY}":
            self.send_error(401)
            return
        body = msgspec.json.encode({"state": "starting", "phase": LOADING})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def answering(
    address: str, port: int, handler: type[BaseHTTPRequestHandler] = Handler
) -> Iterator[None]:
    with ThreadingHTTPServer((address, port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[STOP_SECONDS])
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join(5)


@contextlib.contextmanager
def hanging(address: str, port: int) -> Iterator[None]:
    """The kernel completes connections, and no process reads: a machine that hangs."""
    with socket.socket() as listener:
        listener.bind((address, port))
        listener.listen()
        yield


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    found = find_free_port()
    monkeypatch.setattr(names, "API_PORT", found)
    monkeypatch.setattr(names, "MANAGEMENT_PORT", found)
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no answer is to come in time."""
    monkeypatch.setattr(worker_probe, "_ANSWER_SECONDS", 0.3)


class Endless(BaseHTTPRequestHandler):
    """An answer of which a little comes, again and again; `left` once its reader has gone."""

    left = threading.Event()

    def do_GET(self) -> None:
        try:
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
            for _ in range(200):
                self.wfile.write(b" ")
                time.sleep(0.05)
        except OSError:
            self.left.set()

    def log_message(self, format: str, *args: object) -> None:
        pass


def pod(rank: int, **fields: object) -> Pod:
    address = f"127.0.0.{rank + 2}"
    made = Pod(f"llama-0-a1-{rank}", f"uid-{rank}", rank, f"n{rank}", "Running", running=True)
    return replace(made, **{"address": address, **fields})  # type: ignore[arg-type]


def test_a_machine_that_hangs_is_told_from_one_that_refuses_and_one_that_answers(
    port: int,
) -> None:
    with answering("127.0.0.2", port), hanging("127.0.0.3", port):
        silent = WorkerProbe().silent_nodes([pod(0), pod(1), pod(2)])
    assert silent == {"n1"}


@pytest.mark.usefixtures("impatient")
def test_when_nobody_answers_no_node_is_blamed(port: int) -> None:
    with hanging("127.0.0.2", port), hanging("127.0.0.3", port):
        assert WorkerProbe().silent_nodes([pod(0), pod(1)]) == set()


def test_only_pods_that_should_answer_are_asked(port: int) -> None:
    with answering("127.0.0.2", port), hanging("127.0.0.3", port):
        others = [
            pod(1, deleted_at=1.0),
            pod(1, phase="Failed"),
            pod(1, address=""),
        ]
        assert WorkerProbe().silent_nodes([pod(0), *others]) == set()
    assert WorkerProbe().silent_nodes([]) == set()


def group(index: int, *pods: Pod) -> Group:
    return Group(f"llama-{index}-a1", "set", index, 1, "r1", len(pods), 0.0, pods=pods)


def test_starting_groups_tell_their_phase(port: int) -> None:
    with answering("127.0.0.2", port):
        found = WorkerProbe().phases([group(3, pod(0))], ["another key", KEY])
        assert found == ["group 3: loading, 40%: weights: 3 of 7 files"]
        assert WorkerProbe().phases([group(3, pod(0, ready=True))], [KEY]) == [], "it has started"
        assert WorkerProbe().phases([group(3, pod(0))], ["another key"]) == []


def test_a_worker_that_takes_a_key_hears_of_no_other(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    respond = Handler.do_GET

    def do_get(handler: Handler) -> None:
        asked.append(handler.headers["Authorization"])
        respond(handler)

    monkeypatch.setattr(Handler, "do_GET", do_get)
    with answering("127.0.0.2", port):
        WorkerProbe().phases([group(3, pod(0))], [KEY, "another key"])
    assert asked == [f"Bearer {KEY}"]


def test_a_worker_that_does_not_answer_tells_nothing(port: int) -> None:
    assert WorkerProbe().phases([group(3, pod(0)), group(4, pod(1, running=False))], [KEY]) == []


def test_an_answer_that_never_ends_is_given_up(port: int) -> None:
    with answering("127.0.0.2", port, Endless), answering("127.0.0.3", port):
        found = WorkerProbe().phases([group(3, pod(0)), group(4, pod(1))], [KEY])
        assert found == ["group 4: loading, 40%: weights: 3 of 7 files"]
        assert Endless.left.wait(30), "it had not read all of it"


def test_an_answer_that_is_nested_too_deeply_tells_nothing(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(msgspec.json, "encode", lambda _: b'{"phase": ' + b"[" * 60_000)
    with answering("127.0.0.2", port):
        assert WorkerProbe().phases([group(3, pod(0))], [KEY]) == []

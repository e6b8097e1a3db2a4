"""The commands that talk to a running cluster, against an endpoint with canned answers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from radixgrove.cli.commands.ps import age
from tests.cli.test_command import radixgrove
from tests.conftest import serving

REPLICA: dict[str, Any] = {
    "replica": "replica-0",
    "model": "m",
    "state": "ready",
    "running": 2,
    "waiting": 1,
    "waiting_tokens": 340,
    "in_flight": 0,
    "kv_use": 0.123,
    "hit_rate": 0.5,
    "host_use": 0.75,
    "host_hit_rate": 0.2,
    "generation_age": 7500.0,
    "device": "cpu",
}


class Cluster(BaseHTTPRequestHandler):
    """Router and management in one; answers come from class attributes."""

    seen: list[tuple[str, str, Any, str | None]] = []
    replicas: list[dict[str, Any]] = []
    stream: list[str] = []
    missing = False  # nothing is there, as at another port of a router
    locked = False

    def _take(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.seen.append((self.command, self.path, body, self.headers.get("authorization")))

    def do_GET(self) -> None:
        self._take()
        if self.missing:
            error = {"message": f"Invalid URL (GET {self.path}).", "code": "unknown_url"}
            self._answer({"error": error}, 404)
        elif self.locked:
            self._answer({"error": {"message": "Send it as 'Authorization: Bearer'."}}, 401)
        elif self.path == "/status":
            answer = {"router": "r", "policy": "prefix", "redis": "up", "in_flight": 0}
            self._answer({**answer, "replicas": self.replicas})
        else:
            self._answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self._take()
        if self.path.endswith("/undrain"):
            self._answer({"state": "ready"})
            return
        if self.path.endswith("/drain"):
            if "replica-0" not in self.path:
                self._answer({"error": {"message": "There is no replica 'x'."}}, 404)
                return
            self.replicas[0].update(state="draining", running=0, waiting=0)
            self._answer({"state": "draining"})
            return
        self._answer("".join(f"data: {event}\n\n" for event in self.stream))

    def _answer(self, content: Any, status: int = 200) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def piece(text: str) -> str:
    return json.dumps({"choices": [{"delta": {"content": text}}]})


@pytest.fixture
def url() -> Iterator[str]:
    Cluster.seen, Cluster.replicas = [], [dict(REPLICA)]
    Cluster.missing = Cluster.locked = False
    Cluster.stream = [piece("Par"), piece("is."), "[DONE]"]
    with serving(Cluster) as address:
        yield address


def test_ps_is_one_line_a_replica(url: str) -> None:
    result = radixgrove("ps", "--management-url", url, RADIXGROVE_MANAGEMENT_KEY="k\n")
    assert result.returncode == 0
    head, row = result.stdout.splitlines()[1:3]
    columns = dict(zip(re.split(r"  +", head), re.split(r"  +", row), strict=True))
    assert columns == {
        **{"REPLICA": "replica-0", "MODEL": "m", "STATE": "ready", "AGE": "2h", "DEVICE": "cpu"},
        **{"RUN": "2", "QUEUE": "1", "QUEUED TOKENS": "340"},
        **{"KV": "12%", "KV HITS": "30%", "HOST": "75%", "HOST HITS": "20%"},
    }
    assert Cluster.seen[0][3] == "Bearer k"
    as_json = radixgrove("ps", "--management-url", url, "--json")
    assert json.loads(as_json.stdout)["replicas"] == [REPLICA]


PS, CHAT = ["ps", "--management-url"], ["chat", "--url"]


@pytest.mark.parametrize(("command", "port"), [(PS, "8001"), (CHAT, "8000")])
def test_another_port_is_answered_with_which_one_it_is(
    url: str, command: list[str], port: str
) -> None:
    Cluster.missing = True
    result = radixgrove(*command, url)
    assert result.returncode == 3
    assert re.search(rf"{url} has no \S+: {command[1]} is .*:{port} by default", result.stderr)


def test_a_workers_management_port_is_no_routers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "do_GET", lambda self: self._answer({"state": "ready"}))
    result = radixgrove(*PS, url)
    assert result.returncode == 3
    assert f"{url} is no router's: --management-url is" in result.stderr


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        (PS, "RADIXGROVE_MANAGEMENT_KEY"),
        (CHAT, "RADIXGROVE_API_KEY"),
    ],
)
def test_a_key_that_is_asked_for_is_named_by_its_variable(
    url: str, command: list[str], variable: str
) -> None:
    Cluster.locked = True
    without = radixgrove(*command, url, OPENAI_API_KEY="")
    wrong = radixgrove(*command, url, **{variable: "x"})
    assert (without.returncode, wrong.returncode) == (3, 3)
    assert f"{url} asks for a key: set {variable}\n" in without.stderr
    assert f"{url} refuses the key of {variable}\n" in wrong.stderr
    if command is CHAT:
        other = radixgrove(*command, url, OPENAI_API_KEY="x")
        assert f"{url} refuses the key of OPENAI_API_KEY\n" in other.stderr


@pytest.mark.parametrize("wrong", ["http://127.0.0.1:99999", "ftp://127.0.0.1", "http://"])
def test_a_url_that_is_none_is_a_wrong_value(wrong: str) -> None:
    result = radixgrove(*CHAT, wrong, "hello")
    assert result.returncode == 2
    assert f"'{wrong}' is not like http://127.0.0.1:8000" in result.stderr


def test_ages_are_short() -> None:
    assert [age(s) for s in (None, 5, 150, 7500, 200000)] == ["-", "5s", "2m", "2h", "2d"]


def test_drain_waits_until_nothing_is_left(url: str) -> None:
    result = radixgrove("drain", "replica-0", "--wait", "--management-url", url)
    assert result.returncode == 0
    assert "replica-0 is drained" in result.stdout
    assert ("POST", "/replicas/replica-0/drain") in [entry[:2] for entry in Cluster.seen]


def test_undrain_asks_for_it(url: str) -> None:
    result = radixgrove("undrain", "replica/0", "--management-url", url)
    assert (result.returncode, result.stdout) == (0, "replica/0 gets requests again\n")
    assert Cluster.seen[-1][:2] == ("POST", "/replicas/replica%2F0/undrain")


def test_drain_gives_up_at_its_deadline(url: str) -> None:
    Cluster.replicas = [dict(REPLICA), {**REPLICA, "replica": "replica-00"}]
    arguments = ["drain", "replica-00", "--wait", "--timeout", "0.1", "--management-url", url]
    result = radixgrove(*arguments)
    assert result.returncode == 1
    assert "still has 3 requests" in result.stderr


def test_drain_of_an_unknown_replica_says_so(url: str) -> None:
    result = radixgrove("drain", "x", "--management-url", url)
    assert result.returncode == 1
    assert "There is no replica 'x'." in result.stderr


def test_chat_keeps_the_conversation(url: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "radixgrove.cli", "chat", "--url", url, "--system", "S"],
        input="first\nsecond\n/reset\nthird\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "Paris.\n" * 3
    sent = [entry[2]["messages"] for entry in Cluster.seen if entry[0] == "POST"]
    roles = [[message["role"] for message in turn] for turn in sent]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert sent[1][2]["content"] == "Paris."


def test_chat_does_not_take_a_broken_stream_for_an_answer(url: str) -> None:
    Cluster.stream = [piece("Par")]
    result = radixgrove("chat", "--url", url, "question")
    assert result.returncode == 3
    assert "the answer is incomplete" in result.stderr
    Cluster.stream = [piece("Par"), json.dumps({"error": {"message": "The replica died."}})]
    result = radixgrove("chat", "--url", url, "question")
    assert result.returncode == 1
    assert "The replica died." in result.stderr

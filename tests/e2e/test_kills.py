"""What clients see when a part dies under load: an answer or an error, never a cut-off success."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis

from tests.conftest import RedisServer, wait_until
from tests.e2e.conftest import UpProcess, chat_body, wait_idle


@dataclass
class Streamed:
    """How one stream ended, as a client that reads to the end sees it."""

    status: int = 0
    text: str = ""
    finished: bool = False  # a finish reason came
    done: bool = False  # [DONE] came
    error: bool = False  # an error event, an error status, or a broken connection

    @property
    def truncated_success(self) -> bool:
        """The one thing that must never be: a clean end without a finish."""
        return not self.error and not (self.finished and self.done)


def stream(url: str, question: str, **changes: object) -> Streamed:
    result = Streamed()
    body = chat_body(question, stream=True, **changes)
    try:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, timeout=90, verify=False
        ) as answer:
            result.status = answer.status_code
            if answer.status_code != 200:
                result.error = True
                return result
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    result.done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    result.error = True
                for choice in event.get("choices", []):
                    result.text += choice["delta"].get("content") or ""
                    result.finished |= choice["finish_reason"] is not None
    except httpx.HTTPError:
        result.error = True
    return result


class Load:
    """Streams in the background until stopped."""

    def __init__(self, url: str, workers: int) -> None:
        self.results: list[Streamed] = []
        self._url = url
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(workers)
        self._futures = [self._pool.submit(self._run, i) for i in range(workers)]

    def _run(self, index: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            self.results.append(
                stream(self._url, f"Story {index}.{turn}, please.", max_tokens=48, ignore_eos=True)
            )

    def stop(self) -> list[Streamed]:
        self._stop.set()
        for future in self._futures:
            future.result(timeout=120)
        self._pool.shutdown()
        return self.results


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path, redis_server: RedisServer
) -> Iterator[UpProcess]:
    """One cluster for all: what recovers from one death must survive the next."""
    process = UpProcess(tmp_path_factory.mktemp("up") / "log", ("--redis-url", redis_server.url))
    try:
        process.start()
        yield process
    finally:
        process.kill()


@pytest.fixture
def up(shared: UpProcess) -> UpProcess:
    """The cluster, whole, on a Redis that the test may kill."""

    def whole() -> bool:
        return [entry["state"] for entry in shared.replicas().values()] == ["ready", "ready"]

    wait_until(whole, deadline=90, what="two replicas that are ready")
    wait_idle(shared, deadline=60)
    return shared


@pytest.mark.slow
def test_replica_killed_under_load(up: UpProcess) -> None:
    before = up.replicas()["replica-0"]["generation"]
    load = Load(up.url, 6)
    wait_until(lambda: len(load.results) >= 4, deadline=90, what="load")
    up.engine("replica-0").send_signal(signal.SIGKILL)
    killed = len(load.results)
    wait_until(lambda: len(load.results) >= killed + 8, deadline=120, what="traffic after it")
    results = load.stop()
    assert not [result for result in results if result.truncated_success]
    assert any(result.finished for result in results[killed:]), "the other replica serves on"

    def restarted() -> bool:
        entry = up.replicas().get("replica-0")
        return entry is not None and entry["generation"] != before and entry["state"] == "ready"

    wait_until(restarted, deadline=90, what="a new generation of replica-0")
    assert stream(up.url, "What is the capital of France?").text == (
        "The capital of France is Paris."
    )


@pytest.mark.slow
def test_stopped_engine_is_found_and_replaced(up: UpProcess) -> None:
    """SIGSTOP: alive, holding its port, computing nothing."""
    engine = up.engine("replica-1")
    before = len(up.log.read_text())
    engine.send_signal(signal.SIGSTOP)
    wait_until(lambda: not engine.is_running(), deadline=40, what="the end of the stuck engine")
    wait_until(
        lambda: "rank 0" in up.log.read_text()[before:], what="a message that names the rank"
    )
    answer = stream(up.url, "What is the capital of France?")
    assert answer.text == "The capital of France is Paris."
    wait_until(
        lambda: up.replicas().get("replica-1", {}).get("state") == "ready",
        deadline=90,
        what="replica-1's return",
    )


@pytest.mark.slow
def test_redis_killed_and_back_empty(up: UpProcess, redis_server: RedisServer) -> None:
    question = "Tell me about the city of Paris. " * 12
    assert stream(up.url, question, max_tokens=8).finished
    redis_server.kill()
    for _ in range(4):
        result = stream(up.url, question, max_tokens=8)
        assert result.finished, result
        assert not result.error
    redis_server.start()

    def both_back() -> bool:
        """Registered anew: the router remembers them as ready anyway."""
        with redis.Redis.from_url(redis_server.url) as client:
            registered = sum(
                map(client.hlen, client.scan_iter("radixgrove-up-*:{default}:replicas"))
            )
        status = up.status()
        ready = [entry for entry in status["replicas"] if entry["state"] == "ready"]
        return registered == 2 and len(ready) == 2 and status["redis"] == "up"

    wait_until(both_back, deadline=60, what="both replicas in the empty Redis")

    def found_again() -> bool:
        """The index is rebuilt from the replicas' own trees: the prefix is found again."""
        answer = httpx.post(
            f"{up.url}/v1/chat/completions",
            json=chat_body(question, max_tokens=2),
            headers={"x-radixgrove-debug": "1"},
            timeout=60,
            verify=False,
        )
        details = answer.raise_for_status().json()["usage"]["prompt_tokens_details"]
        expected = int(answer.headers["x-radixgrove-matched-tokens"])
        return bool(details["cached_tokens"] >= expected > 0)

    wait_until(found_again, deadline=60, what="the rebuilt index")


@pytest.mark.slow
def test_router_killed(up: UpProcess) -> None:
    """Its clients' connections break, its reservations vanish, the next router serves."""
    results: list[Streamed] = []
    thread = threading.Thread(
        target=lambda: results.append(
            stream(up.url, "A long story.", max_tokens=600, ignore_eos=True)
        )
    )
    thread.start()

    def busy() -> bool:
        return any(entry["running"] > 0 for entry in up.replicas().values())

    wait_until(busy, deadline=30, what="the request to run")
    up.find("radixgrove.cli", "router", "router.yaml").send_signal(signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    assert results[0].error
    assert not results[0].done

    def answers() -> bool:
        try:
            return httpx.get(f"{up.url}/readyz", timeout=5, verify=False).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(answers, deadline=40, what="the restarted router")
    wait_idle(up, deadline=20)
    answer = stream(up.url, "What is the capital of France?")
    assert answer.text == "The capital of France is Paris."

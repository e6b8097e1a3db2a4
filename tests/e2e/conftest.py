"""A real cluster per module: `radixgrove up` as a user would start it, on the demo model."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.conftest import find_free_port, wait_until

MODEL = "SmolLM2-135M-Instruct"
_START_SECONDS = 150.0


@dataclass
class UpProcess:
    """`radixgrove up` and what can be asked of it, or done to it."""

    log: Path
    arguments: tuple[str, ...] = ()
    port: int = field(default_factory=find_free_port)
    management_port: int = field(default_factory=find_free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_dir(self) -> Path:
        """Where the parts' logs are."""
        return self.log.parent / "parts"

    def start(self) -> None:
        command = [
            *(sys.executable, "-m", "radixgrove.cli", "up", "--port", str(self.port)),
            *("--management-port", str(self.management_port), "--max-model-len", "2048"),
            *("--device", "cpu", "--kv-tokens", "16384", "--log-dir", str(self.log_dir)),
            # A slow machine is no reason to refuse, or to place without Redis.
            *("--grammar-timeout", "60", "--redis-timeout", "10"),
            *self.arguments,
        ]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(command, stdout=sink, stderr=sink)
        wait_until(self._ready, deadline=_START_SECONDS, what="the cluster")

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        return "radixgrove is ready" in self.log.read_text()

    def descendants(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def find(self, *words: str) -> psutil.Process:
        """The one descendant with all `words` in its command line."""
        found = [
            process
            for process in self.descendants()
            if all(any(word in part for part in _command_line(process)) for word in words)
        ]
        assert len(found) == 1, (words, [_command_line(process) for process in found])
        return found[0]

    def engine(self, replica: str) -> psutil.Process:
        """The engine process of a replica."""
        agent = self.find("worker", f"{replica}.yaml")
        engines = [
            child
            for child in agent.children(recursive=True)
            if any("radixgrove.worker.engine.loop" in part for part in _command_line(child))
        ]
        assert len(engines) == 1
        return engines[0]

    def status(self) -> dict[str, Any]:
        answer = httpx.get(
            f"http://127.0.0.1:{self.management_port}/status", timeout=30, verify=False
        )
        status: dict[str, Any] = answer.raise_for_status().json()
        return status

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Status entries by replica id."""
        entries = self.status()["replicas"]
        return {entry["replica"]: entry for entry in entries}

    def stop(self) -> None:
        """Ctrl-C, and nothing may be left."""
        assert self.process is not None
        family = self.descendants()
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(180) == 0, self.log.read_text()[-4000:]
        wait_until(
            lambda: not any(process.is_running() for process in family), what="the last process"
        )

    def kill(self) -> None:
        """Whatever happened, end it; children die with their parent."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Iterator[UpProcess]:
    """Two replicas behind one router, for the tests of a module."""
    up = UpProcess(tmp_path_factory.mktemp("up") / "log")
    try:
        up.start()
        yield up
    finally:
        up.kill()


def chat_body(question: str, **changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        "temperature": 0,
    }
    return body | changes


def wait_idle(cluster: UpProcess, *, deadline: float = 60.0) -> None:
    """Until no replica runs or queues anything."""

    def idle() -> bool:
        return all(
            entry["running"] == 0 and entry["waiting"] == 0 for entry in cluster.replicas().values()
        )

    wait_until(idle, deadline=deadline, what="idle replicas")

"""A real agent process over a fake engine and a fake frontend."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.checkout import ROOT
from tests.conftest import wait_until
from tests.forks import Fork
from tests.worker.agent import run_agent
from tests.worker.spoken import Spoken

HERE = Path(__file__).parent


class AgentProcess(Spoken):
    """An agent with its output, its children and its management port.

    `read`: else it is a command, and writes to a pipe that has no reader.
    """

    def __init__(self, notes: Path, settings: dict[str, Any], *, read: bool = True) -> None:
        self.notes = notes
        self._clock = notes / "wall-clock-shift"
        self.shift_wall_clock(0)
        given = json.dumps(settings)
        environment = {
            "PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}",
            "TMPDIR": str(notes),
            "WALL_CLOCK_SHIFT": str(self._clock),
        }
        command = [sys.executable, str(HERE / "run_agent.py"), given]
        process = (
            Fork(run_agent.main, [given], notes / "log", environment)
            if read
            else subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE)
        )
        super().__init__(process, notes / "log")
        self.children: list[psutil.Process] = []

    def heard(self) -> str:
        """The messages that engines got so far, a line each."""
        path = self.notes / "engine-heard"
        return path.read_text() if path.exists() else ""

    def wait_ready(self) -> None:
        self.wait_for("ready after")
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        return next(child for child in self.children if module in child.cmdline())

    def rank(self, rank: int) -> psutil.Process:
        """Its process, once it runs."""

        def found() -> list[psutil.Process]:
            children = psutil.Process(self.process.pid).children()
            return [
                c for c in children if "fake_engine" in c.cmdline() and c.cmdline()[-1] == str(rank)
            ]

        wait_until(lambda: bool(found()), what=f"rank {rank}")
        return found()[0]

    def end(self, deadline: float = 60.0) -> int:
        """Wait for the exit; everything it started must be gone by then."""
        code = super().end(deadline)
        _, alive = psutil.wait_procs(self.children, timeout=30)
        assert not alive, f"left behind: {alive}"
        return code

    def manage(
        self, method: str, path: str, body: Any = None, key: str | None = None
    ) -> tuple[int, Any]:
        found = re.search(r"management port: ([\d.:]+)", self.output)
        assert found, self.output
        request = urllib.request.Request(
            f"http://{found[1]}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"}
            | ({"Authorization": f"Bearer {key}"} if key else {}),
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def shift_wall_clock(self, seconds: int) -> None:
        fresh = self._clock.with_suffix(".new")
        fresh.write_text(str(seconds))
        fresh.rename(self._clock)

    def kill(self) -> None:
        for process in [*self.children, psutil.Process(self.process.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait(60)


TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory that passes for a model as long as it is not loaded."""
    directory = tmp_path / "tiny-model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY_CONFIG))
    (directory / "tokenizer.json").write_text(Tokenizer(WordLevel({"a": 0}, "a")).to_str())
    save_file({"model.norm.weight": np.ones(16)}, directory / "model.safetensors")
    return directory


def write_index(model_dir: Path, name: str) -> None:
    """Makes the model one of shards, of which the index names this one."""
    (model_dir / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": name}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))


StartAgent = Callable[..., AgentProcess]
RefusedAgent = Callable[..., tuple[int, str]]


@pytest.fixture
def refused_agent(model_dir: Path, tmp_path: Path) -> RefusedAgent:
    """Exit status and output of an agent that ends before it starts anything."""

    def run(environment: dict[str, str] | None = None, **settings: Any) -> tuple[int, str]:
        given = json.dumps({"model": str(model_dir), "port": 0, "management_port": 0, **settings})
        log = tmp_path / "agent.log"
        agent = Fork(run_agent.main, [given], log, environment)
        try:
            return agent.wait(60), log.read_text()
        finally:
            agent.kill()

    return run


@pytest.fixture
def start_agent(model_dir: Path) -> Iterator[StartAgent]:
    started: list[AgentProcess] = []

    def start(*notes_to_leave: str, read: bool = True, **settings: Any) -> AgentProcess:
        # Not under tmp_path: a Unix socket's path may have 107 bytes.
        notes = Path(tempfile.mkdtemp(prefix="agent-"))
        for note in notes_to_leave:
            (notes / note).touch()
        base = {"model": str(model_dir), "port": 0, "management_port": 0, "drain_timeout": 5}
        agent = AgentProcess(notes, {**base, **settings}, read=read)
        started.append(agent)
        return agent

    yield start
    for agent in started:
        with suppress(psutil.NoSuchProcess):
            if agent.process.poll() is None:
                agent.kill()
        shutil.rmtree(agent.notes)

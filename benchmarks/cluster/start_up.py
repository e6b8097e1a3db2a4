"""From a clean clone to a cluster that answers: what somebody waits for who tries it out.

    python -m benchmarks.cluster.start_up

Clones the last commit into a temporary directory, with caches of its own, so that every package and
the model are downloaded. Then: set-up (`.ci/setup run`), the first start of two replicas, which
fetches and converts the model, and a warm one; `radixgrove --help` at last. Lines go to
benchmarks/results/start_up.jsonl.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import results
from benchmarks.load.subjects import table
from radixgrove.cli.redis_server import free_port

READY = "Ctrl-C"  # on the last line of what `up` says when it is ready
STOP_SECONDS = 60.0


def set_up(clone: Path, environment: dict[str, str]) -> float:
    """Seconds of `.ci/setup run`."""
    begin = time.perf_counter()
    subprocess.run([".ci/setup", "run"], cwd=clone, env=environment, check=True)
    return time.perf_counter() - begin


def start(clone: Path, environment: dict[str, str]) -> float:
    """Seconds from the command to its announcement that the cluster is ready."""
    ports = ["--port", str(free_port()), "--management-port", str(free_port())]
    begin = time.perf_counter()
    cluster = subprocess.Popen(
        [".venv/bin/radixgrove", "up", "--replicas", "2", *ports],
        cwd=clone,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert cluster.stdout is not None
        if not any(READY in line for line in cluster.stdout):
            raise RuntimeError("the cluster ended before it was ready")
        return time.perf_counter() - begin
    finally:
        cluster.send_signal(signal.SIGTERM)
        cluster.wait(STOP_SECONDS)


def ask_for_help(clone: Path, environment: dict[str, str]) -> float:
    """Seconds of `radixgrove --help`, the best of five."""

    def once() -> float:
        command = [".venv/bin/radixgrove", "--help"]
        begin = time.perf_counter()
        subprocess.run(command, cwd=clone, env=environment, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin

    return min(once() for _ in range(5))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="radixgrove-start-") as scratch:
        clone = Path(scratch) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(results.ROOT), str(clone)], check=True)
        head = ["git", "-C", str(clone), "rev-parse", "--short=12", "HEAD"]
        # What is measured is the clone, whatever lies uncommitted here.
        os.environ["BENCHMARK_COMMIT"] = subprocess.check_output(head, text=True).strip()
        own = {"XDG_CACHE_HOME": f"{scratch}/cache", "VENV": ".venv"}
        environment = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        environment |= own
        seconds = {
            "set_up": set_up(clone, environment),
            "first_start": start(clone, environment),
            "warm_start": start(clone, environment),
            "help": ask_for_help(clone, environment),
        }
    for metric, value in seconds.items():
        results.record(
            {
                "benchmark": "start_up",
                "workload": "clean clone, two replicas",
                "model": "SmolLM2-135M-Instruct",
                "subject": "radixgrove",
                "metric": metric,
                "value": round(value, 2),
                "unit": "s",
            }
        )
    print(table([[name, f"{value:.2f} s"] for name, value in seconds.items()], ("phase", "time")))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What it costs on an idle machine that threads of a CPU engine sleep soon instead of spinning.

    python -m benchmarks.engine.openmp_waiting [--rounds 12] [--any-load]

Two engines, each a process of its own since OpenMP reads its environment once, decode in turns: one
waits as GNU's OpenMP does by itself, the other as workers let it. The ratio of each pair of turns
counts. On a machine with other work the figures say nothing of an idle one: it is refused.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack

from benchmarks import results
from benchmarks.engine.cpu_engine import make_engine, run_engine, workloads
from benchmarks.load.subjects import table
from radixgrove.worker.agent import demo_model
from radixgrove.worker.agent.preparation import openmp_waiting

IDLE_LOAD = 0.5
PAUSE = 0.2  # seconds; the other's threads have gone to sleep then
NAMES = ("bs1_decode", "bs8_decode")


def turns() -> None:
    """Runs the workloads named on standard input, and prints the seconds of each."""
    engine = make_engine(demo_model.ensure(), "float32", len(os.sched_getaffinity(0)))
    known = {workload.name: workload for workload in workloads()}
    for line in sys.stdin:
        seconds, _ = run_engine(engine, known[line.strip()])
        print(seconds, flush=True)


class Turns:
    """A process of `turns`."""

    def __init__(self, stack: ExitStack, waiting: dict[str, str]) -> None:
        command = [sys.executable, "-m", __spec__.name, "--turns"]
        plain = {k: v for k, v in os.environ.items() if k not in openmp_waiting({})}
        self._process = stack.enter_context(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=plain | waiting,
            )
        )
        stack.callback(self._process.kill)

    def seconds(self, workload: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        time.sleep(PAUSE)
        self._process.stdin.write(f"{workload}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--any-load", action="store_true", help="measure beside other work")
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turns:
        turns()
        return
    load = os.getloadavg()[0]
    if load > IDLE_LOAD and not options.any_load:
        sys.exit(f"the machine is not idle: its load is {load:.2f}")
    rows = []
    with ExitStack() as stack:
        plain, short = Turns(stack, {}), Turns(stack, openmp_waiting({}))
        for name in NAMES:
            pairs = [(plain.seconds(name), short.seconds(name)) for _ in range(options.rounds + 2)]
            ratios = [ours / theirs for theirs, ours in pairs[2:]]  # the first warm up
            value = 100 * (statistics.median(ratios) - 1)
            rows.append([name, f"{value:+.1f} %", f"{100 * (min(ratios) - 1):+.1f} %"])
            results.record(
                {
                    "benchmark": "openmp_waiting",
                    "workload": name if load <= IDLE_LOAD else f"{name}, load {load:.1f}",
                    "model": "SmolLM2-135M-Instruct",
                    "subject": "radixgrove",
                    "metric": "time beside OpenMP's own waiting",
                    "value": round(value, 2),
                    "unit": "%",
                    "device": "cpu",
                }
            )
    print(table(rows, ["workload", "median", "least"]))


if __name__ == "__main__":
    main()

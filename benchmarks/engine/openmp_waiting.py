"""How threads of a CPU engine wait for each other: what it costs on an idle machine, what it saves
on a shared one.

    python -m benchmarks.engine.openmp_waiting [--hogs 3] [--processes 4] [--rounds 2] [--any-load]

Three engines, each a process of its own since OpenMP reads its environment once, decode in turns:
one waits as GNU's OpenMP does by itself, one for 1,000 turns of a loop at most, one as workers let
it. The ratio to the first in each turn counts. Where the system places a process is worth some per
cent, so that each side has several, one after the other, and the median of theirs counts. Without
`--hogs`, busy loops that run beside them, the machine must be idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks import results
from benchmarks.engine.cpu_engine import make_engine, run_engine, workloads
from benchmarks.load.subjects import table
from radixgrove.protocol.settings import Device, WorkerSettings
from radixgrove.worker.agent import demo_model
from radixgrove.worker.agent.preparation import openmp_waiting
from radixgrove.worker.execution.openmp_waits import SAID_BY, follows_load

IDLE_LOAD = 0.5
PAUSE = 0.2  # seconds; the others' threads have gone to sleep then
PLAIN = "OpenMP's own"
CORES = len(os.sched_getaffinity(0))


def sides() -> dict[str, dict[str, str]]:
    """By name, what the environment says of waiting; of ours, what a worker gives its engine."""
    engine = WorkerSettings(device=Device.CPU, cpu_threads=CORES)
    ours = openmp_waiting({}, follows_load=follows_load(engine, {}))
    plain, short = {"GOMP_SPINCOUNT": "300000"}, {"GOMP_SPINCOUNT": "1000"}
    return {PLAIN: plain, "1,000 turns": short, "radixgrove": ours}


def turns() -> None:
    """Runs the workloads named on standard input, and prints the seconds of each."""
    engine = make_engine(demo_model.ensure(), "float32", CORES)
    known = {workload.name: workload for workload in workloads()}
    for line in sys.stdin:
        seconds, _ = run_engine(engine, known[line.strip()])
        print(seconds, flush=True)


class Turns:
    """A process of `turns`."""

    def __init__(self, stack: ExitStack, waiting: dict[str, str]) -> None:
        environ = {k: v for k, v in os.environ.items() if k not in SAID_BY} | waiting
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", __spec__.name, "--turns"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environ,
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


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        yield


def measure(names: list[str], rounds: int, hogs: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each round by workload and side, of one process each."""
    seconds: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        processes = {}
        for side, waiting in sides().items():  # one starts after the other: none waits for a core
            processes[side] = Turns(stack, waiting)
            for name in names:
                processes[side].seconds(name)  # to warm up
        with busy_loops(hogs):
            for index in range(rounds):
                order = list(processes) if index % 2 == 0 else list(reversed(processes))
                for name in names:
                    for side in order:
                        taken = processes[side].seconds(name)
                        seconds.setdefault((name, side), []).append(taken)
    return seconds


def beside(ours: list[float], theirs: list[float]) -> float:
    """The median ratio of a process's rounds to those of another, in turn."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="How threads of a CPU engine wait.")
    parser.add_argument("--hogs", type=int, default=0, help="busy loops beside the engines")
    parser.add_argument("--processes", type=int, default=4, help="of each side")
    parser.add_argument("--rounds", type=int, default=2, help="of each process")
    parser.add_argument("--workload", nargs="+", default=["bs1_decode", "bs8_decode"])
    parser.add_argument("--any-load", action="store_true", help="measure beside other work")
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turns:
        turns()
        return
    load = os.getloadavg()[0]
    if load > IDLE_LOAD and not options.any_load:
        sys.exit(f"the machine is not idle: its load is {load:.2f}")
    hogs = options.hogs
    measured = [measure(options.workload, options.rounds, hogs) for _ in range(options.processes)]
    rows = []
    for name in options.workload:
        for side in sides():
            taken = statistics.median(
                value for seconds in measured for value in seconds[name, side]
            )
            if side == PLAIN:
                rows.append([name, side, f"{taken:.2f}", "", "", ""])
                continue
            cost = [
                100 * (beside(seconds[name, side], seconds[name, PLAIN]) - 1)
                for seconds in measured
            ]
            value = statistics.median(cost)
            shown = [f"{percent:+.1f} %" for percent in (value, min(cost), max(cost))]
            rows.append([name, side, f"{taken:.2f}", *shown])
            results.record(
                {
                    "benchmark": "openmp_waiting",
                    "workload": name if not hogs else f"{name}, {hogs} busy loops",
                    "model": "SmolLM2-135M-Instruct",
                    "subject": side,
                    "metric": "time beside OpenMP's own waiting",
                    "value": round(value, 2),
                    "unit": "%",
                    "least": round(min(cost), 2),
                    "most": round(max(cost), 2),
                    "seconds": round(taken, 3),
                    "processes": options.processes,
                    "load": round(load, 2),
                    "device": "cpu",
                }
            )
    print(table(rows, ["workload", "waiting", "seconds", "beside OpenMP's own", "least", "most"]))


if __name__ == "__main__":
    main()

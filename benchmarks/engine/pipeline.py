"""Two stages of a pipeline on a CPU, with a thread each, beside one process.

    python -m benchmarks.engine.pipeline [--turns 3] [--dtype float32]

Four ratios, on a machine with two cores or more that does nothing else: how much of the time each
stage computes while 16 clients ask, what they get in all beside one process with two threads, and
how long one client waits for a token, and for the first one of a long prompt, beside one process
with one. Each subject is a process of its own; they measure in turns, since a virtual machine is
faster at one time than at another, and the median of the turns' ratios counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil

from benchmarks import results
from benchmarks.engine.cpu_engine import VOCABULARY
from benchmarks.engine.offline import BenchmarkEngine
from benchmarks.load.subjects import table
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import Device, DType, WorkerSettings
from radixgrove.worker.agent import demo_model
from radixgrove.worker.messages import Submit, Tokens

CLIENTS = 16
PROMPT = 200  # tokens
OUTPUT = 64
LONE_OUTPUT = 128  # of the client that is alone
LONG_PROMPT = 8000
ROUNDS = 2  # requests of each of the 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    pp: int
    threads: int  # of each stage


TWO_STAGES = Subject("two stages, 1 thread each", 2, 1)
TWO_THREADS = Subject("one process, 2 threads", 1, 2)
ONE_THREAD = Subject("one process, 1 thread", 1, 1)


@dataclass(frozen=True, slots=True)
class Crowd:
    """What 16 clients saw while all of them asked."""

    tokens_per_second: float
    busy: list[float]  # of the time, for each stage


class Clients:
    """Each asks for the next answer when it has one, `rounds` times."""

    def __init__(
        self,
        engine: BenchmarkEngine,
        count: int = 1,
        prompt: int = PROMPT,
        output: int = OUTPUT,
        rounds: int = 1,
    ) -> None:
        """`prompt`, `output`: tokens of each request."""
        self._engine = engine
        self._count = count
        self._prompt = prompt
        self._output = output
        self._rounds = rounds
        self._rng = random.Random(0)
        self.tokens = 0
        self.arrivals: list[float] = []  # when a step's tokens came, of the monotonic clock

    def run(self) -> None:
        """Until the first of them has all its answers; the rest are given up."""
        engine = self._engine
        engine.scheduler.flush_cache()
        for client in range(self._count):
            self._ask(client, 0)
        while not self._take():
            engine.turn()
        for request_id in engine.scheduler.requests_of(0):
            engine.scheduler.abort(request_id)
        while engine.scheduler.in_flight:
            engine.turn()
        engine.scheduler.take_outputs()

    def _ask(self, client: int, turn: int) -> None:
        prompt = [self._rng.randrange(1000, VOCABULARY) for _ in range(self._prompt)]
        submit = Submit(
            request_id=f"{client} {turn}",
            frontend=0,
            token_ids=np.array(prompt, dtype="<i4").tobytes(),
            sampling=SamplingParams(max_tokens=self._output, seed=0, temperature=0.0),
            domain="public",
        )
        self._engine.scheduler.submit(submit, time.monotonic())

    def _take(self) -> bool:
        """Whether a client has all its answers."""
        outputs = self._engine.scheduler.take_outputs().get(0, [])
        if outputs:
            self.arrivals.append(time.monotonic())
        for output in outputs:
            if not isinstance(output, Tokens):
                raise RuntimeError(f"refused: {output.detail}")
            self.tokens += len(output.token_ids)
            if output.finish is not None:
                client, turn = map(int, output.request_id.split())
                if turn + 1 == self._rounds:
                    return True
                self._ask(client, turn + 1)
        return False


def make_engine(subject: Subject, model_dir: Path, dtype: str) -> BenchmarkEngine:
    settings = WorkerSettings(
        device=Device.CPU,
        dtype=DType(dtype),
        cpu_threads=subject.threads,
        pp=subject.pp,
        max_model_len=LONG_PROMPT + 64,
        kv_tokens=16384,
        max_running=32,
    )
    return BenchmarkEngine(settings, model_dir)


def measure_crowd(engine: BenchmarkEngine) -> Crowd:
    stages = [psutil.Process(), *sorted(psutil.Process().children(), key=lambda rank: rank.pid)]
    before, began = [_computed(stage) for stage in stages], time.monotonic()
    clients = Clients(engine, CLIENTS, rounds=ROUNDS)
    clients.run()
    # What is given up at the end has been computed, too.
    seconds = time.monotonic() - began
    busy = [
        (_computed(stage) - computed) / seconds
        for stage, computed in zip(stages, before, strict=True)
    ]
    return Crowd(clients.tokens / (clients.arrivals[-1] - began), busy)


def _computed(stage: psutil.Process) -> float:
    """Seconds that its main thread has run, which computes all of a stage with one thread."""
    return next(t.user_time + t.system_time for t in stage.threads() if t.id == stage.pid)


def measure_lone(engine: BenchmarkEngine) -> float:
    """Milliseconds between two tokens of a client that is alone, in the middle of all."""
    client = Clients(engine, output=LONE_OUTPUT)
    client.run()
    gaps = np.diff(client.arrivals)
    return statistics.median(gaps.tolist()) * 1000


def measure_long(engine: BenchmarkEngine) -> float:
    """Milliseconds to the first token of a long prompt that is alone."""
    client = Clients(engine, prompt=LONG_PROMPT, output=1)
    began = time.monotonic()
    client.run()
    return (client.arrivals[0] - began) * 1000


class Process:
    """An engine of a subject, which measures when it is asked to."""

    def __init__(self, stack: ExitStack, subject: Subject, model_dir: Path, dtype: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, subject, model_dir, dtype))
        process.start()
        stack.callback(process.join)
        stack.callback(self._connection.send, None)

    def ask(self, measure: Callable[[BenchmarkEngine], T]) -> T:
        self._connection.send(measure)
        result: T = self._connection.recv()
        return result


def _serve(connection: Connection, subject: Subject, model_dir: Path, dtype: str) -> None:
    engine = make_engine(subject, model_dir, dtype)
    try:
        while (measure := connection.recv()) is not None:
            connection.send(measure(engine))
    finally:
        engine.close()


def record(subject: Subject, workload: str, metric: str, value: float, unit: str) -> None:
    results.record(
        {
            "benchmark": "pipeline",
            "workload": workload,
            "model": "SmolLM2-135M-Instruct",
            "subject": subject.name,
            "metric": metric,
            "value": round(value, 3),
            "unit": unit,
        }
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="default: the demo model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args(argv)
    model_dir = arguments.model or demo_model.ensure()
    crowds: list[tuple[Crowd, Crowd]] = []
    lone: list[tuple[float, float]] = []
    long: list[tuple[float, float]] = []
    with ExitStack() as stack:
        stages, threads, one = (
            Process(stack, subject, model_dir, arguments.dtype)
            for subject in (TWO_STAGES, TWO_THREADS, ONE_THREAD)
        )
        for _ in range(arguments.turns):
            crowds.append((stages.ask(measure_crowd), threads.ask(measure_crowd)))
            lone.append((stages.ask(measure_lone), one.ask(measure_lone)))
            long.append((stages.ask(measure_long), one.ask(measure_long)))
    rates = [(ours.tokens_per_second, theirs.tokens_per_second) for ours, theirs in crowds]
    busy = [
        statistics.median(shares) for shares in zip(*(ours.busy for ours, _ in crowds), strict=True)
    ]
    workload = f"{CLIENTS}_clients"
    record_pairs(rates, TWO_THREADS, workload, "output_tokens", "tokens/s")
    record_pairs(lone, ONE_THREAD, "one_client", "inter_token", "ms")
    record_pairs(long, ONE_THREAD, f"prompt_{LONG_PROMPT}", "ttft", "ms")
    for stage, share in enumerate(busy):
        record(TWO_STAGES, workload, f"stage_{stage}_computes", share, "of the time")
    least = [min(ours.busy) for ours, _ in crowds]
    rows = [
        ["share of the time that each stage computes", *spread(least), "at least 0.85"],
        [f"tokens of {CLIENTS} clients", *spread(ratios(rates)), "at least 0.90"],
        ["time between tokens of one client", *spread(ratios(lone)), "at most 1.15"],
        [f"time to the first token after {LONG_PROMPT:,}", *spread(ratios(long)), "at most 0.65"],
    ]
    print(table(rows, ("two stages beside one process", "median", "all turns", "goal")))
    return 0


def ratios(pairs: list[tuple[float, float]]) -> list[float]:
    return [ours / theirs for ours, theirs in pairs]


def spread(values: list[float]) -> tuple[str, str]:
    return f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"


def record_pairs(
    pairs: list[tuple[float, float]], other: Subject, workload: str, metric: str, unit: str
) -> None:
    """The median of each subject, and that of their ratios, which is not the ratio of those."""
    for subject, values in zip((TWO_STAGES, other), zip(*pairs, strict=True), strict=True):
        record(subject, workload, metric, statistics.median(values), unit)
    value = statistics.median(ratios(pairs))
    record(TWO_STAGES, workload, f"{metric} beside {other.name}", value, "x")


if __name__ == "__main__":
    sys.exit(main())

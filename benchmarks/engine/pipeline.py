"""Two stages of a pipeline on a CPU, with a thread each, beside one process.

    python -m benchmarks.engine.pipeline [--runs 2] [--dtype float32]

Four ratios, on a machine with two cores or more that does nothing else: how much of the time each
stage computes while 16 clients ask, what they get in all beside one process with two threads, and
how long one client waits for a token, and for the first one of a long prompt, beside one process
with one. The best of `--runs` counts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

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


def measure_crowd(engine: BenchmarkEngine, rounds: int) -> Crowd:
    stages = [psutil.Process(), *sorted(psutil.Process().children(), key=lambda rank: rank.pid)]
    before, began = [_computed(stage) for stage in stages], time.monotonic()
    clients = Clients(engine, CLIENTS, rounds=rounds)
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
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="requests of each client")
    arguments = parser.parse_args(argv)
    model_dir = arguments.model or demo_model.ensure()
    crowds: dict[Subject, list[Crowd]] = {TWO_STAGES: [], TWO_THREADS: []}
    lone: dict[Subject, list[float]] = {TWO_STAGES: [], ONE_THREAD: []}
    long: dict[Subject, list[float]] = {TWO_STAGES: [], ONE_THREAD: []}
    for _ in range(arguments.runs):
        for subject in (TWO_STAGES, TWO_THREADS, ONE_THREAD):
            engine = make_engine(subject, model_dir, arguments.dtype)
            try:
                if subject in crowds:
                    crowds[subject].append(measure_crowd(engine, arguments.rounds))
                if subject in lone:
                    lone[subject].append(measure_lone(engine))
                    long[subject].append(measure_long(engine))
            finally:
                engine.close()
    rates = {subject: max(c.tokens_per_second for c in runs) for subject, runs in crowds.items()}
    waits = {subject: min(runs) for subject, runs in lone.items()}
    firsts = {subject: min(runs) for subject, runs in long.items()}
    busy = max((crowd.busy for crowd in crowds[TWO_STAGES]), key=min)
    for subject, rate in rates.items():
        record(subject, f"{CLIENTS}_clients", "output_tokens", rate, "tokens/s")
    for subject in waits:
        record(subject, "one_client", "inter_token", waits[subject], "ms")
        record(subject, f"prompt_{LONG_PROMPT}", "ttft", firsts[subject], "ms")
    for stage, share in enumerate(busy):
        record(TWO_STAGES, f"{CLIENTS}_clients", f"stage_{stage}_computes", share, "of the time")
    tokens = rates[TWO_STAGES] / rates[TWO_THREADS]
    wait = waits[TWO_STAGES] / waits[ONE_THREAD]
    first = firsts[TWO_STAGES] / firsts[ONE_THREAD]
    rows = [
        ["share of the time that each stage computes", f"{min(busy):.2f}", "at least 0.85"],
        [f"tokens of {CLIENTS} clients", f"{tokens:.2f}", "at least 0.90"],
        ["time between tokens of one client", f"{wait:.2f}", "at most 1.15"],
        [f"time to the first token after {LONG_PROMPT:,}", f"{first:.2f}", "at most 0.65"],
    ]
    print(table(rows, ("two stages beside one process", "ratio", "goal")))
    return 0


if __name__ == "__main__":
    sys.exit(main())

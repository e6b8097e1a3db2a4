"""What others feel when a schema comes that is new and slow to compile: their inter-token latency.

    python -m benchmarks.load.cold_schema --model llama-3.1-8b --schema-rate 1

Starts `radixgrove worker` with random weights and drives it with `radixgrove bench serve`: all
requests of a workload at once, streaming. Meanwhile requests of one token come at `--schema-rate`,
each with a schema that no one has compiled, and in turns with those the same requests without any
schema. What follows `--` goes to the worker.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.engine.constrained import cold_schema, with_tokenizer
from benchmarks.engine.workloads import WORKLOADS
from benchmarks.load.serving import bench_serve, write_trace
from benchmarks.load.worker_process import Worker, find_config, running_worker
from radixgrove.protocol.model.directory import load_config

Bodies = Callable[[], dict[str, Any]]

_TIMEOUT = 30.0
_METRICS = ("inter-token latency p50", "inter-token latency p99")


def send(worker: Worker, body: dict[str, Any]) -> float:
    """Seconds until a completion has come.

    Raises:
        RuntimeError: it was refused.
    """
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=_TIMEOUT)
    try:
        text = json.dumps(body)
        connection.request("POST", "/v1/completions", text, {"content-type": "application/json"})
        answer = connection.getresponse()
        said = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {said[:300]!r}")
    return time.perf_counter() - begin


@contextmanager
def beside(
    worker: Worker, bodies: Callable[[], dict[str, Any]], rate: float
) -> Iterator[list[float]]:
    """Requests at a rate while the block runs; the seconds that each took.

    Raises:
        RuntimeError: one was refused.
    """
    stop = threading.Event()
    took: list[float] = []
    failed: list[Exception] = []

    def run() -> None:
        while not stop.wait(1 / rate):
            try:
                took.append(send(worker, bodies()))
            except (OSError, RuntimeError) as error:
                failed.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        thread.join()
    if failed:
        raise RuntimeError("a request beside the others failed") from failed[0]


def measure(name: str, model_dir: Path, arguments: argparse.Namespace) -> None:
    workload = WORKLOADS[arguments.workload]()
    trace = model_dir / "trace.jsonl"
    numbers = itertools.count()
    plain = {"model": name, "prompt": [1, 2, 3], "max_tokens": 1}
    bodies: dict[bool, Bodies] = {
        False: lambda: plain,
        True: lambda: plain | {"guided_json": cold_schema(next(numbers))},
    }
    figures: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with running_worker(
        model_dir,
        name,
        frontends=arguments.frontends,
        max_model_len=4096,
        options=arguments.worker_options,
    ) as worker:
        info = worker.engine_info()
        write_trace(workload, arguments.requests, load_config(model_dir).vocab_size, trace)
        for number in range(arguments.runs + 1):  # the first warms up
            for cold, body in bodies.items():
                with beside(worker, body, arguments.schema_rate) as took:
                    found = bench_serve(
                        worker,
                        name,
                        trace,
                        concurrency=len(workload.items),
                        processes=arguments.processes,
                    )
                if number:
                    figures[cold].append(found)
                    seconds[cold] += took
    common = {
        "benchmark": "cold_schema",
        "workload": f"{arguments.workload}, {arguments.schema_rate:g} schemas/s",
        "model": name,
        "subject": "radixgrove",
        "device": info["device"],
    }
    for metric in _METRICS:
        quiet, loaded = (
            statistics.median(run[metric] for run in figures[cold]) for cold in (False, True)
        )
        print(f"{name} {metric}: {quiet:.2f} ms, with schemas {loaded:.2f}, {loaded / quiet:.3f} x")
        kept = {"metric": metric, "value": round(loaded / quiet, 4), "unit": "1"}
        results.record({**common, **kept, "without_ms": quiet, "with_ms": loaded})
    for cold, found in seconds.items():
        middle = statistics.median(found)
        print(f"requests {'with' if cold else 'without'} a schema: {len(found)}, {middle:.3f} s")
    waited = statistics.median(seconds[True]) - statistics.median(seconds[False])
    results.record({**common, "metric": "schema", "value": round(waited, 4), "unit": "s"})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--workload", default="bs64_decode", choices=WORKLOADS)
    parser.add_argument("--requests", type=int, help="only so many of the workload")
    parser.add_argument("--schema-rate", type=float, default=1.0, help="a second")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--processes", type=int, default=4, help="that send")
    parser.add_argument("worker_options", nargs="*", help="after --: options of the worker")
    arguments = parser.parse_args(argv)
    name, config_dir = find_config(arguments.model)
    with with_tokenizer(config_dir) as model_dir:
        measure(name, model_dir, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())

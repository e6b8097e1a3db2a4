"""Latency of one worker at offered rates: conversations that come at random times.

    python -m benchmarks.load.open_loop --rate 15 24 --label "20 ms" -- --max-step-ms 20

Starts `radixgrove worker` with random weights and drives it with `radixgrove bench serve --rate`,
streaming. Lengths are log-normal and, like the prompts, the same for every run; arrivals are those
of a Poisson process with a fixed seed. The cache is emptied before each rate. What follows `--`
goes to the worker.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from pathlib import Path

from benchmarks import results
from benchmarks.engine.workloads import Item, Workload
from benchmarks.load.serving import METRICS, bench_serve, write_trace
from benchmarks.load.worker_process import find_config, running_worker, write_model

RUN_SECONDS = 300.0
MEAN_INPUT, MEAN_OUTPUT, MOST_TOKENS = 960, 262, 8000  # means of what is kept: about 920, 260
_SPREAD_INPUT, _SPREAD_OUTPUT = 1.0, 0.8  # of the logarithm
_VOCABULARY = 100_000


def conversations(requests: int, seed: int = 0) -> Workload:
    """Requests with nothing in common, of log-normal lengths, at most `MOST_TOKENS` in all."""
    rng = random.Random(seed)

    def length(mean: int, spread: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))

    items: list[Item] = []
    while len(items) < requests:
        given, wanted = length(MEAN_INPUT, _SPREAD_INPUT), length(MEAN_OUTPUT, _SPREAD_OUTPUT)
        if given + wanted <= MOST_TOKENS:
            items.append(Item([rng.randint(0, _VOCABULARY) for _ in range(given)], wanted))
    return Workload("conversations", items)


def measure(name: str, config_dir: Path, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="radixgrove-open-loop-") as scratch:
        model_dir = Path(scratch)
        vocab_size = write_model(config_dir, model_dir)
        trace = model_dir / "conversations.jsonl"
        write_trace(conversations(arguments.requests), None, vocab_size, trace)
        with running_worker(
            model_dir,
            name,
            frontends=arguments.frontends,
            max_model_len=arguments.max_model_len,
            options=arguments.worker_options,
        ) as worker:
            device = worker.engine_info()["device"]
            for rate in arguments.rate:
                clients = bench_serve(
                    worker,
                    name,
                    trace,
                    seconds=RUN_SECONDS,
                    rate=rate,
                    processes=arguments.processes,
                )
                common = {
                    "benchmark": "serving",
                    "model": name,
                    "workload": "conversations",
                    "subject": "radixgrove",
                    "device": device,
                    "rate": rate,
                    "requests": arguments.requests,
                    "worker_options": arguments.worker_options,
                    "label": arguments.label,
                }
                shown = [f"{name} {arguments.label} {rate:g}/s:"]
                for metric, (key, unit) in {
                    "output throughput": ("output_tokens", "tokens/s"),
                    **METRICS,
                }.items():
                    if metric in clients:
                        value = round(clients[metric], 3)
                        results.record({**common, "metric": key, "value": value, "unit": unit})
                        shown.append(f"{metric} {value:,.5g}")
                print(", ".join(shown), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--rate", type=float, nargs="+", default=[15.0, 24.0], help="requests/s")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--processes", type=int, default=4, help="that send")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--label", default="", help="kept in the record, to tell variants apart")
    parser.add_argument("worker_options", nargs="*", help="after --: options of the worker")
    arguments = parser.parse_args(argv)
    measure(*find_config(arguments.model), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())

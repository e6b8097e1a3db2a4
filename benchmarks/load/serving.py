"""Throughput and latency of one worker over HTTP, and what each of its processes spends.

    python -m benchmarks.load.serving --model llama-3.1-8b --offline llama-3.1-8b=8400

Starts `radixgrove worker` with random weights and drives it with `radixgrove bench serve`: all
requests of a workload at once, streaming, from several client processes. The cache is emptied
before each run; the better of `--runs` counts. What follows `--` goes to the worker.

CPU seconds are those of whole processes between a run's first and last request, divided by the
engine's steps. The engine's own clocks say where its main thread spends them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.engine.workloads import WORKLOADS, Workload
from benchmarks.load.worker_process import (
    RADIXGROVE,
    Usage,
    Worker,
    find_config,
    running_worker,
    write_model,
)

RUN_SECONDS = 120.0
PHASE = "engine: "  # before the name of a phase of its loop
METRICS = {  # of `radixgrove bench serve`, as they are kept
    "ttft p50": ("ttft_p50", "ms"),
    "ttft p99": ("ttft_p99", "ms"),
    "inter-token latency p50": ("itl_p50", "ms"),
    "inter-token latency p99": ("itl_p99", "ms"),
    "tokens per event": ("tokens_per_event", "1"),
    "busiest client": ("busiest_client", "1"),
}


# ---- a run -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """One run of a workload: figures of the clients, and what the worker used for it."""

    clients: dict[str, float]
    used: Usage
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.steps = round(self.used.counters["radixgrove_engine_steps_total"])

    @property
    def rate(self) -> float:
        return self.clients["output throughput"]

    def cpu_per_step(self) -> dict[str, float]:
        """Milliseconds a step: processes, clients, and the engine's phases."""
        seconds = {**self.used.cpu, "clients": self.clients["client cpu"]}
        prefix = 'radixgrove_engine_phase_cpu_seconds_total{phase="'
        for name, value in self.used.counters.items():
            if name.startswith(prefix):
                seconds[PHASE + name.removeprefix(prefix).removesuffix('"}')] = value
        return {name: value * 1e3 / self.steps for name, value in seconds.items()}


def write_trace(workload: Workload, requests: int | None, vocab_size: int, path: Path) -> None:
    with path.open("w") as file:
        for index, item in enumerate(workload.items[:requests]):
            line = {
                "token_ids": [number % vocab_size for number in item.token_ids],
                "output_length": item.max_tokens,
                "seed": index,
            }
            file.write(json.dumps(line) + "\n")


def bench_serve(
    worker: Worker, name: str, trace: Path, *, seconds: float = RUN_SECONDS, **options: object
) -> dict[str, float]:
    """Flush the cache, and send the requests of a trace; figures by their names.

    Args:
        options: of `radixgrove bench serve`.

    Raises:
        RuntimeError: it failed, or a request did.
    """
    figures = trace.with_suffix(".figures")
    figures.unlink(missing_ok=True)
    worker.flush_cache()
    options |= {"url": worker.url, "model": name, "trace": trace, "seed": 0, "results": figures}
    flags = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    command = [*RADIXGROVE, "bench", "serve", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if done.returncode or not figures.exists():
        raise RuntimeError(f"bench serve failed: {done.stdout}{done.stderr}")
    rows = map(json.loads, figures.read_text().splitlines())
    found: dict[str, float] = {row["metric"]: row["value"] for row in rows}
    if found["failed"]:
        raise RuntimeError(f"{found['failed']:.0f} requests failed: {done.stdout}")
    return found


def run_once(
    worker: Worker, name: str, workload: Workload, trace: Path, arguments: argparse.Namespace
) -> Run:
    """
    Raises:
        RuntimeError: a request failed, or got fewer tokens than it asked for.
    """
    expected = sum(item.max_tokens for item in workload.items[: arguments.requests])
    before = worker.usage()
    clients = bench_serve(
        worker,
        name,
        trace,
        concurrency=len(workload.items),
        temperature=workload.temperature,
        processes=arguments.processes,
    )
    used = worker.usage().since(before)
    tokens = clients["output throughput"] * clients["duration"]
    if round(tokens) != expected:
        raise RuntimeError(f"{round(tokens)} tokens instead of {expected}")
    return Run(clients, used)


# ---- the report ------------------------------------------------------------------------------


def offline_rate(model: str, workload: str) -> float | None:
    """What `offline.py` measured here with this commit, if it has."""
    path = results.directory() / "offline.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    here = results.environment()
    rate = None
    for row in rows:
        same = all(row.get(key) == here[key] for key in ("commit", "card"))
        ranks = row.get("tp"), row.get("pp", 1)
        if same and (row["model"], row["workload"], ranks) == (model, workload, (1, 1)):
            rate = row["value"]
    return rate


def record_run(common: dict[str, Any], run: Run, rates: list[float], offline: float | None) -> None:
    throughput: dict[str, Any] = {
        "metric": "output_tokens",
        "value": round(run.rate, 1),
        "unit": "tokens/s",
        "runs": [round(rate, 1) for rate in rates],
    }
    if offline is not None:
        throughput |= {"offline": offline, "of_offline": round(run.rate / offline, 4)}
    rows = [throughput]
    for metric, (name, unit) in METRICS.items():
        if metric in run.clients:
            rows.append({"metric": name, "value": round(run.clients[metric], 3), "unit": unit})
    cpu = {name: round(value, 4) for name, value in run.cpu_per_step().items()}
    worker = round(cpu["engine"] + cpu["frontends"] + cpu["agent"], 4)
    rows.append({"metric": "worker_cpu", "value": worker, "unit": "ms/step", "cpu_ms": cpu})
    for row in rows:
        results.record({**common, **row})


def report(model: str, workload: str, run: Run, offline: float | None) -> list[str]:
    clients = run.clients
    share = f", {run.rate / offline:.1%} of offline" if offline else ""
    lines = [
        f"{model} {workload}: {run.rate:,.0f} tokens/s{share}; {run.steps} steps",
        "  "
        + ", ".join(
            f"{metric} {clients[metric]:.3g}{'' if unit == '1' else ' ' + unit}"
            for metric, (_, unit) in METRICS.items()
            if metric in clients
        ),
    ]
    cells = [f"{name} {value:.3f}" for name, value in run.cpu_per_step().items()]
    processes = [cell for cell in cells if not cell.startswith(PHASE)]
    phases = [cell.removeprefix(PHASE) for cell in cells if cell.startswith(PHASE)]
    lines.append("  CPU ms/step: " + ", ".join(processes))
    lines.append("  of the engine's main thread: " + ", ".join(phases))
    return lines


def measure(model: str, config_dir: Path, arguments: argparse.Namespace) -> None:
    """All workloads on one worker of a model."""
    with tempfile.TemporaryDirectory(prefix="radixgrove-serving-") as scratch:
        model_dir = Path(scratch)
        vocab_size = write_model(config_dir, model_dir)
        with running_worker(
            model_dir,
            model,
            frontends=arguments.frontends,
            max_model_len=arguments.max_model_len,
            options=arguments.worker_options,
        ) as worker:
            info = worker.engine_info()
            print(f"{model}: ready after {worker.start_seconds:.1f} s", flush=True)
            for name in arguments.workload:
                workload = WORKLOADS[name]()
                trace = model_dir / f"{name}.jsonl"
                write_trace(workload, arguments.requests, vocab_size, trace)
                runs = [
                    run_once(worker, model, workload, trace, arguments)
                    for _ in range(arguments.runs)
                ]
                best = max(runs, key=lambda run: run.rate)
                given = arguments.offline.get(model) if name == "nano256" else None
                offline = given or offline_rate(model, name)
                print("\n".join(report(model, name, best, offline)), flush=True)
                common = {
                    "benchmark": "serving",
                    "model": model,
                    "workload": name,
                    "subject": "radixgrove",
                    "device": info["device"],
                    "frontends": arguments.frontends,
                    "clients": arguments.processes,
                    "requests": arguments.requests or len(workload.items),
                    "steps": best.steps,
                    "start_seconds": round(worker.start_seconds, 1),
                    "label": arguments.label,
                }
                record_run(common, best, [run.rate for run in runs], offline)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["llama-3.1-8b", "qwen3-0.6b"])
    parser.add_argument(
        "--workload", nargs="+", default=["nano256", "bs256_decode"], choices=WORKLOADS
    )
    parser.add_argument(
        "--offline", nargs="+", default=[], metavar="MODEL=RATE", help="offline.py's in nano256"
    )
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--processes", type=int, default=4, help="that send")
    parser.add_argument("--requests", type=int, help="only so many of each workload")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--label", default="", help="kept in the record, to tell variants apart")
    parser.add_argument("worker_options", nargs="*", help="after --: options of the worker")
    arguments = parser.parse_args(argv)
    given = (entry.partition("=") for entry in arguments.offline)
    arguments.offline = {model: float(rate) for model, _, rate in given}
    for name in arguments.model:
        measure(*find_config(name), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())

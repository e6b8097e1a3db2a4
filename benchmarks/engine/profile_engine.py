"""Where a step's time goes: CPU time by phase, GPU time by kernel, and how long the GPU idles.

    python -m benchmarks.engine.profile_engine --model qwen3-0.6b --trace t.json.gz

The window is `--steps` steps after `--skip`. It is gone through twice: once with clocks alone, for
the CPU's phases, and once under PyTorch's profiler, which slows the CPU, for the GPU's idle share
and the Chrome trace.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import results
from benchmarks.engine.offline import (
    BenchmarkEngine,
    add_engine_options,
    count_tokens,
    find_model,
    make_settings,
)
from benchmarks.engine.workloads import WORKLOADS, Workload

PHASES = ("schedule", "launch", "mask", "collect", "complete", "deliver")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Phases:
    """Seconds of each phase, one entry a step; `collect` is mostly waiting for the GPU."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {p: [] for p in PHASES})
    elapsed: float = 0.0

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        with record_function(phase):
            yield
        self.seconds[phase].append(time.perf_counter() - begin)


@contextmanager
def clocked(engine: BenchmarkEngine, phases: Phases) -> Iterator[None]:
    """What a turn calls is timed, by phase."""
    scheduler, executor = engine.scheduler, engine.executor
    calls: list[tuple[Any, str, str]] = [
        (scheduler, "schedule", "schedule"),
        (executor, "launch", "launch"),
        (executor, "forward", "launch"),
        (scheduler, "fill_masks", "mask"),
        (executor, "sample", "launch"),
        (executor, "collect", "collect"),
        (scheduler, "complete", "complete"),
        (scheduler, "take_outputs", "deliver"),
    ]

    within = False

    def timed(method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal within
            if within:  # a launch is a forward and a sampling
                return method(*arguments)
            within = True
            with phases.timed(phase):
                found = method(*arguments)
            within = False
            return found

        return call

    methods = [timed(getattr(owner, name), phase) for owner, name, phase in calls]
    for (owner, name, _), method in zip(calls, methods, strict=True):
        setattr(owner, name, method)
    try:
        yield
    finally:
        for owner, name, _ in calls:
            delattr(owner, name)


def run_steps(engine: BenchmarkEngine, phases: Phases, count: int) -> int:
    """Turns of the engine, up to so many steps; how many there were."""
    timeline = engine.scheduler.memory.timeline
    first = timeline.collected
    begin = time.perf_counter()
    with clocked(engine, phases):
        while engine.scheduler.has_work and timeline.collected - first < count:
            engine.turn()
            count_tokens(engine.scheduler.take_outputs())
    phases.elapsed = time.perf_counter() - begin
    return timeline.collected - first


def in_window(
    engine: BenchmarkEngine, workload: Workload, skip: int, window: Callable[[], int]
) -> int:
    """Run a workload with `window` after `skip` steps, and finish it."""
    engine.scheduler.flush_cache()
    engine.submit(workload)
    run_steps(engine, Phases(), skip)
    steps = window()
    run_steps(engine, Phases(), sys.maxsize)
    return steps


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Of a window, from the device's own timestamps."""

    span_ms: float
    busy_ms: float
    kernels: list[tuple[str, int, float]]  # name, launches, milliseconds; longest first

    @property
    def idle_share(self) -> float:
        return 1.0 - self.busy_ms / self.span_ms if self.span_ms else 0.0


def gpu_use(trace: dict[str, Any]) -> GpuUse:
    """Union of the device's busy intervals in a Chrome trace."""
    spans = []
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in GPU_CATEGORIES:
            spans.append((event["ts"], event["ts"] + event["dur"]))
            times[event["name"]] += event["dur"]
            launches[event["name"]] += 1
    if not spans:
        return GpuUse(0.0, 0.0, [])
    spans.sort()
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    kernels = [(name, launches[name], time_ / 1e3) for name, time_ in times.most_common(15)]
    return GpuUse((end - spans[0][0]) / 1e3, busy / 1e3, kernels)


def traced(
    engine: BenchmarkEngine, workload: Workload, skip: int, steps: int, path: Path
) -> GpuUse:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)

    def window() -> int:
        with profile(activities=activities) as profiler:
            done = run_steps(engine, Phases(), steps)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return done

    in_window(engine, workload, skip, window)
    with gzip.open(path, "rt") as file:
        return gpu_use(json.load(file))


def phase_table(phases: Phases, steps: int) -> list[str]:
    lines = [f"{'phase':<10}{'ms/step':>10}{'median':>10}{'share':>9}"]
    for phase in PHASES:
        seconds = phases.seconds[phase]
        each = sum(seconds) / steps * 1e3
        middle = statistics.median(seconds) * 1e3 if seconds else 0.0
        share = sum(seconds) / phases.elapsed
        lines.append(f"{phase:<10}{each:>10.3f}{middle:>10.3f}{share:>9.1%}")
    lines.append(f"{'step':<10}{phases.elapsed / steps * 1e3:>10.3f}")
    return lines


def kernel_table(use: GpuUse, steps: int) -> list[str]:
    lines = [
        f"GPU: {use.busy_ms / steps:.3f} ms/step busy, idle {use.idle_share:.1%} of the window"
    ]
    for name, launches, milliseconds in use.kernels:
        lines.append(f"  {milliseconds / steps:8.4f} ms/step {launches / steps:7.1f} x {name[:80]}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--workload", default="nano256", choices=WORKLOADS)
    parser.add_argument("--skip", type=int, default=60, help="steps before the window")
    parser.add_argument("--steps", type=int, default=48, help="steps of the window")
    parser.add_argument("--trace", type=Path, help="keep the Chrome trace here (.json.gz)")
    add_engine_options(parser)
    arguments = parser.parse_args(argv)
    model, model_dir = find_model(arguments.model)
    workload = WORKLOADS[arguments.workload]()
    engine = BenchmarkEngine(make_settings(arguments), model_dir)
    try:
        engine.run(workload)  # whatever is compiled or allocated late is so now
        phases = Phases()
        steps = in_window(
            engine,
            workload,
            arguments.skip,
            lambda: run_steps(engine, phases, arguments.steps),
        )
        with tempfile.TemporaryDirectory() as scratch:
            path = arguments.trace or Path(scratch) / "trace.json.gz"
            use = traced(engine, workload, arguments.skip, arguments.steps, path)
    finally:
        engine.close()
    if not steps:
        print(f"{workload.name} has ended after {arguments.skip} steps; use a smaller --skip")
        return 1
    print(f"{model} {workload.name}, {steps} steps after {arguments.skip}")
    print("\n".join(phase_table(phases, steps) + kernel_table(use, steps)))
    common = {
        "benchmark": "profile",
        "workload": workload.name,
        "model": model,
        "subject": "radixgrove",
        "tp": arguments.tp,
        "pp": arguments.pp,
        "steps": steps,
        "skip": arguments.skip,
        "attention_backend": engine.info.attention_backend,
    }
    for metric, (value, unit) in figures(phases, use, steps).items():
        results.record(common | {"metric": metric, "value": value, "unit": unit})
    return 0


def figures(phases: Phases, use: GpuUse, steps: int) -> dict[str, tuple[float, str]]:
    """What is recorded: each figure and its unit, the kernels by name."""
    found = {
        "step": (phases.elapsed / steps * 1e3, "ms"),
        "gpu_busy": (use.busy_ms / steps, "ms/step"),
        "gpu_idle_share": (use.idle_share, "1"),
    }
    for phase, seconds in phases.seconds.items():
        found[f"cpu_{phase}"] = (sum(seconds) / steps * 1e3, "ms/step")
    for name, _launches, milliseconds in use.kernels:
        found[f"kernel {name[:80]}"] = (milliseconds / steps, "ms/step")
    return found


if __name__ == "__main__":
    sys.exit(main())

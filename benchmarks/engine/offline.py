"""Offline throughput of one engine in this process: scheduler and executor, no HTTP.

    python -m benchmarks.engine.offline --model llama-3.1-8b --workload nano256 bs1_decode

Models are names under benchmarks/configs (random weights) or directories. The cache is emptied
before each run; the better of `--runs` counts. A line of JSON goes into benchmarks/results for
each row of the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmarks import results
from benchmarks.engine import workloads
from benchmarks.engine.workloads import WORKLOADS, ModelShape, Workload
from radixgrove.protocol.model.config import ModelConfig
from radixgrove.protocol.model.directory import load_config
from radixgrove.protocol.model.fit import count_projected, quantization_of
from radixgrove.protocol.model.quantization import MXFP4
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import (
    AttentionChoice,
    Device,
    DType,
    KVDType,
    LoadFormat,
    Quantize,
    SchedulePolicy,
    Transport,
    WorkerSettings,
)
from radixgrove.worker.engine.offline import OfflineEngine
from radixgrove.worker.messages import EngineInfo, PhaseReport, Submit, TokenRules, Tokens


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a workload."""

    seconds: float
    steps: int
    cached_tokens: int
    preemptions: int


class BenchmarkEngine(OfflineEngine):
    """An engine that runs workloads."""

    def __init__(self, settings: WorkerSettings, model_dir: Path) -> None:
        begin = time.perf_counter()
        super().__init__(settings, model_dir, show_phase)
        self.start_seconds = time.perf_counter() - begin

    def submit(self, workload: Workload, first: int = 0) -> None:
        """Requests, numbered from `first`."""
        now = time.time()
        vocabulary = self.info.vocab_size
        for index, item in enumerate(workload.items, first):
            token_ids = np.array(item.token_ids, dtype="<i4") % vocabulary
            sampling = SamplingParams(
                max_tokens=item.max_tokens, seed=index, temperature=workload.temperature
            )
            self.scheduler.submit(
                Submit(
                    request_id=str(index),
                    frontend=0,
                    token_ids=token_ids.tobytes(),
                    sampling=sampling,
                    domain="public",
                    rules=None if item.grammar is None else TokenRules(grammar=item.grammar),
                ),
                now,
            )

    def run(self, workload: Workload) -> Measured:
        """All of a workload's requests at once, to the end.

        Raises:
            RuntimeError: a request was refused, or did not get all its tokens.
        """
        self.scheduler.flush_cache()
        counters = self.scheduler.counters
        cached, preemptions = counters.cached_tokens, counters.preemptions
        self.submit(workload)
        timeline = self.scheduler.memory.timeline
        before, tokens = timeline.collected, 0
        begin = time.perf_counter()
        while self.scheduler.has_work:
            self.turn()
            tokens += count_tokens(self.scheduler.take_outputs())
        seconds = time.perf_counter() - begin
        if tokens != workload.output_tokens:
            raise RuntimeError(f"{tokens} output tokens instead of {workload.output_tokens}")
        return Measured(
            seconds,
            timeline.collected - before,
            counters.cached_tokens - cached,
            counters.preemptions - preemptions,
        )


def count_tokens(outputs: dict[int, list[Any]]) -> int:
    """New tokens in what a step gave out.

    Raises:
        RuntimeError: a request was refused.
    """
    count = 0
    for output in outputs.get(0, []):
        if not isinstance(output, Tokens):
            raise RuntimeError(f"refused: {output.detail}")
        count += len(output.token_ids)
    return count


def show_phase(report: PhaseReport) -> None:
    since = time.time() - psutil.Process().create_time()
    share = "" if report.fraction is None else f" {report.fraction:.0%}"
    print(
        f"[{report.state.value} {since:.1f} s] {report.message}{share}", file=sys.stderr, flush=True
    )


def find_model(name: str) -> tuple[str, Path]:
    """A benchmark model's short name and directory."""
    path = Path(name)
    if path.name == name and (results.CONFIGS / name).is_dir():
        return name, results.CONFIGS / name
    return path.name, path


def model_shape(config: ModelConfig, info: EngineInfo, quantize: Quantize) -> ModelShape:
    quantization = quantization_of(config, quantize)
    quantized = quantization is not None and quantization.method != MXFP4  # which is widened
    item_bytes = getattr(torch, info.dtype).itemsize
    hidden = config.hidden_size
    matrices = count_projected(config)
    mixture = {}
    if experts := config.experts:
        matrices -= config.expert_layers * 3 * hidden * experts.intermediate_size * experts.count
        mixture = {
            "expert_parameters": config.expert_layers * 3 * hidden * experts.intermediate_size,
            "experts": experts.count,
            "experts_per_token": experts.per_token,
        }
    return ModelShape(
        matrix_parameters=matrices,
        head_parameters=config.vocab_size * hidden,
        layers=config.num_layers,
        heads=config.attention.heads,
        kv_heads=config.attention.kv_heads,
        head_dim=config.attention.head_dim,
        item_bytes=1 if quantized else item_bytes,
        head_item_bytes=item_bytes,
        kv_item_bytes=1 if info.kv_dtype == KVDType.FP8_E4M3 else item_bytes,
        **mixture,
    )


def make_settings(arguments: argparse.Namespace) -> WorkerSettings:
    options: dict[str, Any] = {
        "load_format": LoadFormat(arguments.load_format),
        "device": Device(arguments.device),
        "dtype": DType(arguments.dtype),
        "quantize": Quantize(arguments.quantize),
        "kv_dtype": KVDType(arguments.kv_dtype),
        "tp": arguments.tp,
        "pp": arguments.pp,
        "ep": arguments.ep,
        "transport": Transport(arguments.transport),
        "attention_backend": AttentionChoice(arguments.backend),
        "max_running": arguments.max_running,
        "max_step_tokens": arguments.max_step_tokens,
        "max_model_len": arguments.max_model_len,
        "schedule_policy": SchedulePolicy(arguments.schedule_policy),
        "cuda_graphs": not arguments.eager,
        "overlap": not arguments.no_overlap,
    }
    return WorkerSettings(**options)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What decides the engine, shared with the profile."""
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument(
        "--transport", default="auto", choices=[t.value for t in Transport], help="between stages"
    )
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument(
        "--backend", default="auto", choices=[b.value for b in AttentionChoice], help="attention"
    )
    parser.add_argument("--device", default="auto", choices=[d.value for d in Device])
    parser.add_argument("--dtype", default="auto", choices=[d.value for d in DType])
    parser.add_argument("--quantize", default="none", choices=[q.value for q in Quantize])
    parser.add_argument("--kv-dtype", default="auto", choices=[d.value for d in KVDType])
    parser.add_argument("--load-format", default="dummy", choices=[f.value for f in LoadFormat])
    parser.add_argument("--max-running", type=int, default=None)
    parser.add_argument("--max-step-tokens", type=int, default=None)
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument(
        "--schedule-policy", default="fcfs", choices=[p.value for p in SchedulePolicy]
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-overlap", action="store_true", help="one step in flight")


HEADER = ("model", "workload", "tokens/s", "of limit", "seconds", "steps", "cached", "start s")
WIDTHS = (16, 14, 9, 8, 8, 6, 7, 7)


def table_row(cells: tuple[str, ...]) -> str:
    return "  ".join(
        cell.ljust(width) if index < 2 else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))
    )


def measure(
    engine: BenchmarkEngine,
    model: str,
    shape: ModelShape,
    workload: Workload,
    runs: int,
    cards: int,
) -> tuple[str, dict[str, Any]]:
    """Better of `runs`: the row of the table and the record.

    The limit is that of `cards` that share all bytes and FLOPs, if their rates are known.
    """
    measured = [engine.run(workload) for _ in range(runs)]
    best = min(measured, key=lambda run: run.seconds)
    rate = workload.counted_tokens / best.seconds
    limit = None
    device = workloads.find_device(engine.info.device)
    if device is not None:
        seconds = workloads.least_seconds(workload, shape, device) / cards
        limit = workload.counted_tokens / seconds
    cached = best.cached_tokens / workload.input_tokens
    record = {
        "benchmark": "offline",
        "model": model,
        "workload": workload.name,
        "subject": "radixgrove",
        "metric": "input_tokens" if workload.counts_input else "output_tokens",
        "value": round(rate, 1),
        "unit": "tokens/s",
        "limit": limit and round(limit, 1),
        "seconds": [round(run.seconds, 4) for run in measured],
        "steps": best.steps,
        "cached_share": round(cached, 4),
        "preemptions": best.preemptions,
        "start_seconds": round(engine.start_seconds, 1),
        "attention_backend": engine.info.attention_backend,
        "dtype": engine.info.dtype,
        "kv_dtype": engine.info.kv_dtype,
        "schedule_policy": engine.scheduler.config.schedule_policy.value,
        "max_step_tokens": engine.scheduler.config.max_step_tokens,
        "device": engine.info.device,
    }
    row = table_row(
        (
            model,
            workload.name,
            f"{rate:,.0f}",
            f"{rate / limit:.1%}" if limit else "-",
            f"{best.seconds:.2f}",
            str(best.steps),
            f"{cached:.0%}",
            f"{engine.start_seconds:.1f}",
        )
    )
    return row, record


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", default=["llama-3.1-8b", "qwen3-0.6b"])
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--label", default="", help="kept in the record, to tell variants apart")
    add_engine_options(parser)
    arguments = parser.parse_args(argv)
    settings = make_settings(arguments)
    print(table_row(HEADER), flush=True)
    for name in arguments.model:
        model, model_dir = find_model(name)
        engine = BenchmarkEngine(settings, model_dir)
        try:
            shape = model_shape(load_config(model_dir), engine.info, settings.quantize)
            for workload_name in arguments.workload:
                workload = WORKLOADS[workload_name]()
                cards = settings.tp * settings.pp
                row, record = measure(engine, model, shape, workload, arguments.runs, cards)
                print(row, flush=True)
                ranks = {"tp": settings.tp, "pp": settings.pp, "ep": settings.ep}
                kept = {**ranks, "quantize": arguments.quantize, "label": arguments.label}
                results.record({**record, **kept})
        finally:
            engine.close()
        del engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())

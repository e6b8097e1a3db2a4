"""The engine on a CPU beside `transformers.generate`, the same model, dtype, threads and run.

    python -m benchmarks.engine.cpu_engine [--model DIR] [--dtype float32 bfloat16] [--runs 3]

Both sides run each workload in turn, greedily and to the same number of tokens; the better of
`--runs` counts. Ours is scheduler and executor in this process, its cache emptied before each run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import results
from benchmarks.engine.offline import BenchmarkEngine
from benchmarks.load.subjects import table
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.protocol.settings import Device, DType, WorkerSettings
from radixgrove.worker.agent import demo_model
from radixgrove.worker.messages import Submit, Tokens

VOCABULARY = 40_000  # plain text tokens of the demo model lie below
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class CpuWorkload:
    """Prompts of equal length, so that neither side pads, and tokens to generate for each."""

    name: str
    prompts: Prompts
    max_tokens: int
    counts_input: bool
    goal: float  # times transformers

    @property
    def counted_tokens(self) -> int:
        lengths = [len(p) if self.counts_input else self.max_tokens for p in self.prompts]
        return sum(lengths)


def _random_ids(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, VOCABULARY) for _ in range(length)]


def workloads() -> list[CpuWorkload]:
    rng = random.Random(0)
    groups = [_random_ids(rng, 512) for _ in range(2)]
    shared = [prefix + _random_ids(rng, 32) for prefix in groups for _ in range(8)]
    rng.shuffle(shared)
    return [
        CpuWorkload("bs1_decode", [_random_ids(rng, 32)], 96, False, 2.0),
        CpuWorkload("bs8_decode", [_random_ids(rng, 32) for _ in range(8)], 96, False, 1.2),
        CpuWorkload("prefill_8x512", [_random_ids(rng, 512) for _ in range(8)], 1, True, 1.0),
        CpuWorkload("shared_2x8x512", shared, 32, False, 2.0),
    ]


def run_engine(engine: BenchmarkEngine, workload: CpuWorkload) -> tuple[float, Prompts]:
    """Seconds, and the generated tokens."""
    engine.scheduler.flush_cache()
    texts: Prompts = [[] for _ in workload.prompts]
    begin = time.perf_counter()
    for index, prompt in enumerate(workload.prompts):
        sampling = SamplingParams(max_tokens=workload.max_tokens, seed=0, temperature=0.0)
        submit = Submit(
            request_id=str(index),
            frontend=0,
            token_ids=np.array(prompt, dtype="<i4").tobytes(),
            sampling=sampling,
            domain="public",
        )
        engine.scheduler.submit(submit, time.time())
    while engine.scheduler.has_work:
        engine.turn()
        for output in engine.scheduler.take_outputs().get(0, []):
            if not isinstance(output, Tokens):
                raise RuntimeError(f"refused: {output.detail}")
            texts[int(output.request_id)] += output.token_ids
    return time.perf_counter() - begin, texts


@torch.inference_mode()
def run_transformers(model: Any, workload: CpuWorkload) -> tuple[float, Prompts]:
    """Seconds, and the generated tokens."""
    ids = torch.tensor(workload.prompts)
    begin = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=workload.max_tokens,
        max_new_tokens=workload.max_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return time.perf_counter() - begin, out[:, ids.shape[1] :].tolist()


def make_engine(model_dir: Path, dtype: str, threads: int) -> BenchmarkEngine:
    settings = WorkerSettings(
        device=Device.CPU,
        dtype=DType(dtype),
        cpu_threads=threads,
        max_model_len=1024,
        kv_tokens=16384,
        max_running=32,
    )
    return BenchmarkEngine(settings, model_dir)


def compare(
    workload: CpuWorkload, subjects: dict[str, Callable[[CpuWorkload], tuple[float, Prompts]]]
) -> dict[str, float]:
    """Each subject's tokens a second in one round, and a warning when the texts differ."""
    rates, texts = {}, {}
    for subject, run in subjects.items():
        seconds, texts[subject] = run(workload)
        rates[subject] = workload.counted_tokens / seconds
    ours, theirs = texts.values()
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    if same < len(ours):
        print(f"{workload.name}: {same} of {len(ours)} texts equal", file=sys.stderr)
    return rates


def measure(
    workload: CpuWorkload,
    dtype: str,
    runs: int,
    subjects: dict[str, Callable[[CpuWorkload], tuple[float, Prompts]]],
) -> list[str]:
    """The better of `runs` for each subject; the row of the table."""
    rounds = [compare(workload, subjects) for _ in range(runs)]
    best = {subject: max(rates[subject] for rates in rounds) for subject in subjects}
    for subject, rate in best.items():
        results.record(
            {
                "benchmark": "cpu_engine",
                "workload": workload.name,
                "model": "SmolLM2-135M-Instruct",
                "subject": subject,
                "metric": "input_tokens" if workload.counts_input else "output_tokens",
                "value": round(rate, 2),
                "unit": "tokens/s",
                "dtype": dtype,
                "device": f"cpu, {torch.get_num_threads()} threads",
                "date": time.strftime("%F", time.gmtime()),
            }
        )
    ours, theirs = best.values()
    cells = [f"{rate:,.1f}" for rate in best.values()]
    return [workload.name, dtype, *cells, f"{ours / theirs:.2f}", f"{workload.goal:.1f}"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="default: the demo model")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--workload", nargs="+", default=[w.name for w in workloads()])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args(argv)
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(arguments.threads)
    model_dir = arguments.model or demo_model.ensure()
    rows = []
    for dtype in arguments.dtype:
        engine = make_engine(model_dir, dtype, arguments.threads)
        kind: Any = AutoModelForCausalLM
        model = kind.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
        subjects: dict[str, Callable[[CpuWorkload], tuple[float, Prompts]]] = {
            "radixgrove": lambda workload, engine=engine: run_engine(engine, workload),  # type: ignore[misc]
            "transformers": lambda workload, model=model: run_transformers(model, workload),  # type: ignore[misc]
        }
        for workload in workloads():
            if workload.name in arguments.workload:
                rows.append(measure(workload, dtype, arguments.runs, subjects))
        engine.close()
    header = ("workload", "dtype", "radixgrove", "transformers", "times", "goal")
    print(table(rows, header))
    return 0


if __name__ == "__main__":
    sys.exit(main())

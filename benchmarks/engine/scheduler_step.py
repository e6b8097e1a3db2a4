"""CPU time of the scheduler per decode step, and of the radix tree on a long prompt. No GPU.

    python -m benchmarks.engine.scheduler_step --rows 256 --depth 2

Rows decode on an executor that does nothing; `complete` is followed by encoding the outputs for
one frontend, as the engine does. Prints and records median and 99th percentile in microseconds.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from benchmarks import results
from radixgrove.protocol.blocks import BlockHasher
from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.cache.node import CacheScope
from radixgrove.worker.cache.pool import PagePool
from radixgrove.worker.cache.timeline import Timeline
from radixgrove.worker.cache.tree import RadixTree
from radixgrove.worker.messages import Outputs, Submit
from radixgrove.worker.plan import StepPlan, StepResult
from radixgrove.worker.scheduler.config import SchedulerConfig
from radixgrove.worker.scheduler.scheduler import Scheduler

PAGE = 16
VOCABULARY = 128_000


def decode_steps(rows: int, depth: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each phase of `steps` steps with all rows decoding."""
    config = SchedulerConfig(
        num_pages=rows * 128,
        page_size=PAGE,
        max_rows=2 * rows,
        max_running=rows,
        max_model_len=2048,
        max_step_tokens=8192,
        vocab_size=VOCABULARY,
    )
    scheduler = Scheduler(config)
    random = np.random.default_rng(0)
    for index in range(rows):
        prompt = random.integers(0, 10_000, int(random.integers(100, 1024)), dtype="<i4")
        sampling = SamplingParams(max_tokens=1000, seed=index, stop_token_ids=(2,))
        scheduler.submit(
            Submit(
                request_id=f"chatcmpl-{index:024d}",
                frontend=0,
                token_ids=prompt.tobytes(),
                sampling=sampling,
                domain="local",
            ),
            0.0,
        )
    encoder = msgspec.msgpack.Encoder()
    seconds: dict[str, list[float]] = {"schedule": [], "complete": [], "encode": []}
    flights: deque[StepPlan] = deque()
    gc.collect()
    gc.freeze()  # as the engine does
    while len(seconds["schedule"]) < steps:
        while len(flights) < depth:
            begin = time.perf_counter()
            plan = scheduler.schedule(1.0)
            elapsed = time.perf_counter() - begin
            if plan is None:
                return seconds
            flights.append(plan)
            if len(plan.decodes) == rows:
                seconds["schedule"].append(elapsed)
        plan = flights.popleft()
        result = StepResult(step_id=plan.step_id, tokens=[5] * len(plan.sampled_rows()))
        begin = time.perf_counter()
        scheduler.complete(result)
        completed = time.perf_counter()
        for items in scheduler.take_outputs().values():
            encoder.encode(Outputs(items))
        encoded = time.perf_counter()
        if len(plan.decodes) == rows:
            seconds["complete"].append(completed - begin)
            seconds["encode"].append(encoded - completed)
    return seconds


def long_prompt(tokens: int) -> dict[str, list[float]]:
    """Seconds to insert a prompt (hashing included) and to find it again."""
    pages = tokens // PAGE
    scope = CacheScope("model", "local")
    seconds: dict[str, list[float]] = {"insert": [], "match": []}
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, tokens, dtype="<i4").tobytes()
    hasher = BlockHasher(b"secret", "model", PAGE)
    for _ in range(10):
        timeline = Timeline()
        pool = PagePool(pages, timeline)
        tree = RadixTree(pool, timeline, PAGE, hasher=lambda _: hasher)
        node = tree.match(scope, prompt, pages)
        tree.residency.lock(node)
        table = pool.allocate(pages)
        seconds["insert"].append(timed(lambda: tree.insert(node, prompt, table, pages)))  # noqa: B023
        seconds["match"].append(timed(lambda: tree.peek(scope, prompt, pages)))  # noqa: B023
    return seconds


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def report(workload: str, seconds: dict[str, list[float]]) -> None:
    for metric, values in seconds.items():
        for name, share in (("p50", 50), ("p99", 99)):
            value = round(float(np.percentile(values, share)) * 1e6, 1)
            print(f"{workload:<28} {metric:<10} {name}  {value:>9.1f} us")
            results.record(
                {
                    "benchmark": "scheduler_step",
                    "workload": workload,
                    "model": None,
                    "subject": "radixgrove",
                    "metric": f"{metric}_{name}",
                    "value": value,
                    "unit": "us",
                    "device": "cpu",
                }
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--prompt-tokens", type=int, default=100_000)
    options = parser.parse_args()
    report(
        f"decode_{options.rows}_depth{options.depth}",
        decode_steps(options.rows, options.depth, options.steps),
    )
    report(f"prompt_{options.prompt_tokens}", long_prompt(options.prompt_tokens))


if __name__ == "__main__":
    main()

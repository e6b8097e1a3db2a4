"""A host tier's copies on a GPU: seconds to lock its memory, and how fast pages go there and back.

    python -m benchmarks.engine.host_tier [--gib 8] [--tests]

Pages are those of Llama-3.1-8B in bfloat16, 2 MiB each, on the host side by side or scattered.
Beside the bandwidth stands what a copy takes of the thread that launches it; then, what matrix
products lose while copies run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from benchmarks import results
from radixgrove.worker.attention.kv_pool import KvGroup, KvShape
from radixgrove.worker.execution.memory import GIB
from radixgrove.worker.execution.page_copier import CudaPageCopier
from radixgrove.worker.execution.pinned import HostMemory
from radixgrove.worker.plan import PageCopies, StepPlan

LAYERS = KvGroup(layers=tuple(range(32)), kv_heads=8, head_dim=128, dtype=torch.bfloat16)
SHAPE = KvShape((LAYERS,), page_size=16)
DEVICE = torch.device("cuda", 0)
PAGES = 512
TURNS = 5


def show(what: str, value: float, unit: str, launch: float | None = None) -> None:
    beside = "" if launch is None else f"{launch * 1e6:9.0f} us to launch"
    print(f"{what:<40}{value:9.2f} {unit:<6}{beside}", flush=True)
    results.record(
        {
            "benchmark": "host_tier",
            "workload": what,
            "model": "llama-3.1-8b",
            "subject": "radixgrove",
            "metric": {"s": "seconds", "x": "slowdown"}.get(unit, "bandwidth"),
            "value": value,
            "unit": unit,
            "launch_seconds": launch,
        }
    )


def lock(size: int) -> HostMemory:
    begin = time.perf_counter()
    memory = HostMemory(size, SHAPE.page_bytes, DEVICE)
    memory.wait(lambda done: None)
    seconds = time.perf_counter() - begin
    show(f"locking {size / GIB:g} GiB", seconds, "s")
    return memory


def measure(what: str, copied: int, launch: Callable[[], object]) -> None:
    """Median of some turns, the first of which, that compiles, does not count."""
    launching, whole = [], []
    for _ in range(1 + TURNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        launch()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        launching.append(launched - begin)
        whole.append(time.perf_counter() - begin)
    seconds = statistics.median(whole[1:])
    show(what, copied / seconds / 1e9, "GB/s", statistics.median(launching[1:]))


def measure_tier(tier: CudaPageCopier, memory: HostMemory) -> None:
    copied = PAGES * SHAPE.page_bytes
    host = memory.bytes[: min(copied, memory.chunk)]
    device = torch.empty_like(host, device=DEVICE)
    measure("one copy from the host", host.nbytes, lambda: device.copy_(host, non_blocking=True))
    measure("one copy to the host", host.nbytes, lambda: host.copy_(device, non_blocking=True))
    pages = random.sample(range(PAGES), PAGES)
    places = {
        "side by side": list(range(PAGES)),
        "scattered": random.sample(range(len(tier.host)), PAGES),
    }
    copy_id = 0
    for name, host_pages in places.items():

        def plan(*, save: bool, host_pages: list[int] = host_pages) -> StepPlan:
            nonlocal copy_id
            copy_id += 1
            copies = [PageCopies(copy_id, pages, host_pages)]
            if save:
                return StepPlan(step_id=copy_id, saves=copies)
            return StepPlan(step_id=copy_id, loads=copies, awaited=copy_id)

        measure(f"save, {name}", copied, lambda: tier.launch(plan(save=True), False))
        measure(f"load, {name}", copied, lambda: tier.launch(plan(save=False), False))
        measure(f"load by layer, {name}", copied, lambda: tier.launch(plan(save=False), True))
        for kind, save in (("saves", True), ("loads", False)):
            beside = plan(save=save)
            beside.awaited = 0
            slower = slowdown(partial(tier.launch, beside, False))
            show(f"products beside {kind}, {name}", slower, "x")


def slowdown(launch: Callable[[], object]) -> float:
    """How many times as long products of 256 rows take beside the copies, as they do alone."""
    rows = torch.randn(256, 4096, dtype=torch.bfloat16, device=DEVICE)
    weights = torch.randn(8, 4096, 14336, dtype=torch.bfloat16, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    torch.matmul(rows, weights[0])
    with torch.cuda.graph(graph):
        for turn in range(400):
            torch.matmul(rows, weights[turn % len(weights)])

    def milliseconds(*, copying: bool) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        while copying and not end.query():
            launch()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    for copying in (False, True):
        milliseconds(copying=copying)
    alone = statistics.median(milliseconds(copying=False) for _ in range(TURNS))
    return statistics.median(milliseconds(copying=True) for _ in range(TURNS)) / alone


def run_tests() -> int:
    """Those that need the GPU, with this folder's fixtures only."""
    options = "-q --maxfail=5 -m gpu -c /dev/null --import-mode=importlib -W ignore"
    options += f" -p no:cacheprovider --rootdir={results.ROOT} --durations=5"
    tests = results.ROOT / "tests" / "worker" / "execution"
    return pytest.main([*options.split(), f"--confcutdir={tests}", f"{tests}/test_page_copier.py"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8.0, help="of host memory")
    parser.add_argument("--tests", action="store_true", help="run the tests that need a GPU first")
    arguments = parser.parse_args()
    failed = run_tests() if arguments.tests else 0
    torch.empty(1, device=DEVICE)  # makes the context, which the first lock would wait for
    random.seed(0)
    pages = int(arguments.gib * GIB) // SHAPE.page_bytes
    memory = lock(pages * SHAPE.page_bytes)
    with torch.inference_mode():
        tier = CudaPageCopier(SHAPE.allocate(PAGES, DEVICE), memory)
        measure_tier(tier, memory)
        tokens = tier.measure()
    show("a short load, as at start", tokens * SHAPE.bytes_per_token / 1e9, "GB/s")
    begin = time.perf_counter()
    tier.close()
    show("unlocking", time.perf_counter() - begin, "s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

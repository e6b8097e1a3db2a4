"""How much memory steps and graphs take on a GPU: the heaviest step, run once on a small pool."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from radixgrove.kernels import ops as kernels
from radixgrove.worker.execution.assembly import LoadedModel
from radixgrove.worker.execution.graphs import Report as CaptureReport
from radixgrove.worker.execution.memory import CudaUse
from radixgrove.worker.execution.page_copier import staging_bytes
from radixgrove.worker.execution.sampling.logits_processors import counting_bytes
from radixgrove.worker.execution.warmup import exercise, trial_pages
from radixgrove.worker.messages import EngineState

Capture = Callable[[list[int], CaptureReport], object]


def measure_cuda(loaded: LoadedModel, longest: int) -> CudaUse:
    """Run the heaviest step and capture two graphs on a small pool, then throw it away."""
    device, limits = loaded.model.device, loaded.limits
    loaded.say(EngineState.WARMING_UP, "measuring memory with a trial step")
    kernels.tuner.tune(
        loaded.model.projections(),
        limits.max_running,
        limits.max_step_tokens,
        lambda text, done: loaded.say(EngineState.WARMING_UP, text, done),
    )
    kernels.expert_tuner.tune(
        *loaded.model.experts(),
        limits.max_step_tokens,
        lambda text, done: loaded.say(EngineState.WARMING_UP, text, done),
    )
    weights = torch.cuda.memory_allocated(device)
    pages = trial_pages(limits.max_step_tokens, limits.max_running, loaded.settings.page_size)
    window_pages = 0 if loaded.windows is None else pages
    runner, backend = loaded.assemble(pages, window_pages, longest, loaded.report, memory=None)
    pool = loaded.shape.allocated_bytes(pages)
    torch.cuda.reset_peak_memory_stats(device)
    exercise(runner, limits.max_step_tokens)
    activations = torch.cuda.max_memory_allocated(device) - weights - pool
    # The trial's rows are short: what penalties count of long ones comes on top.
    activations += counting_bytes(limits.max_running, longest)
    if loaded.member.stages > 1:
        # Received of steps in flight, and on their way to the stage after.
        step = limits.max_step_tokens * loaded.config.hidden_size * loaded.model.dtype.itemsize
        activations += limits.depth * step
    graphs = 0
    loaded.member.minimum(0)  # ranks that share a device measure the same at the same time
    batches, steps = loaded.graph_sizes(backend)
    if batches:
        graphs += _graph_bytes(runner.capture, batches, device)
    if steps:
        graphs += _graph_bytes(runner.capture_mixed, steps, device)
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    loaded.member.minimum(0)  # none has memory of its trial any more
    free, total = torch.cuda.mem_get_info(device)
    other = total - free - torch.cuda.memory_reserved(device)
    if loaded.memory is not None:
        other += staging_bytes(loaded.shape.page_bytes)
    return CudaUse(total, weights, activations, graphs, other)


def _graph_bytes(capture: Capture, sizes: list[int], device: torch.device) -> int:
    """What capturing all of `sizes` takes: static buffers (a float32 row of logits for each row of
    a batch is much of it) with the largest one, and the rest each like the second."""
    torch.cuda.empty_cache()
    free = []

    def note(*_: object) -> None:
        free.append(torch.cuda.mem_get_info(device)[0])

    note()
    capture(sizes[-2:], note)  # notes before each
    note()
    first, others = free[0] - free[2], free[2] - free[-1]
    return max(0, first) + max(0, others) * (len(sizes) - 1)

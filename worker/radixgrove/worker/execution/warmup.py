"""Steps that run before the first request: they compile, allocate and measure."""

from __future__ import annotations

import time

import numpy as np
import torch

from radixgrove.protocol.sampling import SamplingParams
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.plan import ExecutorInfo, NewRow, PrefillChunk, StepPlan

# Enough to be bound by the matrix multiplications, little enough not to delay a CPU's start.
_MEASURED_TOKENS = {"cpu": 256, "cuda": 4096}


def prefill_plan(info: ExecutorInfo, tokens: int, rows: int, sampling: SamplingParams) -> StepPlan:
    """A prefill of about `tokens` tokens over `rows` rows, as much of it as fits the pool."""
    length = max(1, min(tokens // rows, info.max_model_len - 1))
    pages = -(-length // info.page_size)
    rows = max(1, min(rows, info.num_pages // pages))
    ids = np.arange(length, dtype="<i4") % info.vocab_size
    return StepPlan(
        step_id=0,
        new_rows=[
            NewRow(
                row=row,
                token_ids=ids.tobytes(),
                prompt_len=length,
                pages=list(range(row * pages, (row + 1) * pages)),
                sampling=sampling,
            )
            for row in range(rows)
        ],
        prefills=[PrefillChunk(row, 0, length, True) for row in range(rows)],
    )


def measure_prefill(runner: Runner, max_step_tokens: int, device: torch.device) -> float:
    """Input tokens a second of a second, warm, prefill step."""
    tokens = min(max_step_tokens, _MEASURED_TOKENS[device.type])
    plan = prefill_plan(runner.info, tokens, 1, SamplingParams(max_tokens=1, seed=0, temperature=0))
    for _ in range(2):
        begin = time.perf_counter()
        runner.launch(plan)
        runner.collect()
        elapsed = time.perf_counter() - begin
    return plan.num_tokens / elapsed

"""Steps that run before the first request: they compile, allocate and measure."""

from __future__ import annotations

import time

import numpy as np
import torch

from radixgrove.protocol.sampling import MAX_TOP_LOGPROBS, SamplingParams
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.plan import ExecutorInfo, NewRow, PrefillChunk, StepPlan

# Enough to be bound by the matrix multiplications, little enough not to delay a CPU's start.
_MEASURED_TOKENS = {"cpu": 256, "cuda": 4096}
# Everything the sampler can be asked for at once.
_HEAVIEST = SamplingParams(
    max_tokens=1,
    seed=0,
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
    min_tokens=1,
    stop_token_ids=(0,),
    logprobs=MAX_TOP_LOGPROBS,
)


def trial_pages(tokens: int, rows: int, page_size: int) -> int:
    """Pages that `exercise` needs: each row may leave its last page unfilled."""
    return -(-tokens // page_size) + rows


def _prefill_plan(info: ExecutorInfo, tokens: int, rows: int, sampling: SamplingParams) -> StepPlan:
    """A prefill of about `tokens` tokens over `rows` rows, as much of it as fits the pool."""
    longest = min(info.max_model_len - 1, info.num_pages * info.page_size)
    length = max(1, min(tokens // rows, longest))
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


def exercise(runner: Runner, max_step_tokens: int) -> None:
    """The step that needs the most memory: full of tokens, every row sampled in every way."""
    rows = min(runner.info.max_rows, max_step_tokens)
    runner.launch(_prefill_plan(runner.info, max_step_tokens, rows, _HEAVIEST))
    runner.collect()


def measure_prefill(runner: Runner, max_step_tokens: int, device: torch.device) -> float:
    """Input tokens a second of a second, warm, prefill step."""
    tokens = min(max_step_tokens, _MEASURED_TOKENS[device.type])
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    plan = _prefill_plan(runner.info, tokens, 1, sampling)
    for _ in range(2):
        begin = time.perf_counter()
        runner.launch(plan)
        runner.collect()
        elapsed = time.perf_counter() - begin
    return plan.num_tokens / elapsed

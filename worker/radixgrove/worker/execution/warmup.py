"""Steps that run before the first request: they compile, allocate and measure."""

from __future__ import annotations

import time

import numpy as np
import torch

from radixgrove.protocol.openai.sampling import MAX_TOP_LOGPROBS, SamplingParams
from radixgrove.worker.attention.decode import FUSED_ROWS
from radixgrove.worker.execution.runner import Runner
from radixgrove.worker.plan import ExecutorInfo, NewRow, PrefillChunk, StepPlan

# Enough to be bound by the matrix multiplications, little enough not to delay a CPU's start.
_MEASURED_TOKENS = {"cpu": 256, "cuda": 4096}
# Rows of steps that decode: attention treats few, some and many apart, and as many as there may be.
_DECODES = (1, 16, FUSED_ROWS)
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


def _new_row(
    info: ExecutorInfo, row: int, length: int, pages: range, sampling: SamplingParams
) -> NewRow:
    ids = np.arange(length, dtype="<i4") % info.vocab_size
    return NewRow(
        row=row,
        token_ids=ids.tobytes(),
        prompt_len=length,
        pages=list(pages),
        sampling=sampling,
    )


def _room(info: ExecutorInfo) -> int:
    """Pages that warm-up may use: page p of a row is window page p, too."""
    return info.num_window_pages or info.num_pages


def _window_pages(info: ExecutorInfo, new_rows: list[NewRow]) -> list[tuple[int, int, int]]:
    """Of all pages of the rows."""
    if not info.num_window_pages:
        return []
    return [(new.row, index, page) for new in new_rows for index, page in enumerate(new.pages)]


def _prefill_plan(info: ExecutorInfo, tokens: int, rows: int, sampling: SamplingParams) -> StepPlan:
    """A prefill of about `tokens` tokens over `rows` rows, as much of it as fits the pool."""
    longest = min(info.max_model_len - 1, _room(info) * info.page_size)
    length = max(1, min(tokens // rows, longest))
    pages = -(-length // info.page_size)
    rows = max(1, min(rows, _room(info) // pages))
    new_rows = [
        _new_row(info, row, length, range(row * pages, (row + 1) * pages), sampling)
        for row in range(rows)
    ]
    return StepPlan(
        step_id=0,
        new_rows=new_rows,
        window_pages=_window_pages(info, new_rows),
        prefills=[PrefillChunk(row, 0, length, True) for row in range(rows)],
    )


def exercise(runner: Runner, max_step_tokens: int) -> None:
    """The step that needs the most memory: full of tokens, every row sampled in every way."""
    rows = min(runner.info.max_rows, max_step_tokens)
    runner.launch(_prefill_plan(runner.info, max_step_tokens, rows, _HEAVIEST))
    runner.collect()


def rehearse_decodes(runner: Runner, max_step_tokens: int) -> None:
    """Steps that decode, beside a chunk behind a prefix and alone, of few rows and of many.

    No request waits for what they compile. Does nothing where rows, pages or tokens are too few.
    """
    info = runner.info
    each = -(-3 // info.page_size)  # pages of a decode row, of three tokens in the end
    most = min(info.max_rows - 1, (_room(info) - 2) // each, max_step_tokens - info.page_size)
    if most < 1 or info.max_model_len < info.page_size + 2:
        return
    for decodes in sorted({min(count, most) for count in (*_DECODES, most)}):
        for plan in _decode_plans(info, decodes, each):
            runner.launch(plan)
            runner.collect()


def _decode_plans(info: ExecutorInfo, decodes: int, each: int) -> list[StepPlan]:
    """Prefill row 0's first page and the rows that decode; its last token beside them; them alone.

    The second step is the smallest that prefills, where it has one decode.
    """
    page = info.page_size
    sampling = SamplingParams(max_tokens=3, seed=0, temperature=0.0)
    rows = list(range(1, decodes + 1))
    pages = {row: range(2 + (row - 1) * each, 2 + row * each) for row in rows}
    new_rows = [
        _new_row(info, 0, page + 1, range(2), sampling),
        *(_new_row(info, row, 1, pages[row], sampling) for row in rows),
    ]
    return [
        StepPlan(
            step_id=0,
            new_rows=new_rows,
            window_pages=_window_pages(info, new_rows),
            prefills=[
                PrefillChunk(0, 0, page, False),
                *(PrefillChunk(row, 0, 1, True) for row in rows),
            ],
        ),
        StepPlan(step_id=1, prefills=[PrefillChunk(0, page, 1, True)], decodes=rows),
        StepPlan(step_id=2, decodes=rows),
    ]


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

"""The request table holds what plans bring: tokens, lengths and pages, each row for itself."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.plan import NewRow, ShrunkRow, StepPlan

PAGE, SCRATCH = 4, 99


def make_table(rows: int, length: int) -> RequestTable:
    return RequestTable(
        max_rows=rows,
        max_model_len=length,
        page_size=PAGE,
        scratch_page=SCRATCH,
        device=torch.device("cpu"),
    )


def new_row(row: int, tokens: list[int], pages: list[int]) -> NewRow:
    return NewRow(
        row=row,
        token_ids=np.array(tokens, dtype="<i4").tobytes(),
        prompt_len=len(tokens),
        pages=pages,
        sampling=SamplingParams(max_tokens=1, seed=0),
    )


def test_rows_of_every_length_get_their_tokens_and_pages() -> None:
    table = make_table(4, 32)
    rows = [
        new_row(2, list(range(100, 117)), [5, 6, 7, 8]),
        new_row(0, [1], []),
        new_row(3, list(range(200, 209)), [9, 10]),
    ]
    appended = [(2, 11), (0, 12), (3, 13), (2, 14)]
    table.apply(StepPlan(step_id=1, new_rows=rows, appended_pages=appended))
    assert table.tokens[2, :17].tolist() == list(range(100, 117))
    assert table.tokens[0, :1].tolist() == [1]
    assert table.tokens[3, :9].tolist() == list(range(200, 209))
    assert table.lens.tolist() == [1, 1, 17, 9, 1]
    expected = [[12], [], [5, 6, 7, 8, 11, 14], [9, 10, 13], []]
    for row, pages in enumerate(expected):
        whole = pages + [SCRATCH] * (8 - len(pages))
        assert table.pages[row].tolist() == whole
        assert table.host_pages[row].tolist() == whole
    table.apply(
        StepPlan(step_id=2, shrunk_rows=[ShrunkRow(2, 17, 5)], appended_pages=[(2, 15), (0, 16)])
    )
    assert table.pages[2, :6].tolist() == [5, 6, 7, 8, 11, 15]
    assert table.pages[0, :2].tolist() == [12, 16]


class Counting(TorchDispatchMode):
    """How many operations were dispatched."""

    operations = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        self.operations += 1
        return function(*arguments, **(options or {}))


def test_many_rows_enter_in_as_many_operations_as_one() -> None:
    """On a GPU each is a kernel: its launch costs more than what it does."""
    counts = []
    for rows in (1, 16):
        new = [new_row(row, [0] * 9, [1, 2]) for row in range(rows)]
        table = make_table(rows, 32)
        with Counting() as counting:
            table.apply(StepPlan(step_id=1, new_rows=new))
        counts.append(counting.operations)
    assert counts[1] <= counts[0]


def test_pages_of_long_cached_prompts_enter_as_arrays() -> None:
    """As objects of Python each page would take more than a hundred bytes, and a microsecond."""
    rows, pages = 8, 4096
    table = make_table(rows, pages * PAGE + PAGE)
    tokens = [0] * (pages * PAGE + 1)
    plan = StepPlan(
        step_id=1, new_rows=[new_row(row, tokens, list(range(pages))) for row in range(rows)]
    )
    tracemalloc.start()
    table.apply(plan)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    ids = rows * (pages * PAGE + 1) * 4
    assert (peak - ids) / (rows * pages) < 80

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


def make_table(rows: int, length: int, scratch_window_page: int | None = None) -> RequestTable:
    return RequestTable(
        max_rows=rows,
        max_model_len=length,
        page_size=PAGE,
        scratch_page=SCRATCH,
        scratch_window_page=scratch_window_page,
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


def test_window_pages_are_of_pages_that_rows_have_or_get() -> None:
    table = make_table(3, 32, scratch_window_page=7)
    rows = [new_row(1, list(range(17)), [5, 6, 8, 9]), new_row(0, [1], [])]
    table.apply(
        StepPlan(
            step_id=1,
            new_rows=rows,
            appended_pages=[(1, 11), (0, 12)],
            window_pages=[(1, 3, 2), (1, 4, 0), (0, 0, 1)],
        )
    )
    assert table.window_pages is not None
    assert table.window_pages.tolist() == [
        [1, 7, 7, 7, 7, 7, 7, 7],
        [7, 7, 7, 2, 0, 7, 7, 7],
        [7] * 8,
        [7] * 8,
    ]
    assert table.pages[1, :5].tolist() == [5, 6, 8, 9, 11]
    # A page that the row has had since its first step is written in a later one.
    table.apply(StepPlan(step_id=2, appended_pages=[(1, 13)], window_pages=[(1, 5, 6)]))
    assert table.window_pages[1].tolist() == [7, 7, 7, 2, 0, 6, 7, 7]
    rows_of, positions = torch.tensor([1, 0, table.dummy_row]), torch.tensor([21, 2, 0])
    slots = table.window_slots(rows_of, positions)
    assert slots is not None
    assert slots.tolist() == [6 * PAGE + 1, 1 * PAGE + 2, 7 * PAGE]
    assert table.slots(rows_of, positions).tolist() == [
        13 * PAGE + 1,
        12 * PAGE + 2,
        SCRATCH * PAGE,
    ]


def test_a_new_request_finds_no_window_pages_of_the_last_in_its_row() -> None:
    table = make_table(2, 32, scratch_window_page=7)
    first = new_row(0, list(range(9)), [1, 2, 3])
    window_pages = [(0, index, index) for index in range(3)]
    table.apply(StepPlan(step_id=1, new_rows=[first], window_pages=window_pages))
    entries = [(0, 2, 4), (0, 1, 5)]
    second = new_row(0, list(range(9)), [4, 5, 6])
    table.apply(StepPlan(step_id=2, new_rows=[second], window_pages=entries))
    assert table.window_pages is not None
    assert table.window_pages[0].tolist() == [7, 5, 4, 7, 7, 7, 7, 7]


def test_plans_for_models_of_one_table_are_taken_as_they_are() -> None:
    """A stage without layers that have a window gets the same plans as the others."""
    table = make_table(2, 32)
    new = new_row(0, [1, 2], [3])
    table.apply(StepPlan(step_id=1, new_rows=[new], window_pages=[(0, 0, 1)]))
    assert table.window_pages is None
    assert table.window_slots(torch.tensor([0]), torch.tensor([1])) is None


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

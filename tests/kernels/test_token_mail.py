"""Samples that come back from another stage: into the rows' tokens, in the order of the steps."""

from __future__ import annotations

import torch

from radixgrove.kernels.sample import History
from radixgrove.kernels.token_mail import MARKS, post, take

ROWS = 5
DUMMY = ROWS


def test_letters_of_steps_reach_the_rows_in_every_box(device: torch.device) -> None:
    boxes = [torch.zeros(3 * ROWS, dtype=torch.int64, device=device) for _ in range(2)]
    addresses = torch.tensor([box.data_ptr() for box in boxes], device=device)
    tables = [
        History(
            torch.ones(ROWS + 1, dtype=torch.int32, device=device),
            torch.zeros(ROWS + 1, 8, dtype=torch.int32, device=device),
            DUMMY,
        )
        for _ in boxes
    ]
    steps = [
        (0, 1, [4, 0, DUMMY], [7, (1 << 24) - 1, 3]),
        (ROWS, MARKS, [0, 2], [-1, 5]),  # a sample that is none
        (0, 3, [4], [9]),  # where another step's letters lie
    ]
    expected = [[0, (1 << 24) - 1, 0], [0, 0, 0], [0, 5, 0], [0, 0, 0], [0, 7, 9], [0, 0, 0]]
    for first, mark, rows, tokens in steps:
        sent = torch.tensor(tokens, device=device), torch.tensor(rows, device=device)
        post(*sent, addresses, first, mark)
        for box, table in zip(boxes, tables, strict=True):
            take(box, len(rows), first, mark, table)
    for table in tables:
        assert table.tokens[:, :3].tolist() == expected
        assert table.lens.tolist() == [3, 1, 2, 1, 3, 1]

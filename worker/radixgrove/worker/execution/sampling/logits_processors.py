"""Changes to logits before the draw: penalties, bias, and stop tokens masked until `min_tokens`.

Counts are computed from the request table's tokens when a row needs them rather than kept between
steps, so a preempted request needs nothing restored.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from radixgrove.kernels import ops
from radixgrove.worker.execution.sampling.state import SamplingFeatures, SamplingState
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.execution.transfer import to_device

_COUNTED_TOKENS = 1 << 20  # at once, or one row's
_COUNTING_BYTES = 32  # of scratch a token: ids, indices, masks, counts


def edit_logits(
    logits: Tensor,
    rows: Tensor,
    needs: list[int],
    state: SamplingState,
    table: RequestTable,
    longest: int,
) -> None:
    """Edit float32 `logits` [S, V] in place.

    Args:
        rows: [S] int64.
        needs: of each row, so that only those concerned are touched.
        longest: an upper bound of the rows' lengths.
    """
    for need, edit in (
        (SamplingFeatures.PENALTY, _penalize),
        (SamplingFeatures.BIAS, _bias),
        (SamplingFeatures.MIN_TOKENS, _mask_stops),
    ):
        concerned = [i for i, row_need in enumerate(needs) if row_need & need]
        if not concerned:
            continue
        if len(concerned) == len(needs):
            edit(logits, rows, state, table, longest)
        else:
            index = to_device(np.array(concerned), rows.device)
            part = logits.index_select(0, index)
            edit(part, rows.index_select(0, index), state, table, longest)
            logits.index_copy_(0, index, part)


def _penalize(
    logits: Tensor, rows: Tensor, state: SamplingState, table: RequestTable, longest: int
) -> None:
    """Repetition (Keskar et al., CTRL, 2019) over prompt and output; presence and frequency, as in
    OpenAI's API, over the output alone."""
    floats = state.floats(rows)
    prompt_lens = state.integers(rows)["prompt_len"]
    # One column more, for tokens of a prompt that have no logit.
    size = len(logits), logits.shape[1] + 1
    counts = torch.zeros(size, dtype=torch.int32, device=logits.device)
    step = _rows_at_once(longest)
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        _count_tokens(counts[part], rows[part], prompt_lens[part, None], table, longest)
    own = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    ops.penalize(
        logits, own, counts[:, :-1], floats["repetition"], floats["presence"], floats["frequency"]
    )


def _count_tokens(
    counts: Tensor, rows: Tensor, prompt_lens: Tensor, table: RequestTable, longest: int
) -> None:
    """Fills `counts` [S, V + 1], zeros, as `ops.penalize` reads them."""
    lens = table.lens.index_select(0, rows)[:, None]
    tokens = table.tokens[:, :longest].index_select(0, rows).long()
    tokens.clamp_(max=counts.shape[1] - 1)
    positions = torch.arange(longest, device=rows.device)
    # Positions beyond a prompt mark its first token: all that write to one place write the same.
    counts.scatter_(1, torch.where(positions < prompt_lens, tokens, tokens[:, :1]), ops.PROMPT_BIT)
    generated = (positions >= prompt_lens) & (positions < lens)
    counts.scatter_add_(1, tokens, generated.int())


def _rows_at_once(longest: int) -> int:
    """Rows with tokens counted together: their scratch is bounded, however long they are."""
    return max(1, _COUNTED_TOKENS // longest)


def counting_bytes(rows: int, longest: int) -> int:
    """Most scratch, in bytes, that counting the tokens of so many rows takes."""
    tokens = min(rows, _rows_at_once(longest)) * longest
    return tokens * _COUNTING_BYTES


def _bias(
    logits: Tensor, rows: Tensor, state: SamplingState, table: RequestTable, longest: int
) -> None:
    logits.scatter_add_(1, state.bias.ids[rows], state.bias.values[rows])


def _mask_stops(
    logits: Tensor, rows: Tensor, state: SamplingState, table: RequestTable, longest: int
) -> None:
    integers = state.integers(rows)
    generated = table.lens.index_select(0, rows) - integers["prompt_len"]
    early = (generated < integers["min_tokens"])[:, None]
    values = state.stops.values[rows]
    logits.scatter_add_(1, state.stops.ids[rows], torch.where(early, values, 0.0))

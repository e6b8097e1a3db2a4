"""From a plan to the tensors of a forward pass, computed on the device from the request table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixgrove.worker.attention.base import AttentionBatch
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.execution.transfer import to_device
from radixgrove.worker.plan import StepPlan


@dataclass(slots=True)
class StepInputs:
    """What the model and the sampler read in one step."""

    token_ids: Tensor  # [T] int32
    batch: AttentionBatch
    sampled_rows: Tensor  # [S] int64
    # [S] int64, index of each sampled row's last token in the step; [N] with bounds, where each row
    # has as many as its bound.
    sampled_tokens: Tensor


def step_inputs(plan: StepPlan, table: RequestTable, device: torch.device) -> StepInputs:
    """Inputs of prefill chunks and decodes together.

    Only the plan's integers travel; tokens, positions and slots are gathered on the device, since a
    decode's token may be a sample that never reached the host.
    """
    if plan.bounds:
        return _bounded_inputs(plan, table, device)
    if not plan.prefills:
        return _decode_inputs(plan.decodes, table, device)
    prefills, decodes = plan.prefills, plan.decodes
    num_prefills, num_decodes = len(prefills), len(decodes)
    q_lens = [chunk.length for chunk in prefills]
    rows = [chunk.row for chunk in prefills] + decodes
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(q_lens + [1] * num_decodes, out=offsets[1:])
    prefill_tokens = int(offsets[num_prefills])
    sampled = [i for i, chunk in enumerate(prefills) if chunk.sample]
    sampled += range(num_prefills, len(rows))
    fields = [
        np.array(rows, dtype=np.int64),
        offsets,
        np.array([chunk.start for chunk in prefills], dtype=np.int64),
        np.array(sampled, dtype=np.int64),
    ]
    packed = to_device(np.concatenate(fields), device)
    row, offset, start, chosen = torch.split(packed, [len(field) for field in fields])
    lengths = offset.diff()
    first = torch.cat([start, table.lens.index_select(0, row[num_prefills:]).long() - 1])

    tokens = int(offsets[-1])
    segment = torch.repeat_interleave(lengths, output_size=tokens)
    token_row = row.index_select(0, segment)
    positions = torch.arange(tokens, device=device) + (first - offset[:-1]).index_select(0, segment)
    batch = AttentionBatch(
        num_prefills=num_prefills,
        num_decodes=num_decodes,
        num_prefill_tokens=prefill_tokens,
        rows=row.int(),
        qo_indptr=offset.int(),
        kv_lens=(first + lengths).int(),
        page_table=table.pages,
        slots=table.slots(token_row, positions),
        window_table=table.window_pages,
        window_slots=table.window_slots(token_row, positions),
        positions=positions,
        q_lens_host=q_lens,
        kv_lens_host=[chunk.start + chunk.length for chunk in prefills]
        + [table.host_lens[r] for r in decodes],
    )
    return StepInputs(
        token_ids=table.tokens[token_row, positions],
        batch=batch,
        sampled_rows=row.index_select(0, chosen),
        sampled_tokens=offset.index_select(0, chosen + 1) - 1,
    )


def _decode_inputs(rows: list[int], table: RequestTable, device: torch.device) -> StepInputs:
    """Inputs of a step of decodes alone, in half as many operations: one token a row, its last."""
    row = to_device(np.array(rows, dtype=np.int64), device)
    kv_lens = table.lens.index_select(0, row)
    positions = kv_lens.long() - 1
    token = torch.arange(len(rows) + 1, device=device)
    batch = AttentionBatch(
        num_prefills=0,
        num_decodes=len(rows),
        num_prefill_tokens=0,
        rows=row.int(),
        qo_indptr=token.int(),
        kv_lens=kv_lens,
        page_table=table.pages,
        slots=table.slots(row, positions),
        window_table=table.window_pages,
        window_slots=table.window_slots(row, positions),
        positions=positions,
        kv_lens_host=[table.host_lens[r] for r in rows],
    )
    return StepInputs(
        token_ids=table.tokens[row, positions],
        batch=batch,
        sampled_rows=row,
        sampled_tokens=token[:-1],
    )


def _bounded_inputs(plan: StepPlan, table: RequestTable, device: torch.device) -> StepInputs:
    """Inputs of a step that may yield several tokens a row: chunks, all of them.

    A sampled row's last token is followed by what is proposed, so many that there are as many
    positions to sample at as its bound.
    """
    prefills, decodes = plan.prefills, plan.decodes
    bounds = dict(zip(plan.sampled_rows(), plan.bounds, strict=True))
    rows = [chunk.row for chunk in prefills] + decodes
    known = [chunk.length for chunk in prefills] + [1] * len(decodes)
    q_lens = [length + bounds.get(row, 1) - 1 for row, length in zip(rows, known, strict=True)]
    starts = [chunk.start for chunk in prefills]
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(q_lens, out=offsets[1:])
    drawn = [
        np.arange(end - bounds[row], end)
        for row, end in zip(rows, offsets[1:], strict=True)
        if row in bounds
    ]
    fields = [
        np.array(rows, dtype=np.int64),
        offsets,
        np.array(starts, dtype=np.int64),
        np.array(plan.sampled_rows(), dtype=np.int64),
        np.concatenate(drawn, dtype=np.int64),
    ]
    packed = to_device(np.concatenate(fields), device)
    row, offset, start, sampled_rows, sampled_tokens = torch.split(
        packed, [len(field) for field in fields]
    )
    lengths = offset.diff()
    last = table.lens.index_select(0, row[len(prefills) :]).long() - 1
    first = torch.cat([start, last])
    tokens = int(offsets[-1])
    segment = torch.repeat_interleave(lengths, output_size=tokens)
    token_row = row.index_select(0, segment)
    positions = torch.arange(tokens, device=device) + (first - offset[:-1]).index_select(0, segment)
    starts += [table.host_lens[r] - 1 for r in decodes]
    batch = AttentionBatch(
        num_prefills=len(rows),
        num_decodes=0,
        num_prefill_tokens=tokens,
        rows=row.int(),
        qo_indptr=offset.int(),
        kv_lens=(first + lengths).int(),
        page_table=table.pages,
        slots=table.slots(token_row, positions),
        window_table=table.window_pages,
        window_slots=table.window_slots(token_row, positions),
        positions=positions,
        q_lens_host=q_lens,
        kv_lens_host=[start + length for start, length in zip(starts, q_lens, strict=True)],
    )
    return StepInputs(table.tokens[token_row, positions], batch, sampled_rows, sampled_tokens)

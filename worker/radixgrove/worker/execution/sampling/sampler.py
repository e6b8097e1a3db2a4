"""The sampler: everything between the logits of a step and its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import numpy as np
import torch
from torch import Tensor

from radixgrove.kernels.sample import VocabShard
from radixgrove.worker.execution.sampling.draw import draw, draw_by_kernels
from radixgrove.worker.execution.sampling.logits_processors import edit_logits
from radixgrove.worker.execution.sampling.logprobs import LogprobTensors, token_logprobs
from radixgrove.worker.execution.sampling.masks import TokenMasks
from radixgrove.worker.execution.sampling.state import EDITS, SamplingFeatures, SamplingState
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.execution.transfer import to_device
from radixgrove.worker.plan import INVALID_TOKEN

_MIN_TOKENS, _LOGPROBS = int(SamplingFeatures.MIN_TOKENS), int(SamplingFeatures.LOGPROBS)


@dataclass(slots=True)
class Sampled:
    """A step's samples on the device, and the logprobs of those rows that asked.

    With bounds above one there are N tokens, of each row as many as its bound, and `counts` says
    how many of them, from the first, are the row's. So it is with logprobs.
    """

    tokens: Tensor  # [S] or [N] int64
    counts: Tensor | None = None  # [S] int64; None: one each
    logprob_rows: list[int] = field(default_factory=list)
    logprobs: LogprobTensors | None = None


class Sampler:
    """Samples, and appends the samples to the request table, without waiting for the device."""

    def __init__(self, state: SamplingState, table: RequestTable) -> None:
        self._state = state
        self._table = table

    def need(self, rows: list[int]) -> int:
        """What the rows need between them, a union of `Need`."""
        return reduce(or_, self._needs(rows), 0)

    def _needs(self, rows: list[int]) -> list[int]:
        """Of each row; `MIN_TOKENS` only while it still applies."""
        needs = [self._state.needs[row] for row in rows]
        if any(need & _MIN_TOKENS for need in needs):
            needs = [self._current_need(row) for row in rows]
        return needs

    def _current_need(self, row: int) -> int:
        need, params = self._state.needs[row], self._state.params[row]
        generated = self._table.host_lens[row] - self._state.prompt_lens[row]
        if params is None or generated >= params.min_tokens:
            need &= ~_MIN_TOKENS
        return need

    def sample(
        self,
        logits: Tensor,
        rows: Tensor,
        host_rows: list[int],
        masks: TokenMasks | None = None,
    ) -> Sampled:
        """One token for each of `rows` ([S] int64; `host_rows` are the same) from logits [S, V].

        Masks come after all edits, and change the logits in place unless their probabilities are
        wanted, which are the model's own.
        """
        needs = self._needs(host_rows)
        need = reduce(or_, needs, 0)
        raw = logits
        if need & EDITS:
            logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
            longest = max(self._table.host_lens[row] for row in host_rows)
            edit_logits(logits, rows, needs, self._state, self._table, longest)
        if masks is not None:
            logits = masks.applied(logits, keep=logits is raw and bool(need & _LOGPROBS))
        tokens = self.draw_and_append(logits, rows, need)
        index = [i for i, row_need in enumerate(needs) if row_need & _LOGPROBS]
        asking_rows = [host_rows[i] for i in index]
        return Sampled(tokens, None, asking_rows, self._logprobs(raw, tokens, index, asking_rows))

    def _logprobs(
        self, logits: Tensor, tokens: Tensor, index: list[int], rows: list[int]
    ) -> LogprobTensors | None:
        """Of those tokens in `index`, which are `rows`' that asked."""
        if not index:
            return None
        if len(index) < len(tokens):
            chosen = to_device(np.array(index), logits.device)
            logits, tokens = logits.index_select(0, chosen), tokens.index_select(0, chosen)
        return token_logprobs(logits, tokens, max(self.logprob_width(row) for row in rows))

    def sample_bounded(
        self,
        logits: Tensor,
        rows: Tensor,
        host_rows: list[int],
        bounds: list[int],
        masks: TokenMasks | None = None,
    ) -> Sampled:
        """Between one token and its bound for each of `rows`, from logits [N, V], `bounds[i]` for
        row i: what is drawn at its positions, as long as what was proposed for them is the same.

        The tokens do not depend on the proposals, which say only how many come at once.
        """
        needs = self._needs(host_rows)
        need = reduce(or_, needs, 0)
        device, total = logits.device, sum(bounds)
        # Edits look at the tokens before, which the table holds for a row's first position alone.
        limits = [1 if n & EDITS else bound for n, bound in zip(needs, bounds, strict=True)]
        if masks is not None:
            limits = np.minimum(limits, masks.limits(bounds)).tolist()
        packed = to_device(np.array([np.cumsum([0, *bounds])[:-1], bounds, limits]), device)
        first, bound, limit = packed
        raw = logits
        if need & EDITS:
            edited = logits.index_select(0, first).float()
            longest = max(self._table.host_lens[row] for row in host_rows)
            edit_logits(edited, rows, needs, self._state, self._table, longest)
            logits = logits.float().index_copy(0, first, edited)
        if masks is not None:
            logits = masks.applied(logits, keep=logits is raw and bool(need & _LOGPROBS))
        item = torch.repeat_interleave(bound, output_size=total)
        ahead = torch.arange(total, device=device) - first.index_select(0, item)
        each = rows.index_select(0, item)
        positions = self._table.lens.index_select(0, each) + ahead
        tokens = draw(logits, each, positions, self._state, need).clamp(min=0)
        offsets = torch.cat([first, first[-1:] + bound[-1:]])
        counts = self._table.append_proven(rows, tokens, offsets, limit, max(bounds))
        tokens = _mark_invalid(logits, tokens)
        asking = [i for i, row_need in enumerate(needs) if row_need & _LOGPROBS]
        starts = np.cumsum([0, *bounds])
        index = [int(at) for i in asking for at in range(starts[i], starts[i + 1])]
        asking_rows = [host_rows[i] for i in asking]
        return Sampled(tokens, counts, asking_rows, self._logprobs(raw, tokens, index, asking_rows))

    def draw_and_append(
        self,
        logits: Tensor,
        rows: Tensor,
        need: int,
        out: Tensor | None = None,
        shard: VocabShard | None = None,
    ) -> Tensor:
        """The part that is captured: device work only, shapes alone decide what runs.

        The tokens, [S] int64, are in `out` if given; `INVALID_TOKEN` where the logits are NaN.

        Args:
            shard: see `draw_by_kernels`; on CUDA alone.
        """
        if logits.is_cuda:
            return draw_by_kernels(logits, rows, self._state, self._table, need, out, shard)
        positions = self._table.lens.index_select(0, rows).long()
        tokens = draw(logits, rows, positions, self._state, need)
        self._table.append(rows, tokens)
        tokens = _mark_invalid(logits, tokens)
        return tokens if out is None else out.copy_(tokens)

    def logprob_width(self, row: int) -> int:
        params = self._state.params[row]
        return 0 if params is None or params.logprobs is None else params.logprobs


def _mark_invalid(logits: Tensor, tokens: Tensor) -> Tensor:
    """Tokens [S] int64 drawn from logits [S, V]; `INVALID_TOKEN` where these are NaN."""
    logit = logits.gather(1, tokens[:, None]).squeeze(1)
    return torch.where(logit > float("-inf"), tokens, INVALID_TOKEN)

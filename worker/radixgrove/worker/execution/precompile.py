"""What steps launch beside the layers, launched once: each is compiled before it is needed.

But not what ranks draw from their parts of the vocabulary: those kernels wait for other ranks, and
whether these are within reach is found out after the weights are loaded.

Strides and types are as steps will have them: whatever differs is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from radixgrove.kernels import ops
from radixgrove.worker.execution.sampling.draw import draw_by_kernels
from radixgrove.worker.execution.sampling.state import SamplingFeatures, SamplingState
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.models.decoder import Decoder

_ROWS = 2  # of which nothing depends on how many there are
_RANDOM = SamplingFeatures.RANDOM
_NEEDS = (SamplingFeatures.NOTHING, _RANDOM, _RANDOM | SamplingFeatures.FILTER)


def step_jobs(
    model: Decoder, max_model_len: int, page_size: int, *, windows: bool
) -> list[Callable[[], object]]:
    """Launches for a model on CUDA, which may run in any threads, on one stream.

    Args:
        windows: whether layers with a window may have pages of their own; that is settled later.
    """
    steps = _Steps(model, max_model_len, page_size)
    jobs: list[Callable[[], object]] = [steps.gather, steps.flatten]
    if windows:
        jobs.append(partial(steps.gather, windows=True))
    if model.stage.has_head:
        jobs += [steps.penalize, *(partial(steps.draw, need) for need in _NEEDS)]
        if steps.edits_differ:
            jobs += [partial(steps.draw, need, edited=True) for need in _NEEDS]
    return jobs


class _Steps:
    """All rows are the dummy row, to which no sample is added."""

    def __init__(self, model: Decoder, max_model_len: int, page_size: int) -> None:
        self._model, self._device = model, model.device
        self._table = RequestTable(
            max_rows=1,
            max_model_len=max_model_len,
            page_size=page_size,
            scratch_page=0,
            scratch_window_page=0,
            device=model.device,
        )
        self._state = SamplingState(1, model.device, model.known_tokens)
        self._rows = self._integers(torch.int64) + self._table.dummy_row

    def _integers(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(_ROWS, dtype=dtype, device=self._device)

    def _logits(self, *, edited: bool) -> Tensor:
        """[S, V], of a step or as edits leave them."""
        shape, dtype = (_ROWS, self._model.config.vocab_size), self._model.logits_dtype
        logits = torch.zeros(shape, dtype=dtype, device=self._device)[:, : self._model.known_tokens]
        return logits.float().contiguous() if edited else logits

    @property
    def edits_differ(self) -> bool:
        """Whether edited logits are of another type, or otherwise strided."""
        model = self._model
        padded = model.known_tokens < model.config.vocab_size
        return padded or model.logits_dtype != torch.float32

    def flatten(self) -> None:
        """Pages of chunks, as FlashInfer wants them."""
        table, rows, last = self._table, *(self._integers(torch.int32) for _ in range(2))
        indptr, out = torch.cat([rows, rows]), torch.empty_like(rows)
        ops.kv_indices(rows, rows + 1, table.pages, table.page_size, indptr, out, last)

    def gather(self, *, windows: bool = False) -> None:
        """The inputs of a step that decodes."""
        model, table = self._model, self._table
        shape = _ROWS, model.config.hidden_size
        ops.gather_rows(
            self._rows,
            table.lens,
            table.tokens,
            table.pages,
            table.page_size,
            rows32=self._integers(torch.int32),
            kv_lens=self._integers(torch.int32),
            positions=self._integers(torch.int64),
            token_ids=self._integers(torch.int32),
            slots=self._integers(torch.int64),
            embedding=model.embedding,
            hidden=torch.zeros(shape, dtype=model.dtype, device=self._device),
            window_pages=table.window_pages if windows else None,
            window_slots=self._integers(torch.int64) if windows else None,
        )

    def penalize(self) -> None:
        logits = self._logits(edited=True)
        counts = logits.new_zeros((_ROWS, logits.shape[1] + 1), dtype=torch.int32)
        factors = logits.new_ones(_ROWS)
        rows = self._integers(torch.int32)
        ops.penalize(logits, rows, counts[:, :-1], factors, factors, factors)

    def draw(self, need: int, *, edited: bool = False) -> None:
        logits = self._logits(edited=edited)
        draw_by_kernels(logits, self._rows, self._state, self._table, need, None)

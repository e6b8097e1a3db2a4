"""Decode steps at fixed batch sizes: CUDA graphs, captured once and replayed.

A decode step is three pieces, in order: plan the attention (not captured: it may read the host's
mirrors), gather the inputs from the request table and compute the logits (captured as one, since
the GPU stands still for some microseconds between two graphs), sample and append (captured when
nothing needs editing; masks of tokens are applied before it). A batch is padded to the next size
of the ladder with the dummy row. Steps of rows with prefixes in common have graphs of their own.

In a pipeline a stage's graph reads what it received from a static buffer, and a stage before the
last leaves its states in another, for the caller to send.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from radixgrove.kernels import ops
from radixgrove.worker.attention.base import AttentionBackend, AttentionBatch
from radixgrove.worker.execution.prefixes import PrefixInputs
from radixgrove.worker.execution.sampling.masks import TokenMasks
from radixgrove.worker.execution.sampling.sampler import Sampled, Sampler
from radixgrove.worker.execution.sampling.state import EDITS, SamplingFeatures
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.execution.transfer import to_device
from radixgrove.worker.models.decoder import Decoder

# What sampling graphs exist for; a batch with other needs is sampled eagerly.
_SAMPLING = tuple(
    map(
        int,
        (
            SamplingFeatures.NOTHING,
            SamplingFeatures.RANDOM,
            SamplingFeatures.RANDOM | SamplingFeatures.FILTER,
        ),
    )
)
_EAGER = EDITS | int(SamplingFeatures.LOGPROBS)
# Smaller batches have nothing to gain from prefixes in common.
_FEWEST_GROUPED = 4
_REMEMBERED = 4  # batches that take turns, in a pipeline
_Rows = tuple[int, list[int]]  # the table's `entered`, and rows: these requests
Replay = Callable[[], None]
Report = Callable[[str, float], None]


def ladder(largest: int) -> list[int]:
    """Batch sizes to capture: fine where padding would cost much, up to `largest`."""
    sizes = {1, 2, 4, *range(8, 129, 8), *range(144, 513, 16), *range(544, largest + 1, 32)}
    return sorted({size for size in sizes if size < largest} | {largest})


class Recorder:
    """Turns a function of static buffers into its replay: a CUDA graph, or itself on a CPU.

    Graphs share one memory pool: they run one after the other on one stream, and what outlives a
    replay is in buffers allocated outside.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        if self.on_cuda:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, function: Replay) -> Replay:
        """Run once (kernels compile, libraries allocate), then capture."""
        function()
        if not self.on_cuda:
            return function
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        return graph.replay


@contextmanager
def no_collection() -> Iterator[None]:
    """A garbage collection may free CUDA memory, which a capture does not allow."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class DecodeGraphs:
    """All sizes of the ladder, for any decode-only step of one token a row that fits the largest:
    `forward`, then `sample`."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        table: RequestTable,
        sampler: Sampler,
        recorder: Recorder,
        sizes: list[int],
    ) -> None:
        self.sizes = sizes
        self.replays = 0  # steps that ran from graphs; tests prove the mode by it
        self._model = model
        self._attention = attention
        self._table = table
        self._sampler = sampler
        self._device = model.device
        largest = sizes[-1]
        self._rows = self._full(largest, table.dummy_row, torch.int64)
        self._rows_host = [table.dummy_row] * largest
        self._token_ids = self._full(largest, 0, torch.int32)
        self._positions = self._full(largest, 0, torch.int64)
        self._slots = self._full(largest, 0, torch.int64)
        self._window_slots: Tensor | None = None
        if table.window_pages is not None:
            self._window_slots = self._full(largest, 0, torch.int64)
        self._kv_lens = self._full(largest, 1, torch.int32)
        self._rows32 = self._full(largest, table.dummy_row, torch.int32)
        self._indptr = torch.arange(largest + 1, dtype=torch.int32, device=self._device)
        self._embedding = model.embedding
        # What layers begin with: embeddings, if they are at hand, or what the stage before made.
        shape = (largest, model.config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=model.dtype, device=self._device)
        self._begins_with_hidden = self._embedding is not None or not model.stage.embeds
        if model.stage.has_head:
            self._tokens = self._full(largest, 0, torch.int64)
            self._logits = torch.empty(
                (largest, model.config.vocab_size), dtype=model.logits_dtype, device=self._device
            )
            self._known_logits = self._logits[:, : model.known_tokens]
            # Ranks that draw from their own parts gather them only for what needs all.
            self._shard = model.vocab_shard()
            width = model.vocab_part if self._shard is not None else 0
            self._part = torch.empty(
                (largest, width), dtype=model.logits_dtype, device=self._device
            )
        else:
            self._states = torch.empty(shape, dtype=model.dtype, device=self._device)
        attention.prepare_capture(largest, table.pages.shape[1])
        self._recorder = recorder
        self._prefixes: PrefixInputs | None = None
        if attention.prefix_tile_rows > 1:
            self._prefixes = PrefixInputs(table, largest, attention.prefix_tile_rows)
        self._grouped: _Rows | None = None  # `_prefixes` holds theirs
        self._ungrouped: deque[_Rows] = deque(maxlen=_REMEMBERED)  # have no prefixes in common
        self._forward: dict[tuple[int, bool], Replay] = {}
        self._sample: dict[tuple[int, int], Replay] = {}

    def _full(self, length: int, value: int, dtype: torch.dtype) -> Tensor:
        return torch.full((length,), value, dtype=dtype, device=self._device)

    @torch.inference_mode()
    def capture(self, report: Report) -> None:
        """Capture every size, the largest first: smaller ones then fit the memory it took."""
        with no_collection():
            for done, size in enumerate(reversed(self.sizes)):
                report(f"capturing decode of {size}", done / len(self.sizes))
                self._capture(size)

    def _capture(self, size: int) -> None:
        record = self._recorder.record
        for grouped in (False, True) if self._groups(size) else (False,):
            batch = self._batch([self._table.dummy_row] * size, size, grouped)
            self._attention.plan_captured(batch, size)
            self._forward[size, grouped] = record(lambda batch=batch: self._compute(batch, size))  # type: ignore[misc]
        for need in _SAMPLING if self._model.stage.has_head else ():
            self._sample[size, need] = record(lambda need=need: self._draw(size, need))  # type: ignore[misc]

    def _groups(self, size: int) -> bool:
        return self._prefixes is not None and size >= _FEWEST_GROUPED

    def _gather_inputs(self, size: int) -> None:
        table = self._table
        ops.gather_rows(
            self._rows[:size],
            table.lens,
            table.tokens,
            table.pages,
            table.page_size,
            rows32=self._rows32[:size],
            kv_lens=self._kv_lens[:size],
            positions=self._positions[:size],
            token_ids=self._token_ids[:size],
            slots=self._slots[:size],
            embedding=self._embedding,
            hidden=self._hidden[:size],
            window_pages=table.window_pages,
            window_slots=None if self._window_slots is None else self._window_slots[:size],
        )

    def _compute(self, batch: AttentionBatch, size: int) -> None:
        self._gather_inputs(size)
        hidden = self._model.hidden_states(
            self._token_ids[:size],
            batch,
            self._attention,
            embedded=self._hidden[:size] if self._begins_with_hidden else None,
        )
        if not self._model.stage.has_head:
            self._states[:size].copy_(hidden)
        elif self._shard is not None:
            self._model.part_of_logits(hidden, out=self._part[:size])
        else:
            self._model.logits(hidden, out=self._logits[:size])

    def _gather_logits(self, size: int) -> None:
        if self._shard is not None:
            self._model.whole_logits(self._part[:size], out=self._logits[:size])

    def _draw(self, size: int, need: int) -> None:
        shard, logits = self._shard, self._known_logits[:size]
        if need & SamplingFeatures.FILTER:
            self._gather_logits(size)
            shard = None
        elif shard is not None:
            logits = self._model.known_part(self._part[:size])
        rows, out = self._rows[:size], self._tokens[:size]
        self._sampler.draw_and_append(logits, rows, need, out, shard)

    def _batch(self, rows: list[int], size: int, grouped: bool) -> AttentionBatch:
        return AttentionBatch(
            num_prefills=0,
            num_decodes=len(rows),
            num_prefill_tokens=0,
            rows=self._rows32[:size],
            qo_indptr=self._indptr[: size + 1],
            kv_lens=self._kv_lens[:size],
            page_table=self._table.pages,
            slots=self._slots[:size],
            positions=self._positions[:size],
            kv_lens_host=[self._table.host_lens[row] for row in rows],
            prefixes=self._prefixes.tensors if grouped and self._prefixes is not None else None,
            window_table=self._table.window_pages,
            window_slots=None if self._window_slots is None else self._window_slots[:size],
        )

    def release(self) -> None:
        """Drop the graphs: NCCL does not end a group while a graph holds its collectives."""
        self._forward.clear()
        self._sample.clear()

    def fits(self, rows: list[int]) -> bool:
        return len(rows) <= self.sizes[-1]

    def forward(self, rows: list[int], received: Tensor | None = None) -> None:
        """A decode step of `rows` up to its logits, or to the states for the stage after.

        Args:
            received: [S, hidden], of the stage before; None: the first has none.
        """
        self.replays += 1
        size = self._padded(rows)
        self._set_rows(rows, size)
        if received is not None:
            self._hidden[: len(rows)].copy_(received)
            self._hidden[len(rows) : size].zero_()
        grouped = self._group_rows(rows, size)
        if not self._recorder.on_cuda:  # where attention plans from what is gathered
            self._gather_inputs(size)
        self._attention.plan_captured(self._batch(rows, size, grouped), size)
        self._forward[size, grouped]()

    def states(self, count: int) -> Tensor:
        """[count, hidden] of the step that was forwarded last, until the next."""
        return self._states[:count]

    def rows(self, count: int) -> Tensor:
        """[count] int64, those of the step that was forwarded last, until the next."""
        return self._rows[:count]

    def sample(
        self, rows: list[int], fetched: Callable[[], None], masks: TokenMasks | None = None
    ) -> Sampled:
        """The rest of the step that was forwarded last.

        Args:
            fetched: makes the stream wait until the samples of the step before, which lie where
                those of this one go, have been copied away.
            masks: of some of the rows.
        """
        count, size = len(rows), self._padded(rows)
        need = self._sampler.need(rows)
        if need & _EAGER or (masks is not None and self._shard is not None):
            self._gather_logits(count)
            logits = self._known_logits[:count]
            return self._sampler.sample(logits, self._rows[:count], rows, masks)
        if masks is not None:
            masks.apply(self._known_logits)
        fetched()
        self._sample[size, need]()
        return Sampled(self._tokens[:count])

    def _padded(self, rows: list[int]) -> int:
        """The size of the ladder that is replayed."""
        return self.sizes[bisect_left(self.sizes, len(rows))]

    def _set_rows(self, rows: list[int], size: int) -> None:
        """Bring the static row list up to date; steady batches send nothing."""
        padded = rows + [self._table.dummy_row] * (size - len(rows))
        if self._rows_host[:size] != padded:
            self._rows[:size].copy_(to_device(np.array(padded, dtype=np.int64), self._device))
            self._rows_host[:size] = padded

    def _group_rows(self, rows: list[int], size: int) -> bool:
        """Bring the prefixes that rows have in common up to date; whether there are any."""
        if not self._groups(size) or self._prefixes is None:
            return False
        # The same rows of the table may hold other requests than before.
        now = self._table.entered, rows
        if now == self._grouped:
            return True
        if now in self._ungrouped:
            return False
        grouped = self._prefixes.fill(rows)
        self._grouped = now if grouped else None
        if not grouped:
            self._ungrouped.append(now)
        return grouped

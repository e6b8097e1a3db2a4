"""Small steps with prefill chunks at fixed token counts: CUDA graphs, captured once and replayed.

Launched one by one, the kernels of such a step take the CPU longer than the GPU. Its chunks and
decodes lie in static buffers of fixed capacity, so that one graph serves any of them up to its
number of tokens. Sampling, of any shape, stays outside, as does what stages of a pipeline send.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from radixgrove.kernels.linear_candidates import BUCKETS
from radixgrove.worker.attention.base import AttentionBackend, AttentionBatch, PaddedBatch
from radixgrove.worker.attention.decode import PADDED_CHUNKS
from radixgrove.worker.execution.graphs import Recorder, Replay, Report, no_collection
from radixgrove.worker.execution.inputs import StepInputs
from radixgrove.worker.execution.table import RequestTable
from radixgrove.worker.models.decoder import Decoder
from radixgrove.worker.plan import StepPlan

# Larger steps keep a GPU busy for as long as they take to launch.
_LARGEST = 1024
_SMALLEST = 64
# Few programs share a chunk's long context, which FlashInfer's kernels do better.
_LONGEST_CONTEXT = 8192


def token_ladder(largest: int) -> list[int]:
    """Token counts to capture, of steps of up to `largest` tokens: those that products are tuned
    for, since the kernel that is best at one count may be bad at another."""
    largest = min(largest, _LARGEST)
    return [size for size in BUCKETS if _SMALLEST <= size < largest] + [largest]


class MixedGraphs:
    """All sizes of the ladder; `run` takes any step of one token a row that `fits`."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        table: RequestTable,
        recorder: Recorder,
        sizes: list[int],
        max_decodes: int,
    ) -> None:
        self.sizes = sizes
        self.replays = 0  # steps that ran from graphs; tests prove the mode by it
        self._model = model
        self._attention = attention
        self._recorder = recorder
        self._forward: dict[int, Replay] = {}
        device, largest = model.device, sizes[-1]
        self._scratch_slot = table.scratch_slot

        def zeros(length: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(length, dtype=dtype, device=device)

        self._token_ids = zeros(largest, torch.int32)
        shape = largest, model.config.hidden_size
        self._hidden = torch.zeros(shape, dtype=model.dtype, device=device)
        self._received: Tensor | None = None  # of the stage before
        if not model.stage.embeds:
            self._received = torch.zeros(shape, dtype=model.dtype, device=device)
        self._buffers = PaddedBatch(
            chunk_rows=zeros(PADDED_CHUNKS, torch.int32),
            chunk_indptr=zeros(PADDED_CHUNKS + 1, torch.int32),
            chunk_kv_lens=zeros(PADDED_CHUNKS, torch.int32),
            decode_rows=zeros(max_decodes, torch.int32),
            decode_kv_lens=zeros(max_decodes, torch.int32),
            decode_tokens=zeros(max_decodes, torch.int32),
            page_table=table.pages,
            window_table=table.window_pages,
        )
        self._slots = zeros(largest, torch.int64).fill_(self._scratch_slot)
        self._scratch_window_slot = table.scratch_window_slot
        self._window_slots: Tensor | None = None
        if table.window_pages is not None:
            self._window_slots = zeros(largest, torch.int64).fill_(self._scratch_window_slot)
        self._positions = zeros(largest, torch.int64)

    @torch.inference_mode()
    def capture(self, report: Report) -> None:
        """Capture every size, the largest first: smaller ones then fit the memory it took."""
        with no_collection():
            for done, size in enumerate(reversed(self.sizes)):
                report(f"capturing prefill of {size}", done / len(self.sizes))
                nothing = self._batch(size)
                self._attention.plan_padded(self._buffers, nothing)
                self._forward[size] = self._recorder.record(
                    lambda size=size, batch=nothing: self._compute(size, batch)  # type: ignore[misc]
                )

    def _batch(self, size: int) -> AttentionBatch:
        """A step of `size` tokens as the model sees it: what attention needs is planned."""
        buffers = self._buffers
        return AttentionBatch(
            num_prefills=0,
            num_decodes=0,
            num_prefill_tokens=0,
            rows=buffers.chunk_rows[:0],
            qo_indptr=buffers.chunk_indptr[:1],
            kv_lens=buffers.chunk_kv_lens[:0],
            page_table=buffers.page_table,
            slots=self._slots[:size],
            positions=self._positions[:size],
            window_table=buffers.window_table,
            window_slots=None if self._window_slots is None else self._window_slots[:size],
        )

    def _compute(self, size: int, batch: AttentionBatch) -> None:
        hidden = self._model.hidden_states(
            self._token_ids[:size],
            batch,
            self._attention,
            embedded=None if self._received is None else self._received[:size],
        )
        self._hidden[:size].copy_(hidden)

    def fits(self, plan: StepPlan) -> bool:
        chunks = plan.prefills
        return (
            0 < len(chunks) <= PADDED_CHUNKS
            and not plan.bounds
            and plan.num_tokens <= self.sizes[-1]
            and len(plan.decodes) <= len(self._buffers.decode_rows)
            and max(chunk.start + chunk.length for chunk in chunks) <= _LONGEST_CONTEXT
        )

    def run(self, inputs: StepInputs, received: Tensor | None = None) -> Tensor:
        """One step; the states of its tokens, [T, hidden], valid until the next step.

        Args:
            received: [T, hidden], of the stage before; None: the first has none.
        """
        self.replays += 1
        batch = inputs.batch
        tokens = len(inputs.token_ids)
        size = self.sizes[bisect_left(self.sizes, tokens)]
        self._fill(inputs, size)
        if self._received is not None and received is not None:
            self._received[:tokens].copy_(received)
            self._received[tokens:size].zero_()
        self._attention.plan_padded(self._buffers, batch)
        self._forward[size]()
        return self._hidden[:tokens]

    def _fill(self, inputs: StepInputs, size: int) -> None:
        """Bring the static buffers to this step; what is beyond it must be empty, or scratch."""
        buffers, batch = self._buffers, inputs.batch
        tokens, chunks = len(inputs.token_ids), batch.num_prefills
        decodes = batch.num_decodes
        self._token_ids[:tokens].copy_(inputs.token_ids)
        self._positions[:tokens].copy_(batch.positions)
        self._slots[:tokens].copy_(batch.slots)
        self._slots[tokens:size].fill_(self._scratch_slot)
        if self._window_slots is not None and batch.window_slots is not None:
            self._window_slots[:tokens].copy_(batch.window_slots)
            self._window_slots[tokens:size].fill_(self._scratch_window_slot)
        buffers.chunk_rows[:chunks].copy_(batch.rows[:chunks])
        buffers.chunk_kv_lens[:chunks].copy_(batch.kv_lens[:chunks])
        buffers.chunk_indptr[: chunks + 1].copy_(batch.qo_indptr[: chunks + 1])
        buffers.chunk_indptr[chunks + 1 :].fill_(batch.num_prefill_tokens)
        buffers.decode_rows[:decodes].copy_(batch.rows[chunks:])
        buffers.decode_tokens[:decodes].copy_(batch.qo_indptr[chunks:-1])
        buffers.decode_kv_lens[:decodes].copy_(batch.kv_lens[chunks:])
        buffers.decode_kv_lens[decodes:].zero_()

    def release(self) -> None:
        """See `DecodeGraphs.release`."""
        self._forward.clear()

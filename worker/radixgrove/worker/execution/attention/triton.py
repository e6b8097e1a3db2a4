"""Attention by our own Triton kernels: any dtype, float32 too; needs no CUDA compiler on site."""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels.attention import (
    DecodeWorkspace,
    decode_attention,
    extend_attention,
)
from radixgrove.worker.execution.attention.base import AttentionBackend, AttentionBatch, store_kv


class TritonAttention(AttentionBackend):
    """Extend attention for prefill chunks, split-KV decode for the rest of the step."""

    def __init__(
        self, pool: Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float
    ) -> None:
        super().__init__(
            pool, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale
        )
        self._eager = self._captured = self._make_workspace(1)

    def _make_workspace(self, max_batch: int) -> DecodeWorkspace:
        return DecodeWorkspace(
            max_batch, self.num_heads, self.num_kv_heads, self.head_dim, self.pool.device
        )

    def prepare_capture(self, max_batch: int, max_pages: int) -> None:
        """Captured kernels keep addresses: this workspace is not replaced afterwards."""
        self._captured = self._make_workspace(max_batch)

    def plan(self, batch: AttentionBatch) -> None:
        if batch.num_decodes > self._eager.max_batch:
            self._eager = self._make_workspace(2 * batch.num_decodes)
        self._use(batch, self._eager)

    def plan_captured(self, batch: AttentionBatch, padded: int) -> None:
        self._use(batch, self._captured)

    def _use(self, batch: AttentionBatch, workspace: DecodeWorkspace) -> None:
        self._batch = batch
        self._workspace = workspace
        self._longest = max(batch.q_lens_host, default=0)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store_kv(self.pool, layer, self._batch.slots, k, v)
        return self.attend(layer, q)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        batch, pages = self._batch, self.pool[layer]
        prefills, tokens = batch.num_prefills, batch.num_prefill_tokens
        decodes = q.shape[0] - tokens  # the padded size when a graph is captured
        out = torch.empty_like(q)
        if prefills:
            extend_attention(
                q[:tokens],
                pages,
                batch.rows[:prefills],
                batch.qo_indptr[: prefills + 1],
                batch.kv_lens[:prefills],
                batch.page_table,
                self.scale,
                self._longest,
                out=out[:tokens],
            )
        if decodes:
            decode_attention(
                q[tokens:],
                pages,
                batch.rows[prefills : prefills + decodes],
                batch.kv_lens[prefills : prefills + decodes],
                batch.page_table,
                self.scale,
                self._workspace,
                out=out[tokens:],
            )
        return out

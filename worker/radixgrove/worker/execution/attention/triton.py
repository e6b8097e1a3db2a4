"""Attention by our own Triton kernels: any dtype, float32 too; needs no CUDA compiler on site."""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels.attention import extend_attention
from radixgrove.worker.execution.attention.base import AttentionBackend, AttentionBatch
from radixgrove.worker.execution.attention.decode import PagedDecode


class TritonAttention(AttentionBackend):
    """Extend attention for prefill chunks, split-KV decode for the rest of the step."""

    def __init__(
        self, pool: Tensor, *, num_heads: int, num_kv_heads: int, head_dim: int, scale: float
    ) -> None:
        super().__init__(
            pool, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale
        )
        self._decode = PagedDecode(pool, num_heads, scale)

    def prepare_capture(self, max_batch: int, max_pages: int) -> None:
        self._decode.prepare_capture(max_batch)

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._decode.plan(batch.num_decodes)
        self.takes_qkv = self._decode.takes_qkv and not batch.num_prefills

    def plan_captured(self, batch: AttentionBatch, padded: int) -> None:
        self._batch = batch
        self._decode.plan_captured()
        self.takes_qkv = self._decode.takes_qkv

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        batch = self._batch
        prefills, tokens = batch.num_prefills, batch.num_prefill_tokens
        out = torch.empty_like(q)
        if prefills:
            extend_attention(
                q[:tokens],
                self.pool[layer],
                batch.rows[:prefills],
                batch.qo_indptr[: prefills + 1],
                batch.kv_lens[:prefills],
                batch.page_table,
                self.scale,
                max(batch.q_lens_host),
                out=out[:tokens],
            )
        if q.shape[0] > tokens:  # more than the batch has when a graph is captured
            self._decode.run(layer, q[tokens:], batch, out[tokens:])
        return out

    def attend_qkv(
        self,
        layer: int,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        return self._decode.run_qkv(layer, qkv, rotation, q_norm, k_norm, eps, self._batch)

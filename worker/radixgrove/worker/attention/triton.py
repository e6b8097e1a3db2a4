"""Attention by our own Triton kernels: any dtype, float32 too; needs no CUDA compiler on site."""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.kernels.attention import extend_attention
from radixgrove.worker.attention.decode import DecodingBackend


class TritonAttention(DecodingBackend):
    """Extend attention for prefill chunks, split-KV decode for the rest of the step."""

    def attend_eager(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
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

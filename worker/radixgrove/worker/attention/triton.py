"""Attention by our own Triton kernels: any dtype, float32 too; needs no CUDA compiler on site."""

from __future__ import annotations

import torch
from torch import Tensor

from radixgrove.worker.attention.decode import DecodingBackend


class TritonAttention(DecodingBackend):
    """Extend attention for prefill chunks, split-KV decode for the rest of the step."""

    def attend_eager(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        batch = self._batch
        tokens = batch.num_prefill_tokens
        out = torch.empty_like(q)
        if batch.num_prefills:
            self.extend_eager(layer, q[:tokens], out[:tokens], sinks)
        if q.shape[0] > tokens:  # more than the batch has when a graph is captured
            self._decode.run(layer, q[tokens:], batch, out[tokens:], sinks)
        return out

"""Decode attention of the CUDA backends: our split-KV kernel, which needs no plan."""

from __future__ import annotations

import os

from torch import Tensor

from radixgrove.kernels.decode import DecodeWorkspace, decode_attention, rope_decode_attention
from radixgrove.worker.execution.attention.base import AttentionBatch


class PagedDecode:
    """The decode rows of a step, eager or captured, over one pool.

    The kernel reads lengths and pages on the device, so a captured step needs no plan. `takes_qkv`:
    with `RADIXGROVE_FUSED_DECODE=1` it begins with RoPE and the store of K and V where a step has
    nothing but decode rows; they are a kernel of their own otherwise.
    """

    def __init__(self, pool: Tensor, num_heads: int, scale: float) -> None:
        self._pool = pool
        self._num_heads = num_heads
        self._scale = scale
        self._eager = self._captured = self._make_workspace(1)
        self._workspace = self._eager
        self.takes_qkv = os.environ.get("RADIXGROVE_FUSED_DECODE") == "1"

    def _make_workspace(self, max_batch: int) -> DecodeWorkspace:
        kv_heads, head_dim = self._pool.shape[4:]
        return DecodeWorkspace(max_batch, self._num_heads, kv_heads, head_dim, self._pool.device)

    def prepare_capture(self, max_batch: int) -> None:
        """Captured kernels keep addresses: this workspace is not replaced afterwards."""
        self._captured = self._make_workspace(max_batch)

    def plan(self, decodes: int) -> None:
        """Before an eager step of so many decode rows."""
        if decodes > self._eager.max_batch:
            self._eager = self._make_workspace(2 * decodes)
        self._workspace = self._eager

    def plan_captured(self) -> None:
        """Before a step is captured or replayed."""
        self._workspace = self._captured

    def run(self, layer: int, q: Tensor, batch: AttentionBatch, out: Tensor) -> None:
        """Attend with q [D, H, head_dim], the step's decode rows; written to `out`, as q."""
        first, count = batch.num_prefills, q.shape[0]
        decode_attention(
            q,
            self._pool[layer],
            batch.rows[first : first + count],
            batch.kv_lens[first : first + count],
            batch.page_table,
            self._scale,
            self._workspace,
            out=out,
        )

    def run_qkv(
        self,
        layer: int,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        batch: AttentionBatch,
    ) -> Tensor:
        """See `AttentionBackend.attend_qkv`, for a batch of decode rows only.

        A row's position and place in the pages follow from its length, as in the batch's
        `positions` and `slots`.
        """
        cos_sin, _positions = rotation
        count = qkv.shape[0]
        return rope_decode_attention(
            qkv,
            cos_sin,
            self._pool[layer],
            batch.rows[:count],
            batch.kv_lens[:count],
            batch.page_table,
            self._scale,
            self._workspace,
            q_norm,
            k_norm,
            eps,
        )

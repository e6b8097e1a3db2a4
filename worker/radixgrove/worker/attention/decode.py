"""Decode attention of the CUDA backends: our split-KV kernel, which needs no plan."""

from __future__ import annotations

from abc import abstractmethod
from typing import Unpack

import torch
from torch import Tensor

from radixgrove.kernels._triton import next_power_of_2
from radixgrove.kernels.attention import ExtendConfig, extend_attention
from radixgrove.kernels.decode import (
    DecodeWorkspace,
    decode_attention,
    rope_decode_attention,
    tile_rows,
)
from radixgrove.kernels.weight import QuantizedRows
from radixgrove.worker.attention.base import (
    AttentionBatch,
    Geometry,
    GroupBackend,
    PaddedBatch,
)

# Up to here RoPE and the store of K and V inside attention win: 0.8 % at 64 rows, nothing at 1;
# with up to 256 rows they lose 1.4 % (Qwen3-0.6B on an H100).
FUSED_ROWS = 64
PADDED_CHUNKS = 32  # that captured steps have places for
# Of chunks in captured steps: on an H100 the best of 16 for chunks of 60 to 900 tokens.
PADDED_EXTEND = ExtendConfig(block_m=64, stages=2, warps=4, chunks=PADDED_CHUNKS)
_FIRST_ROWS = 256  # of a step, before anyone says how many there may be


class PagedDecode:
    """The decode rows of a step, eager or captured, in the layers of one group.

    The kernel reads lengths and pages on the device, so a captured step needs no plan.
    """

    def __init__(self, pool: Tensor, num_heads: int, scale: float, window: int = 0) -> None:
        """
        Args:
            pool: see `GroupBackend`.
            window: tokens that a row attends to; 0: all.
        """
        self._pool = pool
        self._pages = pool.unbind()
        self._window = window
        self._num_heads = num_heads
        self._scale = scale
        self._eager = self._captured = self._make_workspace(_FIRST_ROWS)
        self._workspace = self._eager

    def _make_workspace(self, max_batch: int) -> DecodeWorkspace:
        kv_heads, head_dim = self._pool.shape[4:]
        return DecodeWorkspace(max_batch, self._num_heads, kv_heads, head_dim, self._pool.device)

    def prepare_capture(self, max_batch: int) -> None:
        """Captured kernels keep addresses: this workspace is not replaced afterwards.

        Eager steps take it too, one after the other with captured ones: kernels are compiled for a
        workspace's size, and none should be while requests wait.
        """
        self._eager = self._captured = self._make_workspace(max_batch)

    def plan(self, decodes: int) -> None:
        """Before an eager step of so many decode rows."""
        if decodes > self._eager.max_batch:
            self._eager = self._make_workspace(next_power_of_2(decodes))
        self._workspace = self._eager

    def plan_captured(self) -> None:
        """Before a step is captured or replayed."""
        self._workspace = self._captured

    def run(
        self, layer: int, q: Tensor, batch: AttentionBatch, out: Tensor, sinks: Tensor | None
    ) -> None:
        """Attend with q [D, H, head_dim], the step's decode rows; written to `out`, as q."""
        first, count = batch.num_prefills, q.shape[0]
        decode_attention(
            q,
            self._pages[layer],
            batch.rows[first : first + count],
            batch.kv_lens[first : first + count],
            batch.page_table,
            self._scale,
            self._workspace,
            prefixes=None if self._window else batch.prefixes,
            window=self._window,
            sinks=sinks,
            out=out,
        )

    def run_padded(
        self, layer: int, q: Tensor, batch: PaddedBatch, out: Tensor, sinks: Tensor | None
    ) -> None:
        """The decodes among q [T, H, head_dim]; written to their places in `out`, as q."""
        decode_attention(
            q,
            self._pages[layer],
            batch.decode_rows,
            batch.decode_kv_lens,
            batch.page_table,
            self._scale,
            self._workspace,
            tokens=batch.decode_tokens,
            window=self._window,
            sinks=sinks,
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
        quantized: QuantizedRows | None,
        sinks: Tensor | None,
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
            self._pages[layer],
            batch.rows[:count],
            batch.kv_lens[:count],
            batch.page_table,
            self._scale,
            self._workspace,
            q_norm,
            k_norm,
            eps,
            window=self._window,
            sinks=sinks,
            quantized=quantized,
        )


class DecodingBackend(GroupBackend):
    """What the backends with `PagedDecode` for their decode rows have in common.

    Steps of up to `FUSED_ROWS` rows that only decode take the projection. The padded size of a
    captured step decides, so that a graph always holds the same way. Captured steps with chunks
    take our extend kernel for these, whatever the backend has for larger ones.
    """

    _batch: AttentionBatch  # as planned last
    _padded: PaddedBatch | None  # as planned last, if that is what was planned last

    def __init__(self, pool: Tensor, **geometry: Unpack[Geometry]) -> None:
        super().__init__(pool, **geometry)
        self._decode = PagedDecode(pool, self.num_heads, self.scale, self.window)
        if self.dtype != torch.float32:  # tiles of float32 do not fit into registers
            self.prefix_tile_rows = tile_rows(self.num_heads, self.num_kv_heads)

    def plan(self, batch: AttentionBatch) -> None:
        self._batch, self._padded = batch, None
        self._decode.plan(batch.num_decodes)
        self.takes_qkv = not batch.num_prefills and batch.num_decodes <= FUSED_ROWS

    def prepare_capture(self, max_batch: int, max_pages: int) -> None:
        self._decode.prepare_capture(max_batch)

    def plan_captured(self, batch: AttentionBatch, padded: int) -> None:
        self._batch, self._padded = batch, None
        self._decode.plan_captured()
        self.takes_qkv = padded <= FUSED_ROWS and batch.prefixes is None

    def plan_padded(self, padded: PaddedBatch, batch: AttentionBatch) -> None:
        self._padded = padded
        self._decode.plan_captured()
        self.takes_qkv = False

    def attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        if self._padded is None:
            return self.attend_eager(layer, q, kv, sinks)
        out = torch.empty_like(q)
        extend_attention(
            q,
            self.pages[layer],
            self._padded.chunk_rows,
            self._padded.chunk_indptr,
            self._padded.chunk_kv_lens,
            self._padded.page_table,
            self.scale,
            max_q_len=len(q),
            window=self.window,
            sinks=sinks,
            config=PADDED_EXTEND,
            out=out,
        )
        self._decode.run_padded(layer, q, self._padded, out, sinks)
        return out

    def extend_eager(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """The planned batch's chunks by our kernel: q [T, H, head_dim], written to `out`, as q."""
        batch = self._batch
        prefills = batch.num_prefills
        extend_attention(
            q,
            self.pages[layer],
            batch.rows[:prefills],
            batch.qo_indptr[: prefills + 1],
            batch.kv_lens[:prefills],
            batch.page_table,
            self.scale,
            max(batch.q_lens_host),
            window=self.window,
            sinks=sinks,
            out=out,
        )

    @abstractmethod
    def attend_eager(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None) -> Tensor:
        """See `AttentionBackend.attend`, for a batch that `plan` or `plan_captured` was given."""

    def attend_qkv(
        self,
        layer: int,
        qkv: Tensor,
        rotation: tuple[Tensor, Tensor],
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        quantized: QuantizedRows | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._decode.run_qkv(
            layer, qkv, rotation, q_norm, k_norm, eps, self._batch, quantized, sinks
        )

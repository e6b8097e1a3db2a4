"""Attention in the layers of several groups of a pool, each by a backend of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from radixgrove.kernels.weight import QuantizedRows
from radixgrove.worker.attention.base import (
    AttentionBackend,
    AttentionBatch,
    GroupBackend,
    PaddedBatch,
)
from radixgrove.worker.attention.kv_pool import KvPool


class GroupedAttention(AttentionBackend):
    """Every backend plans each step; a layer goes to that of its group.

    Backends of groups with a window are given the table and the slots of these, if there are any.
    """

    def __init__(self, pool: KvPool, backends: Sequence[GroupBackend]) -> None:
        """
        Args:
            backends: one a group of the pool.
        """
        super().__init__(pool.pages)
        self._backends = backends
        self._layers = [(backends[group], place) for group, place in pool.places]
        # Groups with a window read no prefix together; the others have to agree on the tiles.
        tiles = {backend.prefix_tile_rows for backend in backends if not backend.window}
        self.prefix_tile_rows = tiles.pop() if len(tiles) == 1 else 1

    def warm_up(self, report: Callable[[str, float | None], None]) -> None:
        for backend in self._backends:
            backend.warm_up(report)
        self.about = "; ".join(dict.fromkeys(b.about for b in self._backends if b.about))

    def plan(self, batch: AttentionBatch) -> None:
        windowed = batch.within_windows()
        for backend in self._backends:
            backend.plan(windowed if backend.window else batch)
        self._agree()

    def prepare_capture(self, max_batch: int, max_pages: int) -> None:
        for backend in self._backends:
            backend.prepare_capture(max_batch, max_pages)

    def plan_captured(self, batch: AttentionBatch, padded: int) -> None:
        windowed = batch.within_windows()
        for backend in self._backends:
            backend.plan_captured(windowed if backend.window else batch, padded)
        self._agree()

    def plan_padded(self, padded: PaddedBatch, batch: AttentionBatch) -> None:
        windowed = padded.within_windows(), batch.within_windows()
        for backend in self._backends:
            backend.plan_padded(*(windowed if backend.window else (padded, batch)))
        self._agree()

    def _agree(self) -> None:
        """On how layers are called for the planned batch; each backend takes either way."""
        self.takes_qkv = all(backend.takes_qkv for backend in self._backends)

    def attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        backend, place = self._layers[layer]
        return backend.attend(place, q, kv, sinks)

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
        backend, place = self._layers[layer]
        return backend.attend_qkv(place, qkv, rotation, q_norm, k_norm, eps, quantized, sinks)

"""What layers are given: the step's context, and where their parameters are allocated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixgrove.worker.attention.base import AttentionBackend
from radixgrove.worker.models.formats.base import ALL_UNQUANTIZED, Formats
from radixgrove.worker.models.ops import Ops, Rotation
from radixgrove.worker.parallel.group import TensorParallel


@dataclass(slots=True)
class StepContext:
    """What a layer needs to know of the step beside its input."""

    group: TensorParallel
    ops: Ops
    attention: AttentionBackend
    rotations: Sequence[Rotation]  # of rotary tables, of which a layer knows its own
    slots: Tensor  # [T] int64: where K and V of each token go
    window_slots: Tensor  # the same of layers with a window
    await_layer: Callable[[int], None] | None = None  # called before a layer reads its pages


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Where parameters are allocated, and in which formats."""

    group: TensorParallel
    dtype: torch.dtype
    device: torch.device
    formats: Formats = ALL_UNQUANTIZED  # of projections
    ep: int = 1  # groups of the ranks, which hold different experts
    kv_scaled: bool = False  # KV is kept in float8, by the checkpoint's scales if it has any

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

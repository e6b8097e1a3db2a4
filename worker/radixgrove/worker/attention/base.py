"""The interface of attention backends: one plan a step, one call a layer.

The decoder and what runs it know `AttentionBackend` alone. A backend proper is a `GroupBackend`: it
attends in the layers of one group of the pool; `GroupedAttention` makes one of several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from radixgrove.kernels.decode import SharedPrefixes
from radixgrove.kernels.weight import QuantizedRows


@dataclass(slots=True, kw_only=True)
class AttentionBatch:
    """One step's geometry: P prefill chunks first, then D decode rows of one token each.

    T = prefill tokens + D. Device tensors may be longer than needed when a graph is captured or
    replayed at a padded batch size; padding rows have `kv_lens` 1 and point at the scratch page.
    Host mirrors exist so that no backend synchronises to plan; they are exact, with steps in flight
    too, since a decode advances every row by one. A step that may yield several tokens a row has
    chunks only, and no step in flight before it.
    """

    num_prefills: int
    num_decodes: int
    num_prefill_tokens: int
    rows: Tensor  # [P + D] int32, row of the page tables
    qo_indptr: Tensor  # [P + D + 1] int32, first token of each row in q
    kv_lens: Tensor  # [P + D] int32, KV length *including* this step's tokens
    page_table: Tensor  # [max_rows, max_pages] int32
    slots: Tensor  # [T] int64, where each token's K and V go: page * page_size + offset
    positions: Tensor  # [T] int64
    q_lens_host: list[int] = field(default_factory=list)  # [P] (decodes are 1 each)
    kv_lens_host: list[int] = field(default_factory=list)  # [P + D]
    prefixes: SharedPrefixes | None = None  # of decode rows, where `prefix_tile_rows` allows
    # The same two of layers with a window, where these have pages of their own. Behind a row's
    # window their table means nothing; None: they have the others'.
    window_table: Tensor | None = None
    window_slots: Tensor | None = None

    def within_windows(self) -> AttentionBatch:
        """The batch as layers with a window have it."""
        if self.window_table is None or self.window_slots is None:
            return self
        return replace(self, page_table=self.window_table, slots=self.window_slots)


@dataclass(slots=True, kw_only=True)
class PaddedBatch:
    """The geometry of a step with chunks and decodes in static buffers, for a captured graph.

    C and D are fixed, whatever the step has: chunks and decodes beyond are empty, which the device
    alone knows.
    """

    chunk_rows: Tensor  # [C] int32, rows of the page table
    chunk_indptr: Tensor  # [C + 1] int32, first token of each chunk
    chunk_kv_lens: Tensor  # [C] int32, new tokens included
    decode_rows: Tensor  # [D] int32
    decode_kv_lens: Tensor  # [D] int32; 0: no decode
    decode_tokens: Tensor  # [D] int32, where each decode's token is in the step
    page_table: Tensor  # [max_rows, max_pages] int32
    window_table: Tensor | None = None  # see `AttentionBatch`

    def within_windows(self) -> PaddedBatch:
        """The batch as layers with a window have it."""
        return self if self.window_table is None else replace(self, page_table=self.window_table)


class Geometry(TypedDict):
    """What a group's backend has to know beside the pool, on one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: NotRequired[torch.dtype]  # of queries and results; the pool's by default
    window: NotRequired[int]  # tokens that are attended to; 0, the default: all
    sinks: NotRequired[bool]  # whether layers have them; by default they do not


class AttentionBackend(ABC):
    """Attention over pages, in all layers of a rank's stage.

    Attributes:
        pages: of each layer, `[2, pages + 1, page_size, kv_heads, head_dim]`, as many as its group
            has (K at index 0, V at 1; the last page is scratch, written by padding and never read),
            in the model's dtype or in float8, which is widened to the model's as it is read.
        takes_qkv: whether layers call `attend_qkv`, which begins with what otherwise comes before
            `attend`. Of the planned batch, and so set by `plan` and `plan_captured`.
    """

    # Decode rows of which a prefix in common is read at once; fewer than 2: batches have none.
    prefix_tile_rows = 1
    about = ""  # which kernels it has, for people; known after `warm_up`

    def __init__(self, pages: Sequence[Tensor]) -> None:
        self.pages = pages
        self.takes_qkv = False

    def warm_up(self, report: Callable[[str, float | None], None]) -> None:  # noqa: B027
        """Compile whatever needs compiling; `report` gets a line and the fraction done.

        Raises:
            RuntimeError: the backend cannot serve here.
        """

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for one forward pass; every layer's `attend` then uses this plan."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attend to the layer's pages, which already hold this step's K and V.

        The decoder stores them first, in the kernel that applies RoPE (the batch's `slots` say
        where). Query i of a chunk at [start, start + length) sees KV positions 0 .. start + i,
        or as many of the last of those as the layer's window has.

        Args:
            q: [T, num_heads, head_dim], RoPE already applied.
            kv: [T, 2 * num_kv_heads, head_dim], this step's K and V as stored, for a backend that
                can do without the pages where nothing else is attended to; rows may be strided.
                Not to be read where pages are float8: K and V have been rounded in them alone.
            sinks: [num_heads] float32, of each head a logit more in its softmax, without a value;
                None: the layer has none.

        Returns:
            [T, num_heads, head_dim], q's dtype.
        """

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
        """Normalise (optionally) and rotate q and k, store k and v, attend; if `takes_qkv`.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], heads of q, then k, then v.
            rotation: what the arithmetic of the backend's device makes of the step's positions.
            q_norm, k_norm: [head_dim] each, both or none. eps: of their RMSNorm.
            quantized: [T, num_heads * head_dim], where to write the result instead, with a scale
                for each head.
            sinks: see `attend`.

        Returns:
            [T, num_heads, head_dim], qkv's dtype or the values of `quantized`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not take projections")

    def prepare_capture(self, max_batch: int, max_pages: int) -> None:  # noqa: B027
        """Allocate static buffers for CUDA graphs of up to `max_batch` decode rows."""

    def plan_captured(self, batch: AttentionBatch, padded: int) -> None:
        """As `plan` for a decode-only batch, before capturing or replaying the graph of `padded`.

        On CUDA only the host's fields of the batch are of this step: the graph fills the others.
        Whatever the graph reads must live in the buffers of `prepare_capture`.
        """
        self.plan(batch)

    def plan_padded(self, padded: PaddedBatch, batch: AttentionBatch) -> None:
        """Before capturing or replaying the graph of a step with chunks.

        Args:
            batch: the same step as it is, for backends where a "replay" is a call.
        """
        self.plan(batch)


class GroupBackend(AttentionBackend):
    """Attention in the layers of one group, which have one geometry and one window.

    Attributes:
        pool: `[layers, 2, pages + 1, page_size, kv_heads, head_dim]`.
    """

    def __init__(self, pool: Tensor, **geometry: Unpack[Geometry]) -> None:
        super().__init__(pool.unbind())
        self.pool = pool
        self.dtype = geometry.get("dtype", pool.dtype)
        self.num_heads = geometry["num_heads"]
        self.num_kv_heads = geometry["num_kv_heads"]
        self.head_dim = geometry["head_dim"]
        self.scale = geometry["scale"]
        self.window = geometry.get("window", 0)
        self.sinks = geometry.get("sinks", False)
        self.page_size = pool.shape[3]

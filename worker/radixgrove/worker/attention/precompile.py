"""Attention's kernels, launched once on next to nothing: each is compiled before it is needed.

The kernels are the ones that `DecodingBackend` and the decoder's RoPE launch, with constants and
strides as a model's steps will have them: whatever differs is compiled again, when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from radixgrove.kernels.attention import ExtendConfig, extend_attention
from radixgrove.kernels.decode import (
    DecodeWorkspace,
    SharedPrefixes,
    decode_attention,
    rope_decode_attention,
    tile_rows,
)
from radixgrove.kernels.rope import rope_store
from radixgrove.kernels.weight import QuantizedRows
from radixgrove.worker.attention.decode import (
    FUSED_ROWS,
    PADDED_CHUNKS,
    PADDED_EXTEND,
)

_MANY = 128  # rows that are neither few nor have a program each
# Chunks of eager steps, for which extend attention has three tiles.
_CHUNK_LENGTHS = (16, 64, 65)
# Tokens for which RoPE has its three tiles.
_ROPE_TOKENS = (1, 64, 512)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Of one group of layers on one rank: what kernels are compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    max_rows: int
    max_pages: int  # of a row
    qk_norm: bool
    dtype: torch.dtype
    kv_dtype: torch.dtype
    extends: bool  # our kernel for chunks of eager steps too
    window: int = 0  # tokens that the layers attend to; 0: all
    quantizes: bool = False  # some layer's result, by heads
    sinks: bool = False


def compile_jobs(shape: AttentionShape, device: torch.device) -> list[Callable[[], object]]:
    """Launches of all variants, which may run in any threads, on one stream."""
    steps = _Steps(shape, device)
    lengths = _CHUNK_LENGTHS if shape.extends else ()
    return [
        *(
            partial(steps.decode, min(rows, shape.max_rows), grouped)
            for rows in (1, _MANY, shape.max_rows)
            for grouped in (False,) + (True,) * (not shape.window)
        ),
        steps.decode_padded,
        partial(steps.rope_decode, 1),
        partial(steps.rope_decode, min(FUSED_ROWS, shape.max_rows)),
        *(
            partial(steps.rope_decode, min(rows, shape.max_rows), quantizes=True)
            for rows in ((1, FUSED_ROWS) if shape.quantizes else ())
        ),
        partial(steps.extend, PADDED_CHUNKS, 1, PADDED_EXTEND),
        *(partial(steps.extend, shape.max_rows, length, None) for length in lengths),
        *(partial(steps.rope_store, tokens) for tokens in _ROPE_TOKENS),
    ]


class _Steps:
    """All rows hold one token, in page 0, which they all overwrite and none reads."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        page = (2, 1, shape.page_size, shape.kv_heads, shape.head_dim)
        self._pages = torch.zeros(page, dtype=shape.kv_dtype, device=device)
        self._table = self._integers(shape.max_rows + 1, shape.max_pages)
        self._workspace = DecodeWorkspace(
            shape.max_rows, shape.heads, shape.kv_heads, shape.head_dim, device
        )
        self._angles = torch.zeros(1, shape.head_dim, device=device)
        norm = torch.ones(shape.head_dim, dtype=shape.dtype, device=device)
        self._norms = (norm, norm) if shape.qk_norm else (None, None)
        self._sinks = torch.zeros(shape.heads, device=device) if shape.sinks else None

    def _integers(self, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device)

    def _queries(self, tokens: int) -> Tensor:
        shape = self._shape
        size = tokens, shape.heads, shape.head_dim
        return torch.zeros(size, dtype=shape.dtype, device=self._device)

    def _projection(self, tokens: int) -> Tensor:
        shape = self._shape
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        return torch.zeros(tokens, width, dtype=shape.dtype, device=self._device)

    def decode(self, rows: int, grouped: bool = False) -> None:
        shape, lens = self._shape, self._integers(rows) + 1
        width = tile_rows(shape.heads, shape.kv_heads)
        prefixes = None
        if grouped and width > 1:
            tiles = max(1, shape.max_rows // 2)
            members = self._integers(tiles, width) - 1
            prefixes = SharedPrefixes(members, self._integers(tiles), self._integers(rows))
        decode_attention(
            self._queries(rows),
            self._pages,
            self._integers(rows),
            lens,
            self._table,
            1.0,
            self._workspace,
            prefixes=prefixes,
            window=self._shape.window,
            sinks=self._sinks,
        )

    def decode_padded(self) -> None:
        rows = self._integers(self._shape.max_rows)
        decode_attention(
            self._queries(1),
            self._pages,
            rows,
            rows,
            self._table,
            1.0,
            self._workspace,
            tokens=rows,
            window=self._shape.window,
            sinks=self._sinks,
        )

    def rope_decode(self, rows: int, *, quantizes: bool = False) -> None:
        shape, lens = self._shape, self._integers(rows) + 1
        quantized = None
        if quantizes:
            width = shape.heads * shape.head_dim
            quantized = QuantizedRows.by_parts(rows, width, shape.head_dim, self._device)
        rope_decode_attention(
            self._projection(rows),
            self._angles,
            self._pages,
            self._integers(rows),
            lens,
            self._table,
            1.0,
            self._workspace,
            *self._norms,
            window=self._shape.window,
            sinks=self._sinks,
            quantized=quantized,
        )

    def extend(self, count: int, longest: int, config: ExtendConfig | None) -> None:
        chunks = self._integers(count + 1)
        extend_attention(
            self._queries(1),
            self._pages,
            chunks[1:],
            chunks,
            chunks[1:],
            self._table,
            1.0,
            longest,
            window=self._shape.window,
            sinks=self._sinks,
            config=config,
        )

    def rope_store(self, tokens: int) -> None:
        places = self._integers(tokens, dtype=torch.int64)
        rope_store(
            self._projection(tokens), self._angles, places, places, self._pages, *self._norms
        )

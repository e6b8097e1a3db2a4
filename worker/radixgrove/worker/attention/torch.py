"""Attention over pages in plain torch: the reference on every device, and the CPU's backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from radixgrove.worker.attention.base import AttentionBatch, GroupBackend

# Queries of a chunk attended at once: bounds the mask at `_QUERY_BLOCK x context`.
_QUERY_BLOCK = 512
# Scores in float32 that are held beside sinks at once, if one query has no more: 64 MiB.
_SCORES = 1 << 24
# Decode rows share one call when padding adds less than this share of their pages.
_PADDING = 0.25


@dataclass(slots=True)
class _Chunk:
    """One prefill chunk: tokens [first, first + length) of the step."""

    first: int
    length: int
    pages: Tensor | None  # [n] int64; None: nothing is attended to before the chunk
    slots: Tensor
    masks: list[Tensor]  # one a query block; none: the causal one will do


@dataclass(slots=True)
class _Group:
    """Decode rows attended together, their pages padded to the longest."""

    tokens: Tensor | slice  # of the step
    pages: Tensor  # [size * n] int64
    gathered: Tensor  # [2, size * n, page_size, KV, D], where each layer's pages are copied
    wide: Tensor  # the same in the model's dtype: `gathered` itself, or what widens it
    k: Tensor  # [size, KV, L, D], the part of `wide` that is attended to
    v: Tensor
    mask: Tensor | None  # [size, 1, 1, L] additive; None: all see all
    # Tokens of `wide` that lie beyond their rows: zeroed, since a weight of 0 does not hide NaN.
    beyond: Tensor | None


class TorchAttention(GroupBackend):
    """Gathers a row's pages, then `scaled_dot_product_attention`.

    A decode's query heads that share a KV head are its "sequence": no KV is repeated for GQA, and
    no causal mask is needed.
    """

    def plan(self, batch: AttentionBatch) -> None:
        table = batch.page_table
        self._chunks = self._plan_chunks(batch, table)
        self._groups = self._plan_groups(batch, table)

    def plan_captured(self, batch: AttentionBatch, padded: int) -> None:
        """Not for CUDA graphs: their replays would not see the next plan's shapes; on a CPU a
        "replay" is a call, and padding rows are decodes of one token."""
        padding = [1] * (padded - batch.num_decodes)
        self.plan(replace(batch, num_decodes=padded, kv_lens_host=[*batch.kv_lens_host, *padding]))

    def _plan_chunks(self, batch: AttentionBatch, table: Tensor) -> list[_Chunk]:
        chunks = []
        first = 0
        for i, length in enumerate(batch.q_lens_host):
            kv_len = batch.kv_lens_host[i]
            behind = self._pages_behind(kv_len - length)
            start = kv_len - length - behind * self.page_size
            pages = None
            if start:
                row = table.index_select(0, batch.rows[i : i + 1])[0]
                pages = row[behind : self._num_pages(kv_len)].long()
            masks, slots = self._masks(start, length), batch.slots[first : first + length]
            chunks.append(_Chunk(first, length, pages, slots, masks))
            first += length
        return chunks

    def _pages_behind(self, position: int) -> int:
        """How many of a row's first pages no query from `position` on sees. They are not read: a
        weight of 0 does not hide NaN, and they may be another row's."""
        return max(0, position + 1 - self.window) // self.page_size if self.window else 0

    def _masks(self, start: int, length: int) -> list[Tensor]:
        """Of a chunk with so many tokens before it that are read."""
        if not (start or self.sinks or 0 < self.window < length):
            return []
        return [
            self._causal_mask(start + begin, min(_QUERY_BLOCK, length - begin))
            for begin in range(0, length, _QUERY_BLOCK)
        ]

    def _causal_mask(self, start: int, queries: int) -> Tensor:
        """Additive [queries, start + queries]: query i sees KV 0 .. start + i, or the window's last
        of those."""
        mask = torch.full(
            (queries, start + queries),
            float("-inf"),
            dtype=self.dtype,
            device=self.pool.device,
        )
        behind = mask.clone().tril_(start - self.window) if self.window else 0.0
        return mask.triu_(start + 1).add_(behind)

    def _plan_groups(self, batch: AttentionBatch, table: Tensor) -> list[_Group]:
        lengths = batch.kv_lens_host[batch.num_prefills :]
        if not lengths:
            return []
        rows = batch.rows[batch.num_prefills : batch.num_prefills + len(lengths)]
        kv_lens = batch.kv_lens[batch.num_prefills : batch.num_prefills + len(lengths)]
        skipped = None
        if self.window:  # lengths are those of what is read, from the first page in it on
            behind = [self._pages_behind(length - 1) for length in lengths]
            lengths = [n - self.page_size * p for n, p in zip(lengths, behind, strict=True)]
            skipped = torch.tensor(behind, device=rows.device)
            kv_lens = kv_lens - self.page_size * skipped
        members = group_by_length(lengths, self.page_size)
        groups = []
        for group in members:
            longest = max(lengths[i] for i in group)
            num_pages = self._num_pages(longest)
            if len(members) == 1:
                chosen: Tensor | slice = slice(
                    batch.num_prefill_tokens, batch.num_prefill_tokens + len(lengths)
                )
                in_rows, in_lens, in_skipped = rows, kv_lens, skipped
            else:
                index = torch.tensor(group, device=rows.device)
                chosen = index + batch.num_prefill_tokens
                in_rows, in_lens = rows[index], kv_lens[index]
                in_skipped = None if skipped is None else skipped[index]
            beyond = None
            uneven = any(lengths[i] != longest for i in group)
            if uneven:
                beyond = self._beyond([lengths[i] for i in group], longest).to(rows.device)
            mask = None
            if uneven or 0 < self.window < longest:
                mask = self._decode_mask(in_lens, longest)
            pages = self._pages_read(table, in_rows, num_pages, in_skipped)
            gathered = self.pool.new_empty((2, pages.shape[0], *self.pool.shape[3:]))
            wide = gathered
            if self.pool.dtype != self.dtype:
                wide = torch.empty_like(gathered, dtype=self.dtype)
            k, v = self._heads_first(wide, len(group), longest)
            groups.append(_Group(chosen, pages, gathered, wide, k, v, mask, beyond))
        return groups

    def _pages_read(
        self, table: Tensor, rows: Tensor, count: int, skipped: Tensor | None
    ) -> Tensor:
        """The first `count` pages of each row, flat, or as many behind those that are `skipped`."""
        own = table.index_select(0, rows)
        if skipped is None:
            return own[:, :count].long().flatten()
        places = skipped[:, None] + torch.arange(count, device=rows.device)
        # A row with fewer pages than the group's longest: what is beyond them is not read.
        return own.gather(1, places.clamp_(max=own.shape[1] - 1)).long().flatten()

    def _decode_mask(self, lengths: Tensor, longest: int) -> Tensor:
        """Additive [rows, 1, 1, longest]: each sees its own KV, or the window's last of that."""
        positions, ends = torch.arange(longest, device=lengths.device), lengths[:, None]
        hidden = positions >= ends
        if self.window:
            hidden |= positions < ends - self.window
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=lengths.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def _beyond(self, lengths: list[int], longest: int) -> Tensor:
        """Which tokens of rows padded to `longest` are no row's own, [n] int64."""
        width = self._num_pages(longest) * self.page_size
        spans = [
            np.arange(row * width + length, row * width + longest)
            for row, length in enumerate(lengths)
        ]
        return torch.from_numpy(np.concatenate(spans))

    def _heads_first(self, pages: Tensor, rows: int, length: int) -> Tensor:
        """[2, rows * n, page_size, KV, D] -> [2, rows, KV, length, D], a view."""
        by_row = pages.view(2, rows, -1, self.num_kv_heads, self.head_dim)
        return by_row[:, :, :length].transpose(2, 3)

    def _num_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def attend(self, layer: int, q: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        pages = self.pages[layer]
        if not self._chunks and len(self._groups) == 1:
            return self._decode(pages, q, self._groups[0], sinks)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for chunk in self._chunks:
            self._prefill(pages, q, chunk, out, sinks)
        for group in self._groups:
            out[group.tokens] = self._decode(pages, q[group.tokens], group, sinks)
        return out

    def _decode(self, kv: Tensor, q: Tensor, group: _Group, sinks: Tensor | None) -> Tensor:
        """[size, H, D] -> [size, H, D]."""
        torch.index_select(kv, 1, group.pages, out=group.gathered)
        if group.wide is not group.gathered:
            group.wide.copy_(group.gathered)
        if group.beyond is not None:
            flat = group.wide.view(2, -1, self.num_kv_heads, self.head_dim)
            flat.index_fill_(1, group.beyond, 0)
        if sinks is not None:
            return _attend_beside_sinks(
                q[:, :, None], group.k, group.v, group.mask, self.scale, sinks
            ).squeeze(2)
        grouped = q.view(q.shape[0], self.num_kv_heads, -1, self.head_dim)
        out = scaled_dot_product_attention(
            grouped, group.k, group.v, attn_mask=group.mask, scale=self.scale
        )
        return out.flatten(1, 2)

    def _prefill(
        self, kv: Tensor, q: Tensor, chunk: _Chunk, out: Tensor, sinks: Tensor | None
    ) -> None:
        queries = q[chunk.first : chunk.first + chunk.length].transpose(0, 1)[None]
        result = out[chunk.first : chunk.first + chunk.length].transpose(0, 1)
        flat = kv.view(2, -1, self.num_kv_heads, self.head_dim)
        if chunk.pages is None:
            own = flat.index_select(1, chunk.slots).to(self.dtype)
            k, v = own.transpose(1, 2).unsqueeze(1)
        else:
            pages = kv.index_select(1, chunk.pages).to(self.dtype)
            k, v = pages.view(2, 1, -1, self.num_kv_heads, self.head_dim).transpose(2, 3)
        if not chunk.masks:
            result.copy_(
                scaled_dot_product_attention(
                    queries, k, v, is_causal=True, scale=self.scale, enable_gqa=True
                )[0]
            )
            return
        for i, mask in enumerate(chunk.masks):
            begin = i * _QUERY_BLOCK
            length, visible = mask.shape
            block = queries[:, :, begin : begin + length], k[:, :, :visible], v[:, :, :visible]
            if sinks is None:
                attended = scaled_dot_product_attention(
                    *block, attn_mask=mask, scale=self.scale, enable_gqa=True
                )
            else:
                attended = self._extend_beside_sinks(*block, mask, sinks)
            result[:, begin : begin + length] = attended[0]

    def _extend_beside_sinks(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor
    ) -> Tensor:
        """Some queries after the other, so that their scores stay below `_SCORES`, each time beside
        what the window lets them see.

        Args:
            q: [1, H, Q, D], of the last tokens of k and v. k, v: [1, KV, L, D]. mask: additive,
                [Q, L]. sinks: [H].
        """
        queries, length = mask.shape
        before = length - queries
        most = min(length, self.window + queries) if self.window else length
        step = max(1, _SCORES // (self.num_heads * most))
        out = torch.empty_like(q)
        for first in range(0, queries, step):
            end = min(first + step, queries)
            begin = max(0, before + first + 1 - self.window) if self.window else 0
            seen = slice(begin, before + end)
            out[:, :, first:end] = _attend_beside_sinks(
                q[:, :, first:end],
                k[:, :, seen],
                v[:, :, seen],
                mask[first:end, seen],
                self.scale,
                sinks,
            )
        return out


def _attend_beside_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor
) -> Tensor:
    """`scaled_dot_product_attention` with a logit more for each head, which has no value.

    Args:
        q: [B, H, Q, D]. k, v: [B, KV, L, D]. mask: additive, [Q, L] or [B, 1, 1, L]. sinks: [H].
    """
    rows, _, queries, _ = q.shape
    kv_heads, length = k.shape[1:3]
    grouped = q.reshape(rows, kv_heads, -1, q.shape[-1])
    # Scaled before: a product in float16 might overflow.
    scores = ((grouped * scale) @ k.transpose(-1, -2)).float()
    scores = scores.view(rows, -1, queries, length)
    if mask is not None:
        scores += mask
    own = sinks[:, None, None].expand(rows, -1, queries, 1)
    weights = torch.cat((scores, own), -1).softmax(-1)[..., :length].to(v.dtype)
    return (weights.reshape(rows, kv_heads, -1, length) @ v).view(q.shape)


def group_by_length(lengths: list[int], page_size: int) -> list[list[int]]:
    """Indices of rows that may share one padded call, so that padding stays a small share.

    Longest first; a row joins the current group while padding it to the group's longest wastes less
    than `_PADDING` of the group's pages.
    """
    pages = [-(-length // page_size) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    wasted = widest = 0
    for i in order:
        if groups:
            wasted += widest - pages[i]
            if wasted <= _PADDING * widest * (len(groups[-1]) + 1):
                groups[-1].append(i)
                continue
        groups.append([i])
        wasted, widest = 0, pages[i]
    return [sorted(group) for group in groups]

"""The request table: what the device keeps of each running request between steps."""

from __future__ import annotations

from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from radixgrove.kernels.accept import accept, accept_reference
from radixgrove.kernels.sample import History
from radixgrove.worker.execution.transfer import to_device
from radixgrove.worker.plan import NewRow, StepPlan


class RequestTable:
    """Tokens, lengths and pages of every row, on the device; plans bring only what changed.

    Row `max_rows` is the dummy row: padding of captured graphs points at it. It always has one
    token and only the scratch pages.

    Attributes:
        tokens: [max_rows + 1, max_model_len + 1] int32, known tokens; a step's samples are appended
            on the device, so that the next step can read them before the host has seen them. What
            stands behind a row's known tokens is what is proposed to follow them.
        lens: [max_rows + 1] int32, known tokens of each row.
        pages: [max_rows + 1, max_pages] int32.
        window_pages: the same of layers with a window, where these have pages of their own, else
            None. Behind a row's window it means nothing.
        host_lens: what `lens` will be at most after all launched steps; exact where each of them
            adds one token a row.
        host_pages: `pages` on the host, [max_rows + 1, max_pages] int32.
        entered: how many rows have been entered so far, which tells one request in a row from the
            next.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_model_len: int,
        page_size: int,
        scratch_page: int,
        scratch_window_page: int | None = None,
        device: torch.device,
    ) -> None:
        """
        Args:
            scratch_window_page: None: layers with a window have no pages of their own.
        """
        self.dummy_row = max_rows
        self.page_size = page_size
        self.scratch_slot = scratch_page * page_size
        max_pages = -(-max_model_len // page_size)
        # One column more than a request can fill: a step in flight may sample past its last token.
        self.tokens = torch.zeros(
            (max_rows + 1, max_model_len + 1), dtype=torch.int32, device=device
        )
        self.lens = torch.ones(max_rows + 1, dtype=torch.int32, device=device)
        self.pages = torch.full(
            (max_rows + 1, max_pages), scratch_page, dtype=torch.int32, device=device
        )
        self.window_pages: Tensor | None = None
        self._scratch_window_page = scratch_window_page or 0
        self.scratch_window_slot = self._scratch_window_page * page_size
        if scratch_window_page is not None:
            self.window_pages = torch.full_like(self.pages, scratch_window_page)
        self.host_lens = [1] * (max_rows + 1)
        self.host_pages = np.full((max_rows + 1, max_pages), scratch_page, dtype=np.int32)
        self.entered = 0
        self._num_pages = [0] * max_rows
        self._device = device
        # For tokens that came from another stage, one a row.
        self._offsets = torch.arange(max_rows + 2, dtype=torch.int64, device=device)
        self._ones = torch.ones(max_rows + 1, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Enter the plan's shrunk rows, new rows, appended pages and window pages."""
        for shrunk in plan.shrunk_rows:
            self.host_lens[shrunk.row] = shrunk.length
            self._num_pages[shrunk.row] = shrunk.pages
        if plan.new_rows:
            self._enter(plan.new_rows)
        if plan.new_rows or plan.appended_pages:
            self._fill_pages(plan)
        if plan.window_pages and self.window_pages is not None:
            self._fill_window_pages(plan.window_pages, self.window_pages)

    def _enter(self, new_rows: list[NewRow]) -> None:
        self.entered += len(new_rows)
        tokens = [np.frombuffer(new.token_ids, dtype="<i4") for new in new_rows]
        known = to_device(np.concatenate(tokens), self._device)
        rows = [new.row for new in new_rows]
        lengths = [len(ids) for ids in tokens]
        packed = to_device(np.array([rows, lengths], dtype=np.int64), self._device)
        row, length = packed[0], packed[1]
        # Where each row begins in the table, less where its tokens begin in `known`.
        shift = row * self.tokens.shape[1] + length - length.cumsum(0)
        places = torch.arange(len(known), device=self._device) + shift.repeat_interleave(
            length, output_size=len(known)
        )
        self.tokens.view(-1).index_copy_(0, places, known)
        self.lens.index_copy_(0, row, length.int())
        if self.window_pages is not None:  # no write goes where the last request of the row had it
            self.window_pages.index_fill_(0, row, self._scratch_window_page)
        for new, count in zip(new_rows, lengths, strict=True):
            self.host_lens[new.row] = count
            self._num_pages[new.row] = len(new.pages)

    def _fill_pages(self, plan: StepPlan) -> None:
        """Pages of the new rows' prefixes, and those that rows were given."""
        width = self.pages.shape[1]
        appended = []
        for row, page in plan.appended_pages:
            appended.append((row * width + self._num_pages[row], page))
            self._num_pages[row] += 1
        parts = [np.array(appended, dtype=np.int64).reshape(-1, 2).T]
        for new in plan.new_rows:
            begin, count = new.row * width, len(new.pages)
            parts.append(
                np.stack([np.arange(begin, begin + count), np.array(new.pages, dtype=np.int64)])
            )
        packed = np.concatenate(parts, axis=1)
        if not packed.size:
            return
        self.host_pages.reshape(-1)[packed[0]] = packed[1]
        places, pages = to_device(packed, self._device)
        self.pages.view(-1).index_copy_(0, places, pages.int())

    def _fill_window_pages(self, entries: list[tuple[int, int, int]], table: Tensor) -> None:
        row, index, page = np.array(entries, dtype=np.int64).T
        places, pages = to_device(np.stack([row * table.shape[1] + index, page]), self._device)
        table.view(-1).index_copy_(0, places, pages.int())

    def append(self, rows: Tensor, sampled: Tensor) -> None:
        """Add each row's sample to its tokens; `rows` [S] int64, `sampled` [S] int64.

        For a CPU, and for samples of another stage; elsewhere on CUDA the kernel that draws a
        sample adds it. `advance` does the host's part.
        """
        if rows.is_cuda:
            count = len(rows)
            bounds = self._offsets[: count + 1], self._ones[:count]
            accept(sampled, *bounds, rows, self.history, most=1)
            return
        known = self.lens.index_select(0, rows)
        flat = rows * self.tokens.shape[1] + known
        self.tokens.view(-1).index_copy_(0, flat, sampled.int())
        self.lens.index_copy_(0, rows, known + 1)
        self.lens[self.dummy_row].fill_(1)

    def append_proven(
        self, rows: Tensor, drawn: Tensor, offsets: Tensor, limits: Tensor, most: int
    ) -> Tensor:
        """Add to each row those of its drawn tokens that what was proposed bears out.

        See `accept`; returns [S] int64, how many each row got.
        """
        if drawn.is_cuda:
            return accept(drawn, offsets, limits, rows, self.history, most=most)
        return accept_reference(drawn, offsets, limits, rows, self.history)

    @property
    def history(self) -> History:
        """Where a kernel adds samples."""
        return History(self.lens, self.tokens, self.dummy_row)

    def advance(self, rows: list[int], bounds: list[int]) -> None:
        """The host's mirror of what a step may have added; without bounds it was one token each."""
        for row, bound in zip(rows, bounds or repeat(1), strict=False):
            self.host_lens[row] += bound

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where K and V of `positions` [T] int64 of `rows` [T] int64 go: [T] int64."""
        return self._places(self.pages, rows, positions)

    def window_slots(self, rows: Tensor, positions: Tensor) -> Tensor | None:
        """The same in layers with a window; None where these have no pages of their own."""
        if self.window_pages is None:
            return None
        return self._places(self.window_pages, rows, positions)

    def _places(self, table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        pages = table[rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

"""An executor without a model: the oracle of the scheduler's tests.

Every KV slot stores the token and position that was written there, so that each step can prove that
what its rows read is what their tokens say. The next token is a pure function of all tokens before
it, so that any wrong page, length or order changes the text. It also holds the scheduler to the
contract of `radixgrove.worker.plan`: rows and pages in use by a step are not reused before it has
been collected.

With window pages every slot of those does the same, and what a row's queries attend to inside the
window is read there as well.

Each sampled row yields as many tokens as `count` says of its bound. KV of what is proposed is junk
until the tokens are there, and everywhere beyond a row's length for good.

Copies between device and host take as long as the test wants: `end_save` and `end_load` end the
oldest. Until then what they write is unreadable, and what they touch must be left alone by all
others; a step that awaits a load sees what it brings.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.messages import TokenLogprobs
from radixgrove.worker.plan import (
    INVALID_TOKEN,
    ExecutorInfo,
    NewRow,
    PageCopies,
    ShrunkRow,
    StepPlan,
    StepResult,
)
from radixgrove.worker.scheduler.rules import mask_words

_EMPTY = -1
_JUNK = -2


def next_token(
    tokens: list[int], seed: int, vocab_size: int, mask: NDArray[np.int32] | None = None
) -> int:
    """What this model says after `tokens`; under a mask, one that this allows."""
    number = zlib.crc32(np.array([seed, *tokens], dtype="<i4").tobytes())
    if mask is None:
        return number % vocab_size
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size])
    return int(allowed[number % len(allowed)]) if len(allowed) else 0  # of a row that has ended


def expected_output(
    prompt: list[int],
    sampling: SamplingParams,
    vocab_size: int,
    allowed: tuple[int, ...] | None = None,
) -> list[int]:
    """The whole answer, computed without batching, cache or pages; of allowed tokens alone."""
    mask = None
    if allowed is not None:
        flags = np.isin(np.arange(32 * mask_words(vocab_size)), allowed)
        mask = np.packbits(flags, bitorder="little").view(np.int32)
    output: list[int] = []
    while len(output) < sampling.max_tokens:
        output.append(next_token(prompt + output, sampling.seed, vocab_size, mask))
        if output[-1] in sampling.stop_token_ids and len(output) > sampling.min_tokens:
            break
    return output


@dataclass
class _Row:
    tokens: list[int]
    prompt_len: int
    pages: list[int]
    sampling: SamplingParams
    window_pages: dict[int, int] = field(default_factory=dict)  # by index of the page
    computed: int = 0
    most: int = 0  # the upper bound of its length that the plans give


@dataclass
class _Step:
    plan: StepPlan
    result: StepResult
    rows: set[int] = field(default_factory=set)
    slack: dict[int, int] = field(default_factory=dict)  # of each sampled row: bound less count
    read: set[int] = field(default_factory=set)
    written: set[int] = field(default_factory=set)
    windows: set[int] = field(default_factory=set)  # window pages that it reads or writes


@dataclass
class _Copy:
    what: PageCopies
    done: bool = False  # a step that awaited it has seen its end, which is yet to be reported


class FakeExecutor:
    """`count` says how many tokens a row gets, of its bound; None: as many."""

    def __init__(self, info: ExecutorInfo, count: Callable[[int], int] | None = None) -> None:
        self.info = info
        self._count = count
        self.launched_steps = 0
        self.running: set[int] = set()  # rows that the scheduler has not released
        self.poison: int | None = None  # what attends to this token becomes NaN
        self.closed = False
        self.masked_rows = 0
        self._masks = np.zeros((0, 0), dtype=np.int32)
        shape = (info.num_pages, info.page_size)
        self._kv_tokens = np.full(shape, _EMPTY, dtype=np.int64)
        self._kv_positions = np.full(shape, _EMPTY, dtype=np.int64)
        windows = (info.num_window_pages, info.page_size)
        self._window_tokens = np.full(windows, _EMPTY, dtype=np.int64)
        self._window_positions = np.full(windows, _EMPTY, dtype=np.int64)
        host = (2, info.num_host_pages, info.page_size)  # tokens and positions
        self._host = np.full(host, _EMPTY, dtype=np.int64)
        self._rows: dict[int, _Row] = {}
        self._flights: deque[_Step] = deque()
        self._forwarded: _Step | None = None  # not sampled yet
        self._saves: deque[_Copy] = deque()
        self._loads: deque[_Copy] = deque()
        self._ended = [0, 0]  # saves, loads

    def launch(self, plan: StepPlan) -> None:
        self.forward(plan)
        self.sample()

    def forward(self, plan: StepPlan) -> None:
        assert self._forwarded is None, "the step before was not sampled"
        assert len(self._flights) < self.info.depth, "more steps in flight than agreed"
        copies = plan.saves or plan.loads
        assert plan.num_tokens > 0 or copies, "an empty step"
        assert (plan.saved, plan.loaded) <= self.copies_ended(), "it relies on what has not ended"
        self.launched_steps += 1
        for shrunk in plan.shrunk_rows:
            self._shrink(shrunk)
        for save in plan.saves:
            self._start_save(save)
        for load in plan.loads:
            self._start_load(load)
        for copy in self._loads:
            if copy.what.copy_id <= plan.awaited:
                self._finish_load(copy)
        for new in plan.new_rows:
            self._enter(new)
        for row, page in plan.appended_pages:
            assert page not in self._copied_pages(), f"page {page} is given out while it is copied"
            for step in self._flights:
                assert page not in step.read, f"page {page} is given out while a step reads it"
                assert page not in step.written, f"page {page} is given out while it is written"
            self._kv_tokens[page] = _EMPTY  # a row that still uses it will notice
            self._kv_positions[page] = _EMPTY
            self._rows[row].pages.append(page)
        entered = {new.row for new in plan.new_rows}
        given = {(row, index) for row, index, _ in plan.window_pages}
        assert len(given) == len(plan.window_pages), "a device writes entries in any order"
        for row, index, page in plan.window_pages:
            self._place(row, index, page, entered=row in entered)

        step = _Step(plan, StepResult(step_id=plan.step_id, tokens=[]))
        sampled = plan.sampled_rows()
        bounds = dict(zip(sampled, plan.bounds or [1] * len(sampled), strict=True))
        assert all(1 <= bound <= self.info.max_row_tokens for bound in bounds.values())
        for chunk in plan.prefills:
            state = self._rows[chunk.row]
            assert chunk.start == state.computed, "a chunk leaves a gap"
            assert chunk.length > 0
            end = chunk.start + chunk.length
            assert end <= len(state.tokens)
            if chunk.sample:
                assert end == len(state.tokens), "a sample before the last known token"
            self._compute(step, chunk.row, end, bounds.get(chunk.row, 1) - 1)
            if state.sampling.prompt_logprobs is not None:
                positions = range(chunk.start + 1, min(end + 1, state.prompt_len))
                step.result.prompt_logprobs[chunk.row] = [
                    TokenLogprobs(logprob=-float(state.tokens[p])) for p in positions
                ]
        assert len(set(plan.decodes)) == len(plan.decodes)
        for row in plan.decodes:
            state = self._rows[row]
            last = len(state.tokens) - 1
            assert state.computed >= last, "a decode leaves a gap"
            state.computed = last
            self._compute(step, row, last + 1, bounds[row] - 1)
        for row, bound in bounds.items():
            if self.info.micro_batches > 1 and not self.info.run_ahead:
                assert all(row not in flight.slack for flight in self._flights), "two decodes"
            self._rows[row].most += bound
            longest = self._longest(row) + bound
            assert self._rows[row].most == longest, "another upper bound was planned"
            step.slack[row] = bound
        self._forwarded = step

    def masks(self, count: int, words: int) -> NDArray[np.int32]:
        assert self._forwarded is not None, "masks of a step that is not there"
        self._masks = np.zeros((count, words), dtype=np.int32)
        return self._masks

    def sample(self, masked: Sequence[int] = ()) -> None:
        masks = dict(zip(masked, self._masks, strict=True)) if masked else {}
        self.masked_rows += len(masks)
        step = self._forwarded
        assert step is not None, "nothing was forwarded"
        self._forwarded = None
        self._flights.append(step)
        if self._count is not None or step.plan.bounds:
            step.result.counts = []
        first = 0
        for row, bound in step.slack.items():
            count = bound if self._count is None else self._count(bound)
            count = count if first not in masks else min(count, 1)
            self._sample(step, row, count, masks.get(first))
            first += bound
            step.slack[row] = bound - count
            if step.result.counts is not None:
                step.result.counts.append(count)

    def collect(self) -> StepResult:
        return self._flights.popleft().result

    def samples(self, row: int) -> bool:
        """Whether a step in flight may yield tokens for the row."""
        return any(row in step.slack for step in self._flights)

    def close(self) -> None:
        self.closed = True

    # ---- copies ----------------------------------------------------------------------------------

    def expert_tokens(self) -> None:
        """It has no experts."""

    def copies_ended(self) -> tuple[int, int]:
        return self._ended[0], self._ended[1]

    @property
    def has_copies(self) -> bool:
        return bool(self._saves or self._loads)

    def end_save(self) -> None:
        if self._saves:
            self._finish_save(self._saves[0])
            self._ended[0] = self._saves.popleft().what.copy_id

    def end_load(self) -> None:
        if self._loads:
            self._finish_load(self._loads[0])
            self._ended[1] = self._loads.popleft().what.copy_id

    def _copied_pages(self) -> set[int]:
        """Device pages that copies may still touch, seen from rank 0."""
        return {page for copy in (*self._saves, *self._loads) for page in copy.what.pages}

    def _start_save(self, save: PageCopies) -> None:
        last = self._saves[-1].what.copy_id if self._saves else self._ended[0]
        assert save.copy_id == last + 1
        assert len(save.pages) == len(save.host_pages) > 0
        for step in self._flights:
            assert step.written.isdisjoint(save.pages), "a page is saved before it is computed"
        for copy in self._loads:
            assert copy.done or set(copy.what.pages).isdisjoint(save.pages), "saved before loaded"
        for copy in (*self._saves, *self._loads):
            assert set(copy.what.host_pages).isdisjoint(save.host_pages), "a host page is in use"
        assert (self._kv_tokens[save.pages] != _EMPTY).all(), "what is saved was never computed"
        self._host[:, save.host_pages] = _EMPTY
        self._saves.append(_Copy(save))

    def _finish_save(self, copy: _Copy) -> None:
        if not copy.done:
            self._host[0, copy.what.host_pages] = self._kv_tokens[copy.what.pages]
            self._host[1, copy.what.host_pages] = self._kv_positions[copy.what.pages]
        copy.done = True

    def _start_load(self, load: PageCopies) -> None:
        last = self._loads[-1].what.copy_id if self._loads else self._ended[1]
        assert load.copy_id == last + 1
        assert len(load.pages) == len(load.host_pages) > 0
        for step in self._flights:
            used = step.read | step.written
            assert used.isdisjoint(load.pages), "a page is loaded into while a step uses it"
        assert self._copied_pages().isdisjoint(load.pages), "a page is in two copies"
        for copy in self._saves:
            ordered = copy.what.copy_id <= load.after
            assert ordered or set(copy.what.host_pages).isdisjoint(load.host_pages), "not saved yet"
        self._kv_tokens[load.pages] = _EMPTY
        self._kv_positions[load.pages] = _EMPTY
        self._loads.append(_Copy(load))

    def _finish_load(self, copy: _Copy) -> None:
        """Those before it end before it, and so do the saves that it follows."""
        for save in self._saves:
            if save.what.copy_id <= copy.what.after:
                self._finish_save(save)
        if not copy.done:
            tokens, positions = self._host[:, copy.what.host_pages]
            assert (tokens != _EMPTY).all(), "a host page is loaded that was never saved"
            self._kv_tokens[copy.what.pages] = tokens
            self._kv_positions[copy.what.pages] = positions
        copy.done = True

    # ---- steps -----------------------------------------------------------------------------------

    def _enter(self, new: NewRow) -> None:
        assert all(new.row not in step.rows for step in self._flights), f"row {new.row} is in use"
        assert 0 <= new.row < self.info.max_rows
        tokens = np.frombuffer(new.token_ids, dtype="<i4").tolist()
        computed = len(new.pages) * self.info.page_size
        assert computed < len(tokens), "nothing left to compute"
        for step in self._flights:
            assert step.written.isdisjoint(new.pages), "a prefix is shared before it is computed"
        state = _Row(tokens, new.prompt_len, list(new.pages), new.sampling)
        state.computed, state.most = computed, len(tokens)
        self._rows[new.row] = state

    def _place(self, row: int, index: int, page: int, *, entered: bool) -> None:
        """The row's page `index` has this window page, shared if the row has entered behind it."""
        state = self._rows[row]
        assert index < len(state.pages), "a window page for a page that is not there"
        # The last token of a row may be computed once more, on a page that it is given anew.
        if index * self.info.page_size < min(state.computed, len(state.tokens) - 1):
            assert entered, "a page that was written gets another window page"
        else:
            used = any(page in step.windows for step in self._flights)
            assert not used, f"window page {page} is given out while a step uses it"
            self._window_tokens[page] = _EMPTY
            self._window_positions[page] = _EMPTY
        state.window_pages[index] = page

    def _longest(self, row: int) -> int:
        """Of a row's length: what one can know before the steps in flight are collected."""
        slack = sum(step.slack.get(row, 0) for step in self._flights)
        return len(self._rows[row].tokens) + slack

    def _shrink(self, shrunk: ShrunkRow) -> None:
        state = self._rows[shrunk.row]
        state.most = shrunk.length
        assert state.most == self._longest(shrunk.row), "the row may be longer"
        assert (state.most - 1) <= shrunk.pages * self.info.page_size, "its pages are too few"
        assert shrunk.pages <= len(state.pages)
        del state.pages[shrunk.pages :]
        for index in [index for index in state.window_pages if index >= shrunk.pages]:
            del state.window_pages[index]

    def _compute(self, step: _Step, row: int, end: int, proposed: int) -> None:
        """Write KV of [computed, end) and of what is proposed next, then read [0, end) back."""
        state = self._rows[row]
        size = self.info.page_size
        most = end + proposed
        assert most <= len(state.pages) * size, f"row {row} has no page for its tokens"
        assert most <= self.info.max_model_len
        used = state.pages[: -(-end // size)]
        self._write(state, range(state.computed, end))
        self._write(state, range(end, most), junk=True)
        written = set(state.pages[state.computed // size : -(-most // size)])
        others = (self._rows[key].pages for key in self.running - {row})
        assert all(written.isdisjoint(pages) for pages in others), "others share the page"
        step.rows.add(row)
        step.read.update(used)
        step.written |= written
        assert self._kv_tokens[used].reshape(-1)[:end].tolist() == state.tokens[:end]
        assert self._kv_positions[used].reshape(-1)[:end].tolist() == list(range(end))
        if self.info.num_window_pages:
            first = max(0, state.computed - self.info.window + 1)
            pages, slots = self._window_slots(state, range(first, end))
            assert self._window_tokens[pages, slots].tolist() == state.tokens[first:end]
            assert self._window_positions[pages, slots].tolist() == list(range(first, end))
            step.windows.update(self._window_slots(state, range(first, most))[0].tolist())
        state.computed = end

    def _write(self, state: _Row, positions: range, *, junk: bool = False) -> None:
        """The row's tokens at `positions`, or junk, wherever they are kept."""
        tokens = _JUNK if junk else state.tokens[positions.start : positions.stop]
        pages, slots = self._slots(state, positions)
        self._kv_tokens[pages, slots] = tokens
        self._kv_positions[pages, slots] = positions
        if self.info.num_window_pages:
            pages, slots = self._window_slots(state, positions)
            self._window_tokens[pages, slots] = tokens
            self._window_positions[pages, slots] = positions

    def _slots(self, state: _Row, positions: range) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Pages of these positions, and their places in them."""
        where = np.array(positions, dtype=np.int64)
        return np.array(state.pages)[where // self.info.page_size], where % self.info.page_size

    def _window_slots(
        self, state: _Row, positions: range
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Window pages of these positions, which all have one."""
        where = np.array(positions, dtype=np.int64)
        indices = (where // self.info.page_size).tolist()
        pages = np.array([state.window_pages[index] for index in indices], dtype=np.int64)
        return pages, where % self.info.page_size

    def _sample(self, step: _Step, row: int, count: int, mask: NDArray[np.int32] | None) -> None:
        state = self._rows[row]
        new: list[int] = []
        for _ in range(count):
            new.append(next_token(state.tokens, state.sampling.seed, self.info.vocab_size, mask))
            state.tokens.append(new[-1])
        if count > 1:
            self._write(state, range(state.computed, len(state.tokens) - 1))
            state.computed = len(state.tokens) - 1
        if self.poison in state.tokens[: state.computed]:
            new = [INVALID_TOKEN] * count
        step.result.tokens += new
        if state.sampling.logprobs is not None:
            step.result.logprobs[row] = [TokenLogprobs(logprob=-float(token)) for token in new]

"""The contract between the scheduler, which decides, and the execution, which computes.

The scheduler never sees a tensor; the execution never sees a request. A *row* is a slot of the
device's request table: its tokens (`rows x max_model_len` int32), its page table and its sampling
state live on the device from its `NewRow` until the next one of the row. Plans carry only what
changed. The same plan, as msgpack, drives every rank of a group.

Tokens of a step: the plan gives each sampled row a *bound* b of at most k tokens
(`ExecutorInfo.max_row_tokens`), and the step yields between 0 and b of them. The device alone knows
how long a row is: L tokens, with KV of the first L - 1 at least. A decode computes KV of positions
L - 1 to L + b - 2, the row's last token and what is proposed to follow it, and leaves the row L + n
tokens long. KV before position L - 1 is never written again; what was written behind the new length
means nothing. With k = 1 nothing is proposed, and a bound is 1.

Steps in flight: the scheduler may plan step N+1 before it has the results of N. It then knows an
upper bound of a row's length, the sum of what it knows and of the bounds in flight, and gives pages
for that. When a step yields less, the bound falls, `shrunk_rows` says to what, and pages beyond it
are the scheduler's again. What it cannot know is that step N ended the row, in which case it
discards the tokens of N+1; so it does with those behind a stop inside a step's tokens. Whatever a
step may read or write (rows, pages) is not reused until that step has been collected.

Which rows share a step: a step holds every decoding row that may go on. A request in lockstep
(`Submit.lockstep`) is not decoded before all its tokens are on the host. With
`ExecutorInfo.micro_batches` above 1 the rows are dealt into so many steps, level in number, and
unless `run_ahead` says that samples reach all stages by themselves that holds for every row.

The two halves of a step: `Executor.forward` computes the logits, `Executor.sample` the tokens. Work
on the host has its place between them: a step with rows that have rules for their tokens is
launched so, and the masks, made from the tokens of the step before, are given to `sample`. Its
forward runs meanwhile.

Window pages: layers that attend to a window of the last tokens need what a page holds of them only
while it is in some row's window. Where `ExecutorInfo.num_window_pages` is above 0 they keep it in a
*window page*, a place of which there are fewer than pages and which the scheduler gives out like
those. A token is written, and attended to from inside a window, only where the page that it lies in
has one. `window_pages` says where: an entry holds for its row until the row ends or its window has
passed. Behind the window entries mean nothing, and may name places that others have been given.

Copies between the device's pages and the host's run beside the steps, saves and loads each in the
order of their ids. Rank 0 alone sees when they end; `saved`, `loaded` and `collected` tell the
others what it relied on, and each rank makes whatever comes after wait for the same on its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from radixgrove.protocol.openai.sampling import SamplingParams
from radixgrove.worker.messages import TokenLogprobs


class NewRow(msgspec.Struct, kw_only=True):
    """A request enters a row, for the first time or again after a preemption."""

    row: int
    token_ids: bytes  # int32 LE: prompt and, after a preemption, what was generated so far
    prompt_len: int  # how many of them are prompt: penalties and `min_tokens` count the others
    pages: list[int]  # pages of the cached prefix, in order
    sampling: SamplingParams


class PrefillChunk(msgspec.Struct, array_like=True):
    """Compute tokens [start, start + length) of a row; KV of [0, start) is in its pages.

    `sample`: the chunk ends the row's known tokens, so its last position yields the next token.
    """

    row: int
    start: int
    length: int
    sample: bool


class PageCopies(msgspec.Struct, array_like=True):
    """One operation between the device's pages and the host's, page by page.

    Saves and loads have ids of their own, each counting up from 1.
    """

    copy_id: int
    pages: list[int]  # of the device
    host_pages: list[int]  # as many
    after: int = 0  # of a load: the last save that wrote any of its host pages


class ShrunkRow(msgspec.Struct, array_like=True):
    """Steps that were collected yielded fewer tokens than their bounds."""

    row: int
    length: int  # the row has at most so many tokens, those of steps in flight included
    pages: int  # it keeps so many of its first pages


class StepPlan(msgspec.Struct, kw_only=True):
    """One forward pass over prefill chunks and decodes together.

    Applied in this order: `shrunk_rows`, `new_rows`, `appended_pages`, `window_pages`, then the
    forward. A decode begins with the last token that the row's table holds, which may be a sample
    of the previous step that has not reached the host yet. `decodes` keeps its order from step to
    step where it can, so that the device reuses its inputs.
    """

    step_id: int
    shrunk_rows: list[ShrunkRow] = []
    new_rows: list[NewRow] = []
    appended_pages: list[tuple[int, int]] = []  # (row, page), in table order
    # (row, index in the row's table, window page); of any page that the row has
    window_pages: list[tuple[int, int, int]] = []
    prefills: list[PrefillChunk] = []
    decodes: list[int] = []
    bounds: list[int] = []  # most tokens of each of `sampled_rows()`; empty: one each
    saves: list[PageCopies] = []  # device to host, of what collected steps have written
    loads: list[PageCopies] = []  # host to device
    # Rank 0 had seen the end of everything up to these when it planned; no rank may see less.
    collected: int = 0  # steps
    saved: int = 0
    loaded: int = 0
    awaited: int = 0  # this step reads what loads up to this one bring, layer by layer

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward computes, proposed ones included."""
        proposed = sum(self.bounds) - len(self.bounds)
        return sum(chunk.length for chunk in self.prefills) + len(self.decodes) + proposed

    def sampled_rows(self) -> list[int]:
        """Rows that may yield tokens, in the order of `StepResult.tokens`."""
        return [chunk.row for chunk in self.prefills if chunk.sample] + self.decodes


INVALID_TOKEN = -1  # sampled from logits that are NaN; the row's table has a token all the same


class StepResult(msgspec.Struct, kw_only=True):
    """What a step sampled: `tokens`, row after row in the order of `StepPlan.sampled_rows()`.

    A token is `INVALID_TOKEN` where it was sampled from NaN.

    `counts` says how many of them each row got, between 0 and its bound; None means one each.
    `logprobs` holds the rows that asked, a list as long as the row's tokens; `prompt_logprobs` maps
    a row to the logprobs of tokens start+1 .. start+length of its chunk (those that exist in the
    prompt).
    """

    step_id: int
    tokens: list[int]
    counts: list[int] | None = None
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}


class ExecutorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler must know of the device; measured or derived at start."""

    num_pages: int  # pages 0 .. num_pages - 1 are the scheduler's to give out
    page_size: int
    max_rows: int
    max_model_len: int
    vocab_size: int
    depth: int  # steps in flight: 1 synchronous, 2 overlapped, more for a pipeline
    max_row_tokens: int = 1  # k: most tokens that a step yields a row
    micro_batches: int = 1  # parts that decoding rows are dealt into, at most `depth`
    run_ahead: bool = False  # of micro-batches: a row's next token may be in flight behind its last
    num_host_pages: int = 0  # of the host tier, the scheduler's to give out as well
    # 0 .. num_window_pages - 1 are the scheduler's to give out, too; 0: layers with a window keep
    # all pages, and plans have no `window_pages`
    num_window_pages: int = 0
    window: int = 0  # tokens of the longest window that layers attend to; 0: none has one


class Executor(Protocol):
    """Runs plans in order. One thread owns it."""

    @property
    def info(self) -> ExecutorInfo: ...

    def launch(self, plan: StepPlan) -> None:
        """Start a step, `forward` and `sample` at once.

        At most `info.depth` steps are launched and not yet collected.
        """
        ...

    def forward(self, plan: StepPlan) -> None:
        """Start a step up to its logits. Before `sample`, older steps alone may be collected."""
        ...

    def masks(self, count: int, words: int) -> NDArray[np.int32]:
        """Masks of the step that was forwarded last, [count, words], for the caller to fill.

        Bit t % 32 of word t // 32 says whether token t may come; tokens beyond the last word may
        not.
        """
        ...

    def sample(self, masked: Sequence[int] = ()) -> None:
        """Start the rest of the step that was forwarded last.

        Args:
            masked: where the step samples, positions row after row in the order of
                `StepPlan.sampled_rows()`, each row with as many as its bound: the position that
                each of `masks` is for. A row with masks gets no tokens beyond its masked positions.
        """
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step that was sampled.

        Raises:
            RuntimeError: a rank died or the step failed as a whole; the engine must end.
        """
        ...

    def copies_ended(self) -> tuple[int, int]:
        """Ids of the last save and the last load that have ended here, with all before them.

        Never waits.
        """
        ...

    def expert_tokens(self) -> NDArray[np.int64] | None:
        """Tokens that each expert was given since the start, [layers, experts], as far as known.

        None without experts. Never waits.
        """
        ...

    def close(self) -> None: ...
